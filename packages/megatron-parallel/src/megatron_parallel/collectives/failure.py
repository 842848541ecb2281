"""Errors of failed collectives that name the missing ranks.

A backend only reports that a connection broke or that no answer arrived in time. Each rank that
notices a failure writes a report with its current operation into the store of the job. The ranks
without a report are those that died, froze or run another part of the program.
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
"""Seconds to wait for reports of the same failure from the other ranks of an axis."""

CHAINED: Final = 2.25
"""Factor on `GRACE` when another rank is itself waiting on another axis."""


class raise_collective_errors:  # noqa: N801 - a context manager, named like those of contextlib
    """Context manager that turns a backend failure in its block into a `CollectiveError`.

    The error is one line that names the missing ranks, the axis and the operation.

    Args:
        axis: Axis of the collective.
        operation: Operation in words.
        payload: Tensor whose shape and dtype the error shows too.
        ranks: Global ranks that take part. Defaults to all ranks of the axis.
        match: Text that must be equal on all ranks of one collective. Defaults to operation,
            payload and axis.
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
        """Returns a context for a block that starts a collective and leaves the wait to another."""
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
        # DistBackendError, DistNetworkError and errors of Gloo are RuntimeErrors.
        if isinstance(error, RuntimeError) and not isinstance(error, CollectiveError):
            if watchdog is not None:  # after an abort, the backend only reports the abort
                watchdog.check()
            raise CollectiveError(self.diagnose(backend_text(error))) from error
        if kind is None and watchdog is not None and self._queues:
            watchdog.watch(self)

    def failure_reported(self) -> bool:
        """Returns whether a rank of the mesh has reported a failure of a collective."""
        return failure_reported(self.axis)

    def diagnose(self, cause: str) -> str:
        """Returns one line that names the missing ranks, the axis, the operation and `cause`.

        Writes a report of this rank into the store and reads the reports of the other ranks.
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
                return f"{verdict}: dead, suspended or late, see its own output ({cause})"
        except RuntimeError as failure:  # the store is lost with the rank that runs it
            state = "frozen" if isinstance(failure, StoreError) else "gone"
            return f"rank 0, which keeps the job's store, is {state}: {where} failed ({cause})"
        for rank, report in reports.items():
            if report.verdict:
                return f"{where} failed because rank {rank} gave up: {report.verdict} ({cause})"
        if len({report.match for report in reports.values()}) > 1:
            sides = "; ".join(f"rank {rank}: {reports[rank].doing}" for rank in sorted(reports))
            return f"ranks run different operations: {sides} ({cause})"
        return f"{where} failed on all its ranks ({cause})"


class _Report(NamedTuple):
    """Operation of a rank that noticed a failure, and its verdict once it has one."""

    doing: str
    match: str
    verdict: str = ""
    axis: str = ""


def _text(t: Tensor) -> str:
    return f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}"


def _reports(store: BoundedStore, axis: Axis, ranks: Sequence[int]) -> dict[int, _Report]:
    """Returns the reports that the ranks write within `GRACE`.

    Waits longer if a rank is waiting on another axis: it needs the same time for its own verdict.
    """
    start_time = time.monotonic()
    while True:
        reporting = [rank for rank in ranks if store.check([_key(axis, rank)])]
        reports = {rank: _Report(*json.loads(store.get(_key(axis, rank)))) for rank in reporting}
        complete = len(reports) == len(ranks)
        elsewhere = complete and any(report.axis != axis.name for report in reports.values())
        if time.monotonic() - start_time > GRACE * (CHAINED if elsewhere else 1):
            return reports
        if complete and any(report.verdict for report in reports.values()):
            return reports
        time.sleep(0.05)


def _post(store: BoundedStore, axis: Axis, rank: int, report: _Report) -> None:
    store.set(_key(axis, rank), json.dumps(report))
    report_failure(store, axis)


def report_failure(store: BoundedStore, axis: Axis) -> None:
    """Marks in the store that a rank of the mesh has reported a failure."""
    store.set(_any(axis), "")


def failure_reported(axis: Axis) -> bool:
    """Returns whether a rank of the mesh has reported a failure."""
    try:
        return default_store(GRACE).check([_any(axis)])
    except RuntimeError:  # the store is lost, and with it the rank that runs it
        return True


def _any(axis: Axis) -> str:
    """Returns the key that exists once a rank of the mesh has reported a failure."""
    return f"collective-failed/{axis.mesh}/any"


def _key(axis: Axis, rank: int) -> str:
    return f"collective-failed/{axis.mesh}/{rank}"
