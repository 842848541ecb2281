"""Argument parsing whose errors are one line and name the nearest spelling."""

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations and reports a mistake as one line with status 2."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30),
            **settings,
        )

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse; an unknown option is an error even where a required one is missing as well.

        The parser of a command is called with that command's arguments alone.
        """
        words = list(sys.argv[1:] if args is None else args)
        known = [option for action in self._actions for option in action.option_strings]
        for word in [] if self._subparsers else words:
            option = word.partition("=")[0]
            if option == "--":
                break
            if option.startswith("--") and option not in known:
                self.error(f"unknown option {option}{nearest(option, known)}")
        result, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(f"unknown argument {unknown[0]}{nearest(unknown[0], known)}")
        return result, unknown

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with status 2."""
        program = self.prog.partition(" ")[0]
        print(f"{program}: error: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            what = action.metavar or (action.option_strings or [action.dest])[0]
            self.error(
                f"unknown {str(what).lower()} {value!r}{nearest(str(value), known)} "
                f"(known: {', '.join(known)})"
            )


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` for the nearest known word, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
