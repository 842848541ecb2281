"""The page of all commands and their options (docs/commands.md), generated from their parsers."""

import argparse
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

PACKAGES: Final = ("data", "ckpt", "infer", "kernels", "train")
MODEL: Final = "gpt"
"""The model, and the task, whose commands stand for those of all."""

_INTRODUCTION = """\
# Commands

The console scripts of all packages. `COMMAND --help` prints the same, with examples.

`megatron-train pretrain`, `finetune`, `upcycle`, `plan`, `dry-run` and `prove` also take the
settings of a run ([configuration reference](configuration.md)) of each kind of model. Their tables
here have only what they add, for `gpt`.

`tooling/commands_page.py` generates this page from the parsers, and a test checks that it is up to
date.
"""


def render_commands() -> str:
    """Returns the page as Markdown text."""
    parts = [_INTRODUCTION]
    for package in PACKAGES:
        module = import_module(f"megatron_{package}.cli")
        parser = sys.modules[module.main.__module__].build_parser()
        parts.append(f"## {parser.prog}\n\n{parser.description}\n")
        parts += map(_section, _leaves(parser))
    return "\n".join(parts)


def _leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yields the commands without commands below; of those for each kind of model, one."""
    subcommands = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not subcommands:
        yield parser
    for action in subcommands:
        chosen = dict(action.choices)
        if action.metavar in ("MODEL", "TASK"):
            chosen = {MODEL: chosen[MODEL]}
        for below in chosen.values():
            yield from _leaves(below)


def _section(parser: argparse.ArgumentParser) -> str:
    if hasattr(parser, "complete"):
        parser.complete()  # the options of a run are added when they are needed
    summary = str(parser.description).partition("\n\n")[0]
    groups = {id(a): g for g in parser._mutually_exclusive_groups for a in g._group_actions}
    rows = [_row(action, groups.get(id(action))) for action in parser._actions if _shown(action)]
    if not rows:
        return f"### {parser.prog}\n\n{summary}\n"
    head = "| argument | takes | default | meaning |\n|---|---|---|---|\n"
    return f"### {parser.prog}\n\n{summary}\n\n{head}" + "\n".join(rows) + "\n"


def _shown(action: argparse.Action) -> bool:
    from megatron_train.config import flags

    hidden = action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction)
    of_run = action.dest.startswith(flags._PREFIX)
    return not hidden and not of_run and "--help-all" not in action.option_strings


def _row(action: argparse.Action, group: Any) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    names = names or f"`{action.metavar or action.dest}`"
    text = " ".join(str(action.help).replace("%%", "%").split())
    cells = (names, _takes(action), _default(action, group), text)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


def _takes(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "nothing"
    names = {int: "integer", float: "number"}
    if action.choices is not None:
        what = ", ".join(f"`{choice}`" if choice != "" else "`''`" for choice in action.choices)
    else:
        what = names.get(action.type, "") or str(action.metavar or "text")  # type: ignore[call-overload]
    many = {"+": ", one or more", "*": ", any number", "?": ", or nothing"}
    return what + many.get(str(action.nargs), "" if action.nargs is None else f", {action.nargs}")


def _default(action: argparse.Action, group: Any) -> str:
    if action.required or (not action.option_strings and action.nargs not in ("*", "?")):
        return "required"
    if group is not None and group.required:
        return "one is required"
    default = action.default
    if default in (None, False, argparse.SUPPRESS, (), []) or "[default" in str(action.help):
        return ""
    shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
    return f"`{shown}`"
