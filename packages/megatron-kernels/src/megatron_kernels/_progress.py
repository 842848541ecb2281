"""A line on a terminal that shows how far a long command is."""

import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

_INTERVAL = 0.1


def progress(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Yields items, and shows their number, rate and the time left if stderr is a terminal.

    Args:
        items: What is worked on.
        total: Number of items.
        what: Name of several items, such as "checks".
    """
    if not sys.stderr.isatty():
        yield from items
        return
    began = shown = time.monotonic()
    try:
        for done, item in enumerate(items, 1):
            now = time.monotonic()
            if now - shown > _INTERVAL or done == total:
                shown = now
                rate = done / max(now - began, 1e-9)
                left = (total - done) / rate
                text = f"{done}/{total} {what}, {rate:.1f}/s, {left:.0f} s left"
                width = shutil.get_terminal_size().columns - 1
                sys.stderr.write(f"\r{text[:width]:<{width}}")
                sys.stderr.flush()
            yield item
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
