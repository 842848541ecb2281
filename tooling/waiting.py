"""Waiting in tests for an event, never for a fixed time; `HANG` ends a wait that never succeeds."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

HANG = 120.0
"""Seconds after which something hangs, on however busy a machine."""


def wait_until(condition: Callable[[], object], seconds: float = HANG) -> None:
    """Returns when ``condition()`` is true.

    Raises:
        AssertionError: The condition is still false after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing came in {seconds} s"
        time.sleep(0.01)


class Answers:
    """The ranks that have answered, recorded as files in a shared folder.

    A rank that freezes in a test first waits for the answers of the others, so that they cannot
    depend on its return.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def give(self, rank: int) -> None:
        """Records that ``rank`` has answered."""
        Path(self._folder, f"answered-{rank}").touch()

    def wait_for(self, ranks: Iterable[int], seconds: float = HANG / 2) -> None:
        """Returns when all ``ranks`` have answered, or after ``seconds``."""
        files = [Path(self._folder, f"answered-{rank}") for rank in ranks]
        deadline = time.monotonic() + seconds
        while not all(file.exists() for file in files) and time.monotonic() < deadline:
            time.sleep(0.01)
