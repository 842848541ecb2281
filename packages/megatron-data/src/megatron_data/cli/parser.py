"""A parser that names the nearest option or command when one is misspelt."""

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """`ArgumentParser` with suggestions; options are never completed from a prefix."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse unknown options here, in the parser of the command they were given to."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            word = unknown[0].split("=")[0]
            self.error(f"unrecognized argument {unknown[0]}{_nearest(word, known)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with 2."""
        wrong = re.match(r"argument \S+: invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong:
            choices = re.findall(r"[\w-]+", wrong[2])
            message = f"no {wrong[1]!r}: choose from {', '.join(choices)}"
            message += _nearest(wrong[1], choices)
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _nearest(word: str, choices: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, list(choices), n=1)
    return f"; did you mean {found[0]}?" if found else ""
