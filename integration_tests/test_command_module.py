"""The module that the five packages with a command hold copies of: spelling, help and errors."""

import argparse
import importlib
import io
import logging
import random
import re
import sys
from functools import cache

import pytest
from fuzzing import bounded

PACKAGES = ("ckpt", "data", "infer", "kernels", "train")


@pytest.fixture(scope="module", params=PACKAGES)
def module(request):
    return importlib.import_module(f"megatron_{request.param}._command")


@cache
def edits(one, other):
    """Returns the edit distance by its definition; a swap takes two adjacent letters."""
    if not one or not other:
        return len(one) + len(other)
    found = [
        edits(one[1:], other) + 1,
        edits(one, other[1:]) + 1,
        edits(one[1:], other[1:]) + (one[0] != other[0]),
    ]
    if one[:2] == other[1::-1] and len(one) > 1:
        found.append(edits(one[2:], other[2:]) + 1)
    return min(found)


def test_distances_equal_their_definition_up_to_a_limit(module):
    draw = random.Random(0)
    for _ in range(300):
        one, other = ("".join(draw.choices("abc", k=draw.randrange(7))) for _ in range(2))
        exact = edits(one, other)
        found = [module._edits(one, other, enough) for enough in (exact, exact + 1, exact + 5)]
        assert found == [exact] * 3, (one, other)
        assert exact == 0 or module._edits(one, other, exact - 1) == exact - 1


@pytest.mark.parametrize(
    ("length", "most"),
    [(1, 1), (2, 1), (5, 1), (6, 2), (11, 2), (12, 3), (15, 3), (16, 4), (20, 5)],
)
def test_longer_words_may_have_more_wrong_letters(module, length, most):
    word = "x" * length
    for wrong, found in ((most, True), (most + 1, False)):
        other = "y" * wrong + word[wrong:] if wrong <= length else "y" * length + "z"
        expected = f"; did you mean --{other}?" if found else ""
        assert module.nearest(f"--{word}", [f"--{other}"]) == expected


def test_a_word_of_any_length_is_compared_at_once(module):
    with bounded(cpu_seconds=5.0, megabytes=64):
        assert module.nearest("9" * 50_000, [f"--flag-number-{i}" for i in range(700)]) == ""


def test_of_equally_near_words_the_first_is_meant(module):
    assert module.nearest("--batch", ["--match", "--latch"]) == "; did you mean --match?"
    assert module.nearest("--batch", ["--hatches", "--latch"]) == "; did you mean --latch?"
    assert module.nearest("--seq_length", ["--seq-length"]) == "; did you mean --seq-length?"
    assert module.nearest("--seq-lenght", ["--seq-length"]) == "; did you mean --seq-length?"
    assert module.nearest("word", []) == ""


@pytest.fixture
def parser(module):
    made = module.Parser(prog="tool run")
    made.add_argument("--count", type=int, default=3, help="number of things")
    made.add_argument("--share", type=float, help="share")
    made.add_argument("--names", nargs="+", default=("a", "b"), help="names")
    made.add_argument("--percent", default="5%", help="a part")
    made.add_argument("--on", action="store_true", help="switch")
    made.add_argument("--must", required=True, help="needed")
    made.add_argument(
        "--kind", "--sort", choices=("red", "blue"), default="red", help="its [default red]"
    )
    made.add_argument("word", metavar="WORD", nargs="?", default="w", help="a word")
    made.set_defaults(run=lambda arguments: arguments.count)
    return made


