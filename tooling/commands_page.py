"""The page of all commands and their options (docs/commands.md), generated from their parsers."""

import argparse
from collections.abc import Iterator
from typing import Any, Final

from parsers import arguments, console_scripts, parser_of, subcommands

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
    for parser in map(parser_of, console_scripts().values()):
        parts.append(f"## {parser.prog}\n\n{parser.description}\n")
        parts += map(_section, _leaves(parser))
    return "\n".join(parts)


def _leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yields the commands without commands below; of those for each kind of model, one."""
    if not subcommands(parser):
        yield parser
    for action in subcommands(parser):
        chosen = dict(action.choices)
        if action.metavar in ("MODEL", "TASK"):
            chosen = {MODEL: chosen[MODEL]}
        for below in chosen.values():
            yield from _leaves(below)


def _section(parser: argparse.ArgumentParser) -> str:
    from megatron_train.config.flags import is_setting

    shown = [action for action in arguments(parser) if not is_setting(action)]
    summary = str(parser.description).partition("\n\n")[0]
    groups = {id(a): g for g in parser._mutually_exclusive_groups for a in g._group_actions}
    rows = [_row(action, groups.get(id(action))) for action in shown]
    if not rows:
        return f"### {parser.prog}\n\n{summary}\n"
    head = "| argument | takes | default | meaning |\n|---|---|---|---|\n"
    return f"### {parser.prog}\n\n{summary}\n\n{head}" + "\n".join(rows) + "\n"


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
