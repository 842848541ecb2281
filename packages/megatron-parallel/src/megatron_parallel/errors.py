"""What is raised when a layout cannot be or a rank does not take part, in one line."""

import re
from collections.abc import Sequence


class LayoutError(ValueError):
    """A layout that cannot be, or ranks that do not agree on one."""


class CollectiveError(RuntimeError):
    """A rank did not take part in a collective, or its connection broke; the job must end."""


def rank_list(ranks: Sequence[int]) -> str:
    """Ascending ranks in words: `rank 3`, `ranks 0-5, 7`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def backend_text(error: RuntimeError) -> str:
    """The first sentence of the backend's message, without the place in its source."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[[^\]]*\]\s*", "", lines[0]).split(". ")[0].rstrip(".")
