"""The choice of defects: the same number in every area, spread over its files and lines."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path

from mutation.defects import Defect, defects, difference, plant


@dataclass(frozen=True)
class Planted:
    """A defect with the text that it produces.

    Attributes:
        defect: The defect.
        text: The whole source file with the defect.
        before: The lines that change, joined to one, without indentation.
        after: The changed lines.
    """

    defect: Defect
    text: str
    before: str
    after: str

    @property
    def key(self) -> str:
        """The name of the defect in `survivors.toml`; contains no line number."""
        return f"{self.defect.source}: {self.before} -> {self.after}"


def plan(
    root: Path, areas: Mapping[str, Sequence[str]], each: int, seed: int
) -> tuple[dict[str, list[Planted]], Counter[str], int]:
    """Chooses `each` defects per area, or all if it has fewer.

    Takes at most one per line, from the files of an area in turn. The order of files, lines and
    defects depends on the seed and on the text of the line and not on its number, so that a change
    elsewhere does not affect the choice.

    Returns:
        The defects by area, the number left out for each reason, and the number of candidates.
    """
    chosen: dict[str, list[Planted]] = {}
    left_out: Counter[str] = Counter()
    possible = 0

    def order(defect: Defect) -> str:
        return hashlib.sha256(f"{seed}\0{defect.rank}".encode()).hexdigest()

    for area, sources in areas.items():
        queues = []
        for source in sources:
            text = (root / source).read_text(encoding="utf-8")
            found, skipped = defects(source, text)
            left_out += skipped
            possible += len(found)
            if found:
                queues.append(sorted(found, key=order))
        queues.sort(key=lambda queue: order(queue[0]))
        turns = zip_longest(*(one_per_line(root, queue) for queue in queues))
        spread = (defect for turn in turns for defect in turn if defect is not None)
        chosen[area] = list(islice(spread, each))
    return chosen, left_out, possible


def one_per_line(root: Path, ranked: Sequence[Defect]) -> Iterator[Planted]:
    """Returns at most one defect per line, in the given order."""
    lines: set[int] = set()
    for defect in ranked:
        if defect.line not in lines:
            text = (root / defect.source).read_text(encoding="utf-8")
            changed = plant(defect, text)
            if changed is not None:
                lines.add(defect.line)
                yield Planted(defect, changed, *difference(text, changed))
