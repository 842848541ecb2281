"""The console scripts of all packages, with their commands and arguments."""

import argparse
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

PACKAGES = Path(__file__).parents[1] / "packages"


def console_scripts() -> dict[str, EntryPoint]:
    """Returns the console scripts of the packages in this repository by name."""
    ours = {path.parent.name for path in PACKAGES.glob("*/pyproject.toml")}
    found = {one.name: one for one in entry_points(group="console_scripts") if one.name in ours}
    return dict(sorted(found.items()))


def parser_of(script: EntryPoint) -> argparse.ArgumentParser:
    """Returns the parser of a console script; imports its package."""
    parser: argparse.ArgumentParser = sys.modules[script.load().__module__].build_parser()
    return parser


def subcommands(parser: argparse.ArgumentParser) -> list["argparse._SubParsersAction"]:
    """Returns the arguments that name a command below this one: one or none."""
    return [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yields a command and all commands below it."""
    yield parser
    for action in subcommands(parser):
        for below in action.choices.values():
            yield from commands(below)


def arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Returns the visible arguments of a command that do not ask for help or name a command."""
    if hasattr(parser, "complete"):
        parser.complete()  # the options of a run are added when they are needed
    return [
        action
        for action in parser._actions
        if not isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
        and "--help-all" not in action.option_strings
        and action.help != argparse.SUPPRESS
    ]
