"""What all commands of this project share: help, errors and exit status.

Five packages have a command. Each holds a copy of this file, so that none depends on another for
it. `tooling/tests/test_command_copies.py` keeps the copies equal, and
`integration_tests/test_command_style.py` tests the behaviour of the installed commands.
"""

import argparse
import logging
import math
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE

_WIDTH = 100
_KINDS: dict[object, str] = {int: "an integer", float: "a number"}


class CommandError(ValueError):
    """Raised for an invalid command line; `lines` has one line for each error."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class Help(argparse.HelpFormatter):
    """A help formatter with at most 100 columns that shows defaults and does not break flags."""

    def __init__(self, prog: str) -> None:
        width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, _WIDTH)).columns)
        super().__init__(prog, max_help_position=38, width=width)

    def _get_help_string(self, action: argparse.Action) -> str:
        """Returns the help of an option with its default, or with ``[required]``."""
        text, default = action.help or "", action.default
        if not action.option_strings or "[default" in text:
            return text
        if action.required:
            return f"{text} [required]"
        if default is None or default is False or default == argparse.SUPPRESS:
            return text
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
        return f"{text} [default {shown}]".replace("%", "%%")

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wraps each line by itself, so that examples keep their line breaks."""
        lines = (textwrap.fill(line, width, break_on_hyphens=False) for line in text.splitlines())
        return textwrap.indent("\n".join(lines), indent)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises each error as one line and suggests the nearest spelling.

    Abbreviated options are not accepted, because a new option can make an abbreviation ambiguous.
    """

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)
        settings.setdefault("formatter_class", Help)
        super().__init__(**settings)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parses a command line; unknown options are reported before missing ones.

        Each unknown option is reported by the parser of the command that received it.
        """
        words = list(sys.argv[1:] if args is None else args)
        if self._subparsers:
            self._check_first_word(words)
        else:
            self.refuse(self.unknown_option_errors(words))
        parsed, unknown = super().parse_known_args(words, namespace)
        unknown = [word for word in unknown if word != "--"]  # before arguments that are no options
        self.refuse([self.unknown_argument_error(word.partition("=")[0]) for word in unknown])
        return parsed, unknown

    def _check_first_word(self, words: Sequence[str]) -> None:
        """Refuses an option of a subcommand that stands before the name of the subcommand.

        Otherwise argparse takes the value of the option for the name.

        Raises:
            CommandError: The first word that is no option of this command starts with a dash.
        """
        known = self._option_string_actions
        word = next((word for word in words if word not in known), "")
        if not word.startswith("-") or word in ("-", "--"):
            return
        name = word.partition("=")[0]
        if nearest(name, known):
            self.error(self.unknown_argument_error(name))
        subcommands = next(one for one in self._actions if isinstance(one.choices, dict))
        what = str(subcommands.metavar).lower()
        self.error(f"give the {what} before {name} (one of {', '.join(subcommands.choices or ())})")

    def unknown_option_errors(self, words: Sequence[str]) -> list[str]:
        """Returns an error line for each of ``words`` that is an option unknown to this command."""
        indices = self.find_unknown_options(words)
        return [self.unknown_argument_error(words[index].partition("=")[0]) for index in indices]

    def find_unknown_options(self, words: Sequence[str]) -> list[int]:
        """Returns the indices in ``words`` of options that this command does not have."""
        end = words.index("--") if "--" in words else len(words)
        options = ((index, word.partition("=")[0]) for index, word in enumerate(words[:end]))
        known = self._option_string_actions
        return [index for index, name in options if name.startswith("--") and name not in known]

    def refuse(self, lines: Sequence[str]) -> None:
        """Raises the given error lines together; does nothing if there are none.

        Raises:
            CommandError: There is at least one line. Equal lines are reported once.
        """
        lines = list(dict.fromkeys(lines))
        if len(lines) == 1:
            self.error(*lines)
        if lines:
            summary = f"{len(lines)} arguments cannot be used; see {self.prog} --help"
            raise CommandError(*lines, summary)

    def unknown_argument_error(self, word: str) -> str:
        """Returns the error line for a word that is not an argument of this command."""
        return f"unknown argument {word}{nearest(word, self._option_string_actions)}"

    def error(self, message: str) -> NoReturn:
        """Raises an error that names the ``--help`` of this command.

        Raises:
            CommandError: Always.
        """
        raise CommandError(f"{message}; see {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Writes a message; unlike argparse, does not hide a broken pipe."""
        (file or sys.stderr).write(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            what = action.option_strings[0] if action.option_strings else str(action.metavar)
            what = what if action.option_strings else what.lower()
            near = nearest(str(value), known)
            self.error(f"unknown {what} {value!r}{near} (known: {', '.join(known)})")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        name = action.option_strings[0] if action.option_strings else action.metavar
        try:
            value = super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            if action.type not in _KINDS:
                raise
            self.error(f"{name} needs {_KINDS[action.type]}, got {arg_string!r}")
        if isinstance(value, float) and not math.isfinite(value):
            self.error(f"{name} needs a finite number, got {arg_string!r}")
        return value


def run_command(
    parser: Parser,
    argv: Sequence[str] | None,
    user_errors: Callable[[], tuple[type[Exception], ...]],
) -> int:
    """Parses a command line, runs its command, and reports an error in one line.

    Args:
        parser: The program's parser. Each command sets the default ``run``, a function of the
            parsed arguments that returns the exit status.
        argv: The arguments after the program's name. Defaults to those of this process if None.
        user_errors: Returns the exceptions that a user can cause. It is called only after an
            exception, so it may import modules that are slow to import.

    Returns:
        The exit status: that of ``run``, 1 after an error, 2 for an invalid command line, 130 after
        Ctrl-C, 141 if the reader of the output has closed it, as ``head`` does.
    """
    try:
        try:
            arguments = parser.parse_args(argv)
            with _warnings_to_stderr(parser.prog):
                status = int(arguments.run(arguments))
        finally:  # also after --help, which raises SystemExit
            sys.stdout.flush()
    except CommandError as error:
        return report_error(parser.prog, error, EXIT_USAGE)
    except BrokenPipeError:
        return discard_stdout()
    except KeyboardInterrupt:
        return report_interrupt(parser.prog)
    except Exception as error:
        if not isinstance(error, (OSError, *user_errors())):
            raise
        return report_error(parser.prog, error)
    return status


@contextmanager
def _warnings_to_stderr(program: str) -> Iterator[None]:
    """Writes warnings of `logging` to standard error, one line each."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter(f"{program}: warning: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def report_error(program: str, error: BaseException | str, status: int = EXIT_FAILURE) -> int:
    """Writes one line ``program: error: ...`` per error to standard error; returns ``status``."""
    lines = error.lines if isinstance(error, CommandError) else [error]
    sys.stderr.writelines(f"{program}: error: {one_line(line)}\n" for line in lines)
    return status


def report_interrupt(program: str) -> int:
    """Reports that Ctrl-C ended the program; returns 130."""
    # On a terminal the cursor is behind ^C, a progress bar or an unfinished line of output.
    sys.stderr.write(f"{os.linesep if sys.stderr.isatty() else ''}{program}: interrupted\n")
    return EXIT_INTERRUPTED


def discard_stdout() -> int:
    """Discards buffered output after a broken pipe, without a message; returns 141."""
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
    return EXIT_BROKEN_PIPE


def one_line(error: BaseException | str) -> str:
    """Returns the message of an error as one line; that of an `OSError` as ``file: reason``."""
    message = str(error)
    if isinstance(error, OSError) and error.strerror:
        message = (
            error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
        )
    return " ".join(message.split())


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean X?"`` for the known word with the nearest spelling, or ``""``."""
    plain = _plain(word)
    length = len(plain)
    best, found = max(1, min(length // 3, 2), length // 4) + 1, ""
    for other in known:
        distance = _edits(plain, _plain(other), best)
        if distance < best:
            best, found = distance, other
    return f"; did you mean {found}?" if found else ""


def _plain(word: str) -> str:
    return word.lstrip("-").replace("_", "-")


def _edits(one: str, other: str, enough: int) -> int:
    """Returns the edit distance of two words, at most ``enough``.

    An edit inserts, removes or replaces a letter, or swaps two adjacent letters.
    """
    if abs(len(one) - len(other)) >= enough:  # so a line of a damaged file takes no time
        return enough
    above: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one):
        before, above, row = above, row, [i + 1]
        for j, target in enumerate(other):
            cost = min(above[j] + (letter != target), above[j + 1] + 1, row[j] + 1)
            if i and j and letter == other[j - 1] and one[i - 1] == target:
                cost = min(cost, before[j - 1] + 1)
            row.append(cost)
    return min(row[-1], enough)
