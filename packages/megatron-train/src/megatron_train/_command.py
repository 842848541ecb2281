"""The manner that all commands of this project have in common: help, errors and exit status.

Five packages have a command and none of them needs another one for it, so each holds a copy of
this file; `tooling/tests/test_command_copies.py` keeps them equal. What is stated here is tested
from outside by `integration_tests/test_command_style.py`.
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
    """Words that are no command line of this program: one line for each mistake."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class Help(argparse.HelpFormatter):
    """Help at most 100 columns wide that shows defaults and never breaks a flag in two."""

    def __init__(self, prog: str) -> None:
        width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 0)).columns)
        super().__init__(prog, max_help_position=38, width=width)

    def _get_help_string(self, action: argparse.Action) -> str:
        """Adds what an option falls back to, or that it is required."""
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
        """Wraps each line by itself, so that examples keep theirs."""
        lines = (textwrap.fill(line, width, break_on_hyphens=False) for line in text.splitlines())
        return textwrap.indent("\n".join(lines), indent)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises every mistake as one line and names the nearest spelling.

    Options are not completed from a prefix: what works today must not become ambiguous tomorrow.
    """

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)
        settings.setdefault("formatter_class", Help)
        super().__init__(**settings)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parses; report unknown options before missing ones, by the command that they are for."""
        words = list(sys.argv[1:] if args is None else args)
        if not self._subparsers:
            self.refuse(self.refusals(words))
        parsed, unknown = super().parse_known_args(words, namespace)
        self.refuse([self.unknown(word.partition("=")[0]) for word in unknown])
        return parsed, unknown

    def refusals(self, words: Sequence[str]) -> list[str]:
        """Returns a line for each of ``words`` that looks like an option of another command."""
        return [self.unknown(words[place].partition("=")[0]) for place in self.strangers(words)]

    def strangers(self, words: Sequence[str]) -> list[int]:
        """Returns where in ``words`` there are options that this command does not have."""
        end = words.index("--") if "--" in words else len(words)
        options = ((place, word.partition("=")[0]) for place, word in enumerate(words[:end]))
        known = self._option_string_actions
        return [place for place, name in options if name.startswith("--") and name not in known]

    def refuse(self, lines: Sequence[str]) -> None:
        """Raises all that is wrong with a command line at once, if anything is.

        Raises:
            CommandError: with these lines, each of them once.
        """
        lines = list(dict.fromkeys(lines))
        if len(lines) == 1:
            self.error(lines[0])
        if lines:
            summary = f"{len(lines)} arguments cannot be used; see {self.prog} --help"
            raise CommandError(*lines, summary)

    def unknown(self, word: str) -> str:
        """Returns what to say about a word that is no argument of this command."""
        return f"unknown argument {word}{nearest(word, self._option_string_actions)}"

    def error(self, message: str) -> NoReturn:
        """Raises the mistake; the help that is named is the one of the command that was given.

        Raises:
            CommandError: always.
        """
        raise CommandError(f"{message}; see {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Writes; argparse would hide that the reader has gone."""
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
    mistakes: Callable[[], tuple[type[Exception], ...]],
) -> int:
    """Parses, run the command that was given, and tell in one line what went wrong.

    Args:
        parser: The program's parser. Each command sets the default ``run``, a function of the
            parsed arguments that returns the exit status.
        argv: The words behind the program's name; None takes those of this process.
        mistakes: Returns the exceptions that a user can cause. It is called only once something
            was raised, so it may import what a command needs anyway.

    Returns:
        What ``run`` returned; 1 after an error, 2 if the words are no command line, 130 after
        Ctrl-C, 141 if the reader of the output has gone, such as ``head``.
    """
    try:
        try:
            arguments = parser.parse_args(argv)
            with _warnings_told(parser.prog):
                status = int(arguments.run(arguments))
        finally:  # also behind --help, which leaves by SystemExit
            sys.stdout.flush()
    except CommandError as error:
        return tell(parser.prog, error, EXIT_USAGE)
    except BrokenPipeError:
        return broken_pipe()
    except KeyboardInterrupt:
        return interrupted(parser.prog)
    except Exception as error:
        if not isinstance(error, (OSError, *mistakes())):
            raise
        return tell(parser.prog, error)
    return status


@contextmanager
def _warnings_told(program: str) -> Iterator[None]:
    """Shows what is warned of through `logging`, a line each, on standard error."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter(f"{program}: warning: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def tell(program: str, error: BaseException | str, status: int = EXIT_FAILURE) -> int:
    """Writes ``program: error: ...`` to standard error, one line a mistake; returns ``status``."""
    lines = error.lines if isinstance(error, CommandError) else [error]
    sys.stderr.writelines(f"{program}: error: {one_line(line)}\n" for line in lines)
    return status


def interrupted(program: str) -> int:
    """Says that Ctrl-C ended the program; returns 130."""
    # On a terminal the cursor stands behind ^C, a progress bar or half a line of output.
    sys.stderr.write(f"{os.linesep if sys.stderr.isatty() else ''}{program}: interrupted\n")
    return EXIT_INTERRUPTED


def broken_pipe() -> int:
    """Lets what is still buffered for a reader that has gone be lost in silence; returns 141."""
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
    return EXIT_BROKEN_PIPE


def one_line(error: BaseException | str) -> str:
    """Returns a message as one line; a failed system call as ``file: reason``."""
    message = str(error)
    if isinstance(error, OSError) and error.strerror:
        message = (
            error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
        )
    return " ".join(message.split())


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean X?"`` for the known word with the nearest spelling, or nothing."""
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
    """Returns how many edits lead from one word to another, or ``enough`` if no fewer do.

    An edit inserts, removes or replaces a letter, or exchanges two neighbours.
    """
    if abs(len(one) - len(other)) >= enough:
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
