"""Exceptions for errors that the user of this package can cause."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_train._command import CommandError


class TrainError(ValueError):
    """A setting, file or run is invalid. The message is one line."""


class UsageError(TrainError, CommandError):
    """A command line is invalid (exit status 2)."""


class SettingsError(TrainError):
    """Several settings are invalid. The message names the first three.

    Attributes:
        lines: One message for each invalid setting.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
        super().__init__("; ".join(lines[:3]) + more)
        self.lines = list(lines)


@contextmanager
def collect_errors(lines: list[str]) -> Iterator[None]:
    """Appends the messages of a `TrainError` in the `with` block to ``lines`` and suppresses it."""
    try:
        yield
    except TrainError as error:
        lines += error.lines if isinstance(error, SettingsError) else [str(error)]


def raise_collected(lines: Sequence[str]) -> None:
    """Raises the errors that `collect_errors` collected, if there are any.

    Args:
        lines: Messages. Duplicates are removed.

    Raises:
        TrainError: There is at least one message.
    """
    lines = list(dict.fromkeys(lines))
    if len(lines) == 1:
        raise TrainError(lines[0])
    if lines:
        raise SettingsError(lines)
