"""A collective that fails says which rank it missed.

All a backend knows is that a connection broke or that nobody answered in time. The ranks that
notice write so into the job's key-value store, with what they were about to do; those that stay
silent are the ones that died, froze or are elsewhere in the program.
"""

import json
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, NamedTuple

import torch
from torch import Tensor

from megatron_parallel.errors import CollectiveError, backend_text, rank_list
from megatron_parallel.mesh.axes import Axis
from megatron_parallel.mesh.store import BoundedStore, StoreError, default_store

GRACE: Final = 2.0
"""Seconds in which the other ranks of an axis may report the same failure."""

CHAINED: Final = 2.25
"""How much longer, as a factor, one waits for the verdict of a rank that waits elsewhere."""


class raise_collective_errors:  # noqa: N801 - a context manager, named like those of contextlib
    """Turn a failure of the backend in a `with` block into a `CollectiveError` of one line.

    It names the ranks that are missing, the axis and the operation.

    Args:
        axis: The axis that communicates.
        operation: In words.
        payload: Tensor whose shape and dtype are told too.
        ranks: Global ranks that take part, by default all of the axis.
        match: What ranks that belong together have in common, by default operation and payload.
    """

    __slots__ = ("_queues", "axis", "description", "match", "operation", "ranks")

    def __init__(
        self,
        axis: Axis,
        operation: str,
        payload: Tensor | None = None,
        *,
        ranks: Sequence[int] | None = None,
        match: str = "",
    ) -> None:
        self.axis = axis
        self.operation = operation
        self.description = operation if payload is None else f"{operation} {_text(payload)}"
        self.ranks = ranks
        self.match = match
        self._queues = True

    @property
    def axis_name(self) -> str:
        """Name of the axis."""
        return self.axis.name

    def for_launch(self) -> "raise_collective_errors":
        """Returns the same for a block that starts what a later block waits for."""
        start = raise_collective_errors(
            self.axis, self.operation, ranks=self.ranks, match=self.match
        )
        start.description = self.description
        start._queues = False
        return start

    def __enter__(self) -> None:
        if self.axis.watchdog is not None and not torch.compiler.is_compiling():
            self.axis.watchdog.check()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        watchdog = None if torch.compiler.is_compiling() else self.axis.watchdog
        # DistBackendError, DistNetworkError and Gloo's own are RuntimeErrors
        if isinstance(error, RuntimeError) and not isinstance(error, CollectiveError):
            if watchdog is not None:  # after an abort the backend says no more than that
                watchdog.check()
            raise CollectiveError(self.diagnose(backend_text(error))) from error
        if kind is None and watchdog is not None and self._queues:
            watchdog.watch(self)

    def failure_reported(self) -> bool:
        """Returns whether a rank of the mesh has reported a failure of a collective."""
        return failure_reported(self.axis)

    def diagnose(self, cause: str) -> str:
        """Return one line: which ranks are missing, on which axis, in which operation, and `cause`.

        Reports in the store what this rank was doing, and reads the reports of the others.
        """
        axis, ranks = self.axis, self.axis.ranks if self.ranks is None else self.ranks
        where = f"{self.description} on axis {axis.name!r} ({rank_list(axis.ranks)})"
        own = _Report(doing=where, match=self.match or where, axis=axis.name)
        me = axis.ranks[axis.index]
        try:
            store = default_store(GRACE)
            _post(store, axis, me, own)
            reports = _reports(store, axis, ranks)
            silent = [rank for rank in ranks if rank not in reports]
            if silent:
                verdict = f"{rank_list(silent)} did not join {where}"
                _post(store, axis, me, own._replace(verdict=verdict))
                return f"{verdict}: dead, frozen or late, see its own output ({cause})"
        except RuntimeError as failure:  # the store goes with the rank that keeps it
            state = "frozen" if isinstance(failure, StoreError) else "gone"
            return f"rank 0, which keeps the job's store, is {state}: {where} failed ({cause})"
        for rank, report in reports.items():
            if report.verdict:
                return f"{where} failed because rank {rank} gave up: {report.verdict} ({cause})"
        if len({report.match for report in reports.values()}) > 1:
            sides = "; ".join(f"rank {rank}: {reports[rank].doing}" for rank in sorted(reports))
            return f"ranks do not do the same: {sides} ({cause})"
        return f"{where} failed on all its ranks ({cause})"


class _Report(NamedTuple):
    """What a rank that noticed a failure was doing, and whom it missed, once it knows."""

    doing: str
    match: str
    verdict: str = ""
    axis: str = ""


def _text(t: Tensor) -> str:
    return f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}"


def _reports(store: BoundedStore, axis: Axis, ranks: Sequence[int]) -> dict[int, _Report]:
    """Of the ranks that report a failure within `GRACE`.

    A rank that waits on another axis needs as long again to find out whom it misses there.
    """
    since = time.monotonic()
    while True:
        told = [rank for rank in ranks if store.check([_key(axis, rank)])]
        reports = {rank: _Report(*json.loads(store.get(_key(axis, rank)))) for rank in told}
        complete = len(reports) == len(ranks)
        elsewhere = complete and any(report.axis != axis.name for report in reports.values())
        if time.monotonic() - since > GRACE * (CHAINED if elsewhere else 1):
            return reports
        if complete and any(report.verdict for report in reports.values()):
            return reports
        time.sleep(0.05)


def _post(store: BoundedStore, axis: Axis, rank: int, report: _Report) -> None:
    store.set(_key(axis, rank), json.dumps(report))
    report_failure(store, axis)


def report_failure(store: BoundedStore, axis: Axis) -> None:
    """Lets all ranks of the mesh know that one has reported a failure."""
    store.set(_any(axis), "")


def failure_reported(axis: Axis) -> bool:
    """Returns whether a rank of the mesh has reported a failure."""
    try:
        return default_store(GRACE).check([_any(axis)])
    except RuntimeError:  # the store is gone, and with it the rank that keeps it
        return True


def _any(axis: Axis) -> str:
    """Returns the key that is there once a rank of the mesh has reported."""
    return f"collective-failed/{axis.mesh}/any"


def _key(axis: Axis, rank: int) -> str:
    return f"collective-failed/{axis.mesh}/{rank}"
