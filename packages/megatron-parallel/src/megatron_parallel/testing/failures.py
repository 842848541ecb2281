"""Failures of ranks, and the exception that reports them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["raised", "died", "hung", "stopped"]


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    Attributes:
        rank: Index of the rank.
        kind: ``raised`` an exception, ``died`` (its process ended), ``hung`` (still running at the
            time-out), or ``stopped`` (still running when another rank had failed: a consequence,
            not a cause).
        summary: One line that follows "rank 1 " in a message.
        traceback: Traceback of the rank; for a hung or stopped rank, of each of its threads.
    """

    rank: int
    kind: Kind
    summary: str
    traceback: str = ""


class WorkerError(RuntimeError):
    """A call on several ranks failed.

    The message names the failed ranks, in the order of their failures, and contains their
    tracebacks.

    Attributes:
        failures: One failure for each failed rank, the first cause first.
    """

    def __init__(self, failures: Sequence[Failure], ranks: int) -> None:
        self.failures = tuple(failures)
        causes = [f for f in self.failures if f.kind != "stopped"] or list(self.failures)
        if len(causes) > 1 and len({cause.summary for cause in causes}) == 1:
            numbers = ", ".join(str(cause.rank) for cause in causes)
            headline = f"ranks {numbers} of {ranks} {causes[0].summary}"
        else:
            headline = "; ".join(f"rank {c.rank} of {ranks} {c.summary}" for c in causes)
        parts = [headline]
        for failure in self.failures:
            parts.append(f"---- rank {failure.rank} {failure.summary}")
            if failure.traceback:
                parts.append(failure.traceback.rstrip())
        super().__init__("\n".join(parts))
