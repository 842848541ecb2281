"""The exceptions this package raises for mistakes of its user."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_train._command import CommandError


class TrainError(ValueError):
    """A setting, file or run that megatron-train cannot use; the message is one line."""


class UsageError(TrainError, CommandError):
    """A command line that cannot be understood (exit status 2)."""


class SettingsError(TrainError):
    """Several settings that cannot be used, found at once; the message names the first ones.

    Attributes:
        lines: what there is to say about each.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
        super().__init__("; ".join(lines[:3]) + more)
        self.lines = list(lines)


@contextmanager
def collect_errors(lines: list[str]) -> Iterator[None]:
    """Adds what a `TrainError` in the `with` block says to ``lines``, and go on."""
    try:
        yield
    except TrainError as error:
        lines += error.lines if isinstance(error, SettingsError) else [str(error)]


def raise_collected(lines: Sequence[str]) -> None:
    """Raises what `collect_errors` has found, if there is anything; equal lines count once.

    Raises:
        TrainError: with these lines.
    """
    lines = list(dict.fromkeys(lines))
    if len(lines) == 1:
        raise TrainError(lines[0])
    if lines:
        raise SettingsError(lines)
