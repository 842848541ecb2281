"""Prints the tables of a proof, writes them into the documentation, and returns an exit status."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Table:
    """A Markdown table whose rows are measured, or kept from an earlier run.

    Attributes:
        columns: Titles of the columns.
        keys: First cells of every row, in order.
        rows: The other cells of the rows that are known, by the first cells.
    """

    columns: Sequence[str]
    keys: list[tuple[str, ...]] = field(default_factory=list)
    rows: dict[tuple[str, ...], Sequence[str]] = field(default_factory=dict)

    def rows_of(self, page: str) -> dict[tuple[str, ...], Sequence[str]]:
        """Returns the rows that the same table has on a page, by their first cells."""
        found: dict[tuple[str, ...], Sequence[str]] = {}
        _, _, rest = page.partition(_line(self.columns))
        for line in rest.splitlines()[2:]:  # after the end of the title and the line of dashes
            if not line.startswith("|"):
                break
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            count = len(self.keys[0])
            found[tuple(cells[:count])] = cells[count:]
        return found

    def text(self) -> str:
        """Returns the table. A row that is not known is left out."""
        known = [_line([*key, *self.rows[key]]) for key in self.keys if key in self.rows]
        dashes = "|---" * len(self.columns) + "|"
        return "\n".join([_line(self.columns), dashes, *known]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


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
