"""All commands have the same style of help, errors, exit status and behaviour in a pipe.

Each test states a rule that applies to every command and option of the parsers.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from megatron_train.config.grouped_help import format_whole_help
from parsers import arguments, commands, console_scripts, parser_of, subcommands

PROPER_NAMES = ("Hugging Face", "Megatron")


SCRIPTS = console_scripts()
PROGRAMS = list(map(parser_of, SCRIPTS.values()))
COMMANDS = [command for program in PROGRAMS for command in commands(program)]
LEAVES = [command for command in COMMANDS if not subcommands(command)]


def each(parsers: list[argparse.ArgumentParser]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("parser", parsers, ids=lambda parser: parser.prog)


def starts_in_lower_case(text: str) -> bool:
    """Returns whether a text starts in lower case, or with a name or an acronym."""
    first = text.split(maxsplit=1)[0]
    return text.startswith(PROPER_NAMES) or not re.fullmatch(r"[A-Z][a-z,;:-]*", first)


def call(words: list[str]) -> int:
    """Returns the exit status of a command that runs in this process."""
    return SCRIPTS[words[0]].load()(words[1:])


@each(COMMANDS)
def test_a_command_has_a_description_and_a_summary(parser: argparse.ArgumentParser) -> None:
    """Checks that a description is made of sentences and a summary is a phrase."""
    assert parser.description
    assert parser.description[0].isupper() and parser.description.endswith(".")
    for action in subcommands(parser):
        assert action.required and re.fullmatch(r"[A-Z]+", str(action.metavar))
        lines = {choice.dest: choice.help or "" for choice in action._choices_actions}
        assert lines.keys() == action.choices.keys()
        for line in lines.values():
            assert line and starts_in_lower_case(line) and not line.endswith(".")


@each(COMMANDS)
def test_an_option_is_explained_by_a_phrase(parser: argparse.ArgumentParser) -> None:
    for action in arguments(parser):
        name = action.option_strings or action.dest
        assert action.help, name
        assert starts_in_lower_case(action.help), name
        assert not action.help.endswith("."), name


@each(COMMANDS)
def test_values_of_options_are_in_capitals_or_a_list_of_choices(
    parser: argparse.ArgumentParser,
) -> None:
    for action in arguments(parser):
        if action.nargs == 0:
            continue
        shown = action.metavar or (action.choices and "{...}")
        assert shown, action.option_strings or action.dest
        assert re.fullmatch(r"[A-Z]+|\{.*\}", str(shown)), action.option_strings or action.dest


def helps(parser: argparse.ArgumentParser) -> list[str]:
    """Returns the help of a command: of all flags, and the one that shows groups if it differs."""
    return list(dict.fromkeys([format_whole_help(parser), parser.format_help()]))


@each(COMMANDS)
def test_defaults_and_required_options_are_in_brackets(parser: argparse.ArgumentParser) -> None:
    text = " ".join(helps(parser)[0].split())
    assert not re.search(r"\(default|None|==SUPPRESS==", text)
    for action in arguments(parser):
        if not action.option_strings or action.default in (None, False, argparse.SUPPRESS):
            continue
        shown = action.default
        if isinstance(shown, list):
            shown = " ".join(map(str, shown))
        assert f"default {shown}]" in text, action.option_strings
    assert not re.search(r"\[default[^\]]*\] \[default", text)
    required = [action for action in arguments(parser) if action.option_strings and action.required]
    assert text.count("[required]") >= len(required)


@each(COMMANDS)
def test_help_is_at_most_a_hundred_columns_wide(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in ("60", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        for text in helps(parser):
            assert max(map(len, text.splitlines())) <= 100
    assert parser.format_help().startswith(f"usage: {parser.prog}")


@each(PROGRAMS)
def test_a_program_prints_its_version(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        call([parser.prog, "--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"{parser.prog} {version(parser.prog)}\n"


@each(LEAVES)
def test_an_unknown_option_is_one_line_with_status_2(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    program = parser.prog.split()[0]
    assert call([*parser.prog.split(), "--halp"]) == 2
    printed = capsys.readouterr()
    wrong = "unknown argument --halp; did you mean --help?"
    assert printed.err == f"{program}: error: {wrong}; see {parser.prog} --help\n"
    assert printed.out == ""


@each([command for command in COMMANDS if subcommands(command)])
def test_a_misspelt_command_is_one_line_with_status_2(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    program = parser.prog.split()[0]
    (action,) = subcommands(parser)
    meant = next(iter(action.choices))
    assert call([*parser.prog.split(), meant + "x"]) == 2
    wrong = f"unknown {str(action.metavar).lower()} '{meant}x'; did you mean {meant}?"
    known = f"(known: {', '.join(action.choices)})"
    error = capsys.readouterr().err
    assert error == f"{program}: error: {wrong} {known}; see {parser.prog} --help\n"
    assert call(parser.prog.split()) == 2
    missing = f"the following arguments are required: {action.metavar}"
    error = capsys.readouterr().err
    assert error == f"{program}: error: {missing}; see {parser.prog} --help\n"


@each([command for command in COMMANDS if subcommands(command)])
def test_an_option_before_the_subcommand_is_one_line_with_status_2(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    program = parser.prog.split()[0]
    (action,) = subcommands(parser)
    first = f"give the {str(action.metavar).lower()} before --far-away"
    known = f"(one of {', '.join(action.choices)})"
    for words in (["--far-away", next(iter(action.choices))], ["--far-away=1"]):
        assert call([*parser.prog.split(), *words]) == 2
        error = capsys.readouterr().err
        assert error == f"{program}: error: {first} {known}; see {parser.prog} --help\n"
    assert call([*parser.prog.split(), "--halp"]) == 2
    wrong = "unknown argument --halp; did you mean --help?"
    error = capsys.readouterr().err
    assert error == f"{program}: error: {wrong}; see {parser.prog} --help\n"


@each(LEAVES)
def test_a_value_of_another_type_is_one_line_with_status_2(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = [
        action
        for action in arguments(parser)
        if action.type in (int, float) and action.option_strings
    ]
    for action in numbers:
        assert call([*parser.prog.split(), action.option_strings[0], "many"]) == 2
        error = capsys.readouterr().err
        if action.type is float:
            for value in ("nan", "-inf"):
                assert call([*parser.prog.split(), f"{action.option_strings[0]}={value}"]) == 2
                wrong = f"{action.option_strings[0]} needs a finite number, got {value!r}"
                assert f"error: {wrong}; see" in capsys.readouterr().err
        kind = "an integer" if action.type is int else "a number"
        wrong = f"{action.option_strings[0]} needs {kind}, got 'many'"
        assert error == f"{parser.prog.split()[0]}: error: {wrong}; see {parser.prog} --help\n"


@each(PROGRAMS)
def test_a_missing_file_is_one_line_with_status_1(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = {
        "megatron-data": "verify {}/nowhere",
        "megatron-ckpt": "verify {}/nowhere",
        "megatron-train": "config check {}/nowhere",
        "megatron-infer": "generate --load {}/nowhere --prompt x",
        "megatron-kernels": "list --device cuda:99",
    }[parser.prog]
    assert call([parser.prog, *words.format(tmp_path).split()]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"{parser.prog}: error: ") and error.count("\n") == 1
    assert "Errno" not in error


@pytest.mark.parametrize(
    "line", [*(f"{name} --help" for name in SCRIPTS), "megatron-train recipes list"]
)
def test_a_closed_pipe_ends_a_command_without_output(line: str) -> None:
    """Checks a pipe such as ``megatron-train recipes list | head -1``."""
    name, *words = line.split()
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [Path(sys.executable).with_name(name), *words],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_another_style_is_noticed() -> None:
    assert starts_in_lower_case("number of layers") and starts_in_lower_case("JSON lines")
    assert not starts_in_lower_case("Number of layers") and not starts_in_lower_case(
        "Tensor-parallel degree"
    )
