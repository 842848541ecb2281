"""Waiting in tests: for what happens, never for a time; what hangs is noticed after `HANG`."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

HANG = 120.0
"""Seconds after which something hangs, on however busy a machine."""


def wait_until(condition: Callable[[], object], seconds: float = HANG) -> None:
    """Return when ``condition()`` is true; AssertionError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing came in {seconds} s"
        time.sleep(0.01)


class Answers:
    """Which ranks have answered, in files of a folder that all of them see.

    A rank that freezes in a test waits for the answers of the others, so that they cannot owe them
    to its return.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def give(self, rank: int) -> None:
        """Note that ``rank`` has answered."""
        Path(self._folder, f"answered-{rank}").touch()

    def wait_for(self, ranks: Iterable[int], seconds: float = HANG / 2) -> None:
        """Return when all ``ranks`` have answered, or after ``seconds``."""
        files = [Path(self._folder, f"answered-{rank}") for rank in ranks]
        deadline = time.monotonic() + seconds
        while not all(file.exists() for file in files) and time.monotonic() < deadline:
            time.sleep(0.01)