def test_the_words_of_the_process_are_parsed_by_default(module, parser, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tool", "--must", "x", "--count", "5"])
    assert module.run_command(parser, None, lambda: ()) == 5
    assert parser.parse_args().must == "x"


def test_help_shows_defaults_and_what_is_required(parser):
    lines = [" ".join(line.split()) for line in parser.format_help().splitlines()]
    made = " ".join(lines)
    for line in (
        "--count COUNT number of things [default 3]",
        "--share SHARE share",
        "--names NAMES [NAMES ...] names [default a b]",
        "--percent PERCENT a part [default 5%]",
        "--on switch",
        "--must MUST needed [required]",
        "--kind {red,blue}, --sort {red,blue} its [default red]",
        "WORD a word",
    ):
        assert line in made, made
    shown = ["[default 3]", "[default a b]", "[default 5%]", "[default red]"]
    assert re.findall(r"\[default [^]]*\]", made) == shown  # and no None, False or SUPPRESS
    assert made.count("[required]") == 1


def test_help_has_at_most_100_columns_and_keeps_flags_and_lines(module, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    made = module.Parser(
        prog="tool", description="some-words-of-text " * 16, epilog="first line\n  second"
    )
    made.add_argument("--f", help="a long text with --some-flag-of-words " * 9)
    lines = made.format_help().splitlines()
    assert 90 < max(map(len, lines)) <= 100
    assert not [line for line in lines if line.endswith("-")]
    assert lines[-2:] == ["first line", "  second"]
    fits, longer = "a" * 50 + " " + "b" * 49, "a" * 50 + " " + "b" * 50
    made.description = f"{fits}\n{longer}"
    lines = made.format_help().splitlines()
    assert fits in lines and longer not in lines
    monkeypatch.setenv("COLUMNS", "60")
    assert 50 < max(map(len, made.format_help().splitlines())) <= 60


@pytest.mark.parametrize(("first", "longest"), [("aa", 100), ("a", 99)])
def test_lines_of_help_are_filled_up_to_100_columns(module, monkeypatch, first, longest):
    monkeypatch.setenv("COLUMNS", "300")
    made = module.Parser(prog="tool", description=" ".join([first, *["a"] * 60]))
    line, *_ = (line for line in made.format_help().splitlines() if line and "-" not in line)
    assert len(line) == longest


def failure(module, parser, words, status=2):
    """Returns the lines that a command prints to standard error, without the program's name."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", printed)
        assert module.run_command(parser, words, lambda: (KeyError,)) == status
    lines = printed.getvalue().splitlines()
    assert all(line.startswith("tool run: error: ") for line in lines)
    return [line.removeprefix("tool run: error: ") for line in lines]


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["--must", "x", "--cuont", "1"], ["unknown argument --cuont; did you mean --count?"]),
        (["--must", "x", "--far=1"], ["unknown argument --far"]),
        (["--coun", "1"], ["unknown argument --coun; did you mean --count?"]),
        (["--far", "--far=1"], ["unknown argument --far"]),  # equal lines once
        (["--must", "x", "--count", "1.5"], ["--count needs an integer, got '1.5'"]),
        (["--must", "x", "--share", "x"], ["--share needs a number, got 'x'"]),
        (["--must", "x", "--share", "nan"], ["--share needs a finite number, got 'nan'"]),
        (["--must", "x", "--share=-inf"], ["--share needs a finite number, got '-inf'"]),
        (
            ["--must", "x", "--kind", "bleu"],
            ["unknown --kind 'bleu'; did you mean blue? (known: red, blue)"],
        ),
        ([], ["the following arguments are required: --must"]),
        (["--must", "x", "a", "second"], ["unknown argument second"]),
    ],
)
def test_an_invalid_command_line_gives_one_line(module, parser, words, lines):
    assert failure(module, parser, words) == [f"{line}; see tool run --help" for line in lines]


def test_several_errors_come_together(module, parser):
    assert failure(module, parser, ["--far", "1", "--nowhere", "--", "--beyond"]) == [
        "unknown argument --far",
        "unknown argument --nowhere",
        "2 arguments cannot be used; see tool run --help",
    ]
    assert parser.find_unknown_options(["--far", "--count", "3", "-x", "--", "--far"]) == [0]
    parser.refuse([])


def test_the_status_is_that_of_the_command_or_of_its_end(module, parser, capsys):
    def run(error=None, status=0):
        def ends(arguments):
            if error is not None:
                raise error
            return status

        parser.set_defaults(run=ends)
        return module.run_command(parser, ["--must", "x"], lambda: (KeyError,))

    assert run(status=7) == 7 and run() == 0
    assert run(OSError(2, "No such file", "there.txt")) == 1
    assert run(OSError(28, "No space left")) == 1
    assert run(OSError("several\n words")) == 1
    assert run(KeyError("key")) == 1
    assert run(KeyboardInterrupt()) == 130
    lines = ["error: there.txt: No such file", "error: No space left", "error: several words"]
    lines += ["error: 'key'", "interrupted"]
    assert capsys.readouterr().err.splitlines() == [f"tool run: {line}" for line in lines]
    with pytest.raises(IndexError):
        run(IndexError())
    stdout = sys.stdout
    try:
        assert run(BrokenPipeError()) == 141 and sys.stdout is not stdout
    finally:
        sys.stdout = stdout
    assert capsys.readouterr().err == ""


def test_output_that_cannot_be_written_is_noticed_before_the_end(module, parser, monkeypatch):
    class Closed(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    for words in (["--must", "x"], ["--help"]):
        monkeypatch.setattr(sys, "stdout", Closed())
        assert module.run_command(parser, words, lambda: ()) == 141


def test_warnings_are_lines_of_standard_error_during_the_command(module, parser, capsys):
    library = logging.getLogger("some.library")

    def warn(arguments):
        library.warning("careful")
        library.info("all is well")
        return 0

    before = list(logging.getLogger().handlers)
    parser.set_defaults(run=warn)
    library.setLevel(logging.INFO)
    try:
        assert module.run_command(parser, ["--must", "x"], lambda: ()) == 0
    finally:
        library.setLevel(logging.NOTSET)
    assert capsys.readouterr().err == "tool run: warning: careful\n"
    assert logging.getLogger().handlers == before


def test_options_stand_behind_the_name_of_their_command(module):
    program = module.Parser(prog="tool run")
    program.add_argument("--quiet", action="store_true")
    commands = program.add_subparsers(metavar="ACTION", required=True, parser_class=module.Parser)
    for name in ("make", "break"):
        command = commands.add_parser(name)
        command.add_argument("--size", type=int)
        command.set_defaults(run=lambda arguments: 0)
    for words, line in (
        (["--size", "3", "make"], "give the action before --size (one of make, break)"),
        (["--quiet", "--size=3", "make"], "give the action before --size (one of make, break)"),
        (["--quite", "make"], "unknown argument --quite; did you mean --quiet?"),
        (["mak"], "unknown action 'mak'; did you mean make? (known: make, break)"),
        ([], "the following arguments are required: ACTION"),
    ):
        assert failure(module, program, words) == [f"{line}; see tool run --help"]
    ready = ["--quiet", "make", "--size", "3"]
    assert module.run_command(program, ready, lambda: ()) == 0


def test_a_line_break_precedes_an_interrupt_on_a_terminal(module, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    assert module.report_interrupt("tool") == 130
    assert sys.stderr.getvalue() == "\ntool: interrupted\n"
    assert module.report_error("tool", "why", 5) == 5
    assert str(module.CommandError("one", "two")) == "one\ntwo"


def test_abbreviations_are_no_options(module):
    assert module.Parser(prog="x").allow_abbrev is False
    assert issubclass(module.Help, argparse.HelpFormatter)
