"""Options whose value is a number within bounds; another value is a wrong command line."""

import argparse
from typing import Any


class Bounded(argparse.Action):
    """Stores a number, or a list of them, none of which is out of bounds.

    Args:
        words: those of every option.
        least: the smallest number that is allowed.
        above: what every number is larger than, in place of `least`.
        settings: those of every option.
    """

    def __init__(
        self, *words: Any, least: float = 1, above: float | None = None, **settings: Any
    ) -> None:
        super().__init__(*words, **settings)
        self._least, self._above = least, above

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
            if self._above is None and not number >= self._least:
                parser.error(f"{name} {number}; give at least {self._least}")
            if self._above is not None and not number > self._above:
                parser.error(f"{name} {number}; give more than {self._above}")
        setattr(namespace, self.dest, values)
