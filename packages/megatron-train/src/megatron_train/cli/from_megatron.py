"""``megatron-train config from-megatron``: converts a launch script of Megatron-LM."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_train.atomic_write import write_atomically
from megatron_train.config.files import to_yaml
from megatron_train.config.flags import Parser, add_run_options
from megatron_train.config.resolve import with_flags
from megatron_train.config.run_sections import DEFAULT_KIND, run_options, sections
from megatron_train.config.values import Values
from megatron_train.errors import UsageError, raise_collected
from megatron_train.megatron_lm.launch_script import LaunchCommand, read_script
from megatron_train.megatron_lm.table import megatron_flags
from megatron_train.megatron_lm.translate import TranslatedFlags, apply_megatron_defaults, translate

_EXAMPLE = """\
example:
  megatron-train config from-megatron train_llama3.sh ckpt logs tokenizer.model corpus \\
    --drop --fp8-format --drop --fp8-param-gather --output llama3.yaml
  megatron-train pretrain gpt --config llama3.yaml
"""
_PROGRAMS = {"pretrain_gpt.py": "gpt", "pretrain_bert.py": "bert", "pretrain_t5.py": "t5"}
"""Kinds of models by the programs of Megatron-LM that train them."""


class DropFlagParser(Parser):
    """A parser whose option --drop takes a flag as its value: ``--drop --fp8-format``."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parses the arguments after joining each --drop with the flag that follows it."""
        words: list[str] = []
        for word in args or ():
            if words and words[-1] == "--drop" and word.startswith("--"):
                words[-1] += f"={word}"
            else:
                words.append(word)
        return super().parse_known_args(words, namespace)


def add_action(actions: "argparse._SubParsersAction[DropFlagParser]") -> None:
    """Adds the action to ``actions``."""
    summary = "convert a launch script of Megatron-LM to a configuration file"
    parser = actions.add_parser(
        "from-megatron",
        help=summary,
        description="Convert a launch script of Megatron-LM to a configuration file. The script is "
        "read, not run: variables, arrays, defaults and simple conditions are evaluated, and the "
        "rest is reported.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="launch script in Bash")
    parser.add_argument(
        "script_words",
        metavar="WORD",
        nargs="*",
        default=(),
        help="arguments of the script, $1 first",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="YAML file to write; unset: print it",
    )
    parser.add_argument(
        "--set",
        metavar="VARIABLE",
        action="append",
        help="environment variable of the script, as NAME=VALUE",
    )
    parser.add_argument(
        "--drop",
        metavar="FLAG",
        action="append",
        help="leave out a flag that is planned or refused, which changes the run",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Writes the configuration file and a report on the flags of the script."""
    command = read_script(arguments.script, arguments.script_words, _variables(arguments.set or ()))
    table = megatron_flags()
    dropped = [flag if flag.startswith("--") else f"--{flag}" for flag in arguments.drop or ()]
    kind = _PROGRAMS.get(command.program, DEFAULT_KIND)
    translation = translate(command.arguments, table, dropped, kind)
    values = _values(command, translation, kind)
    report = sys.stderr if arguments.output is None else sys.stdout
    report.write(_report(arguments.script.name, command, translation))
    if any(translation.flags_by_outcome[outcome] for outcome in ("planned", "refused")):
        report.write("note: --drop FLAG leaves a flag out, which changes the run\n")
    raise_collected(translation.errors)
    text = f"about: from {arguments.script.name}\n"
    text += "" if kind == DEFAULT_KIND else f"kind: {kind}\n"
    text += to_yaml(_sections(values, kind))
    if arguments.output is None:
        sys.stdout.write(text)
        return 0
    with write_atomically(arguments.output) as temporary:
        temporary.write_text(text, encoding="utf-8")
    ranks = _ranks(command.launcher)
    start = f"megatron-train pretrain {kind} --config {arguments.output}"
    start += f" --nproc-per-node {ranks}" if ranks > 1 else ""
    report.write(f"wrote {arguments.output}: {start}\n")
    return 0


def _variables(texts: Sequence[str]) -> dict[str, str]:
    given = {"PWD": str(Path.cwd())}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--set needs NAME=VALUE, got {text!r}")
        given[name] = value
    return given


def _values(command: LaunchCommand, translation: TranslatedFlags, kind: str) -> Values:
    """Returns the settings of the accepted flags; adds errors to ``translation``."""
    if command.program not in _PROGRAMS:
        translation.errors.append(
            f"{command.program} is not supported yet; these are: {', '.join(_PROGRAMS)}"
        )
    parser = Parser(prog="from-megatron", add_help=False)
    titles = {name: title for name, (title, _) in sections(kind).items()}
    add_run_options(parser, run_options(kind), titles)
    try:
        namespace = parser.parse_args(translation.arguments)
        return apply_megatron_defaults(translation, with_flags(Values(), namespace, kind))
    except UsageError as error:
        translation.errors += [line for line in error.lines if " flags cannot be used" not in line]
    return Values()


def _sections(values: Values, kind: str) -> dict[str, dict[str, Any]]:
    filled = {name: values.section(name) for name in sections(kind)}
    return {name: content for name, content in filled.items() if content}


def _report(name: str, command: LaunchCommand, translation: TranslatedFlags) -> str:
    counts = translation.counts()
    lines = [f"{name}: {sum(counts.values())} flags of {command.program}, line {command.line}"]
    for outcome, count in counts.items():
        shown = (
            ""
            if outcome in ("accepted", "no effect")
            else _listed(translation.flags_by_outcome[outcome])
        )
        lines.append(f"  {outcome:<10} {count:>4}  {shown}".rstrip())
    lines += [f"note: {note}" for note in translation.notes]
    lines += [f"note: {note}" for note in command.notes]
    if command.unset:
        names = ", ".join(f"${name} (line {line})" for name, line in command.unset.items())
        lines.append(
            f"note: unset variables, taken as empty: {names}; give arguments of the script or --set"
        )
    return "\n".join(lines) + "\n"


def _listed(flags: Sequence[str]) -> str:
    return " ".join(dict.fromkeys(flags))


def _ranks(launcher: Sequence[str]) -> int:
    """Returns the number of ranks that torchrun starts on this machine; 1 if it is not given."""
    words = [part for word in launcher for part in word.split("=", 1)]
    for flag in ("--nproc_per_node", "--nproc-per-node"):
        ranks = words[words.index(flag) + 1] if flag in words[:-1] else ""
        if ranks.isdecimal() and len(ranks) < 6:
            return int(ranks)
    return 1
