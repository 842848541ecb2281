"""``megatron-train config``: finds settings, checks configuration files and converts scripts."""

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from megatron_train.cli import from_megatron
from megatron_train.config.files import read_file
from megatron_train.config.flags import Parser, describe
from megatron_train.config.options import Option
from megatron_train.config.run_sections import DEFAULT_KIND, run_options
from megatron_train.errors import TrainError
from megatron_train.megatron_lm.table import megatron_flags

_EXAMPLE = """\
example:
  megatron-train config find warmup
  megatron-train config find fp16
  megatron-train config check run.yaml
  megatron-train config from-megatron train.sh --output run.yaml
"""


def add_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds the command to ``commands``."""
    summary = "find settings, check configuration files, or convert launch scripts to them"
    config = commands.add_parser(
        "config", help=summary, description=summary.capitalize() + ".", epilog=_EXAMPLE
    )
    actions = config.add_subparsers(
        metavar="ACTION", required=True, parser_class=from_megatron.DropFlagParser
    )
    summary = "find settings, and flags of Megatron-LM, by words"
    description = "Show the settings, and the flags of Megatron-LM, that contain all words."
    find = actions.add_parser("find", help=summary, description=description)
    find.add_argument("word", metavar="WORD", nargs="+", help="part of a flag")
    _add_model(find)
    find.set_defaults(run=_find)
    summary = "check files for --config for unknown settings and invalid values"
    check = actions.add_parser("check", help=summary, description=summary.capitalize() + ".")
    check.add_argument("file", metavar="FILE", nargs="+", help="YAML file of settings")
    _add_model(check)
    check.set_defaults(run=_check)
    from_megatron.add_action(actions)


def _add_model(parser: argparse.ArgumentParser) -> None:
    text = f"kind of the model, see megatron-train models list [default {DEFAULT_KIND}]"
    parser.add_argument("--model", metavar="KIND", default=DEFAULT_KIND, help=text)


def _find(arguments: argparse.Namespace) -> int:
    known = run_options(arguments.model)
    words = [_near(word.lower(), known) for word in arguments.word]
    if changed := [
        f"{new!r} instead of {old!r}"
        for old, new in zip(arguments.word, words, strict=True)
        if old.lower() != new
    ]:
        sys.stderr.write(
            f"megatron-train: note: no setting matches; showing {', '.join(changed)}\n"
        )
    options = [o for o in known if _has(f"{o.flag} {o.key} {o.help}", words)]
    for option in options:
        sys.stdout.write(_shown(option))
    own = {option.flag for option in options}
    others = [f for f in megatron_flags().values() if f.flag not in own and _has(f.flag, words)]
    for flag in others:
        sys.stdout.write(flag.message() + "\n")
    if not options and not others:
        raise TrainError(f"no setting contains {' '.join(arguments.word)!r}; try other words")
    return 0


def _near(word: str, options: Sequence[Option]) -> str:
    """Returns ``word`` if it occurs in a setting or flag, otherwise the nearest word that does."""
    texts = [f"{option.flag} {option.key} {option.help}".lower() for option in options]
    texts += [flag.lower() for flag in megatron_flags()]
    if any(word in text for text in texts):
        return word
    parts = sorted({part for text in texts for part in re.findall(r"[a-z0-9]+", text)})
    return next(iter(difflib.get_close_matches(word, parts, cutoff=0.7)), word)


def _has(text: str, words: list[str]) -> bool:
    return all(word in text.lower() for word in words)


def _shown(option: Option) -> str:
    text = textwrap.fill(describe(option), 92, break_on_hyphens=False)
    choices = f" {{{','.join(map(str, option.choices))}}}" if option.choices else ""
    return f"{option.flag}{choices}  ({option.key})\n{textwrap.indent(text, '    ')}\n"


def _check(arguments: argparse.Namespace) -> int:
    for name in arguments.file:
        values = read_file(Path(name), run_options(arguments.model), arguments.model)
        sys.stdout.write(f"{name}: {len(values.given)} settings, all valid\n")
    return 0
