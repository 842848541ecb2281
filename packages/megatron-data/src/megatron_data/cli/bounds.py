"""Options whose value is a number within bounds; another value is a wrong command line."""

import argparse
from typing import Any


class Bounded(argparse.Action):
    """Stores a number, or a list of them, none of which is out of bounds.

    Args:
        words: those of every option.
        minimum: the smallest number that is allowed.
        exclusive_minimum: what every number is larger than, in place of `minimum`.
        settings: those of every option.
    """

    def __init__(
        self,
        *words: Any,
        minimum: float = 1,
        exclusive_minimum: float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*words, **settings)
        self._minimum, self._exclusive_minimum = minimum, exclusive_minimum

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Checks and store."""
        for number in values if isinstance(values, list) else (values,):
            name = option_string or self.metavar
            if self._exclusive_minimum is None and not number >= self._minimum:
                parser.error(f"{name} {number}; give at least {self._minimum}")
            if self._exclusive_minimum is not None and not number > self._exclusive_minimum:
                parser.error(f"{name} {number}; give more than {self._exclusive_minimum}")
        setattr(namespace, self.dest, values)
