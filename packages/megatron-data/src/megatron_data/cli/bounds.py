"""Options that take numbers within bounds."""

import argparse
from typing import Any


class Bounded(argparse.Action):
    """Stores a number or a list of numbers; a number out of bounds is a usage error.

    Args:
        words: Positional arguments of `argparse.Action`.
        minimum: Smallest allowed number. Defaults to 1.
        exclusive_minimum: Bound below all allowed numbers; replaces `minimum`.
        settings: Keyword arguments of `argparse.Action`.
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
        """Checks the numbers and stores them."""
        for number in values if isinstance(values, list) else (values,):
            name = option_string or self.metavar
            if self._exclusive_minimum is None and not number >= self._minimum:
                parser.error(f"{name} {number}; give at least {self._minimum}")
            if self._exclusive_minimum is not None and not number > self._exclusive_minimum:
                parser.error(f"{name} {number}; give more than {self._exclusive_minimum}")
        setattr(namespace, self.dest, values)
