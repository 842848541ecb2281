"""Prints the tables of a proof, writes them into the documentation, and returns an exit status."""

import sys
from collections.abc import Sequence
from pathlib import Path


def publish(name: str, text: str, failed: Sequence[str], page: Path | None) -> int:
    """Prints tables and failures; without failures, writes the tables between marks into `page`.

    Returns the exit status: 1 if anything failed.
    """
    print(text)
    if page is not None and not failed:
        begin, end = marks(name)
        head, rest = page.read_text().split(begin)
        page.write_text(f"{head}{begin}\n{text}{end}{rest.split(end)[1]}")
    for line in failed:
        print(f"{name}: error: {line}", file=sys.stderr)
    return 1 if failed else 0


def marks(name: str) -> tuple[str, str]:
    """Returns the lines that enclose the tables of `name` on a page."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
