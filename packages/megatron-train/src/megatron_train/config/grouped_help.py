"""Help of commands with hundreds of flags: the groups of flags first, and all on request."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_train import _command

HELP_ALL = "--help-all"


def add_help_of_groups(parser: argparse.ArgumentParser, groups: Mapping[str, Any]) -> None:
    """Adds `HELP_ALL` to a parser.

    Args:
        parser: Parser of a command.
        groups: Groups of flags of the parser by name.
    """
    parser.add_argument(
        HELP_ALL,
        nargs="*",
        metavar="GROUP",
        action=_ShowGroups,
        const=groups,
        default=argparse.SUPPRESS,
        help="show all flags, or those of some groups, and exit",
    )


def format_brief_help(parser: argparse.ArgumentParser, groups: Mapping[str, Any]) -> str:
    """Returns the help of a command with one line for each of ``groups``.

    Args:
        parser: Parser of the command.
        groups: Groups of flags by name.
    """
    formatter = _head(parser)
    brief = list(groups.values())
    for group in parser._action_groups:
        if group not in brief:
            _add_group(formatter, group)
    formatter.start_section(f"groups of flags ({HELP_ALL} GROUP shows those of a group)")
    width = max(map(len, groups)) + 2
    for name, group in groups.items():
        formatter.add_text(_row(name.ljust(width), group, formatter._width - 2))
    formatter.end_section()
    formatter.add_text(parser.epilog)
    return _without_blank_rows(formatter.format_help(), groups)


def format_whole_help(parser: argparse.ArgumentParser, groups: Sequence[Any] = ()) -> str:
    """Returns the help of a command with all flags, or with those of some groups.

    Args:
        parser: Parser of the command.
        groups: Groups of flags of the parser. Defaults to all.
    """
    formatter = _head(parser)
    for group in groups or parser._action_groups:
        _add_group(formatter, group)
    formatter.add_text(parser.epilog)
    return formatter.format_help()


def _head(parser: argparse.ArgumentParser) -> argparse.HelpFormatter:
    """Returns a formatter with the usage and the description of a command."""
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    formatter.add_text(parser.description)
    return formatter


def _add_group(formatter: argparse.HelpFormatter, group: Any) -> None:
    formatter.start_section(group.title)
    formatter.add_text(group.description)
    formatter.add_arguments(group._group_actions)
    formatter.end_section()


def _row(name: str, group: Any, width: int) -> str:
    """Returns the name of a group, the number of its flags and the first of them, in a line."""
    flags = [
        action.option_strings[0]
        for action in group._group_actions
        if action.help != argparse.SUPPRESS
    ]
    row = f"{name}{len(flags):>3} {'flag ' if len(flags) == 1 else 'flags'} "
    for index, flag in enumerate(flags):
        more = ", ..." if index + 1 < len(flags) else ""
        if len(row) + len(flag) + 2 + len(more) > width:
            return row + (", ..." if index else "...")
        row += (", " if index else "") + flag
    return row


def _without_blank_rows(text: str, groups: Mapping[str, Any]) -> str:
    """Returns the help without the blank lines that argparse puts between texts of a section."""
    rows = tuple(f"  {name} " for name in groups)
    paragraphs, joined = text.split("\n\n"), list[str]()
    for paragraph in paragraphs:
        if joined and paragraph.startswith(rows) and joined[-1].splitlines()[-1].startswith(rows):
            joined[-1] += "\n" + paragraph
        else:
            joined.append(paragraph)
    return "\n\n".join(joined)


class _ShowGroups(argparse.Action):
    """Prints the flags of all groups, or of those that are named, and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        names: Sequence[str] = values
        groups: Mapping[str, Any] = self.const
        for name in names:
            if name not in groups:
                known = f"(known: {', '.join(groups)})"
                parser.error(f"unknown group {name!r}{_command.nearest(name, groups)} {known}")
        sys.stdout.write(format_whole_help(parser, [groups[name] for name in names]))
        parser.exit()
