"""A thread of the host that waits for collectives which the backend only queues.

`wait` on NCCL makes the stream wait and not the host. A rank that is missing therefore raises
nothing: the host goes on until it reads a value of the device, and hangs there until NCCL's own
watchdog ends the process in C++. Here a marker is put on the stream behind each collective, and a
thread polls the markers. When one is not reached within the mesh's time-out, the thread finds out
through the job's store which rank is missing (`raise_collective_errors`), aborts the groups so that
the host is released, and `check` raises the error at the next collective of this rank. The groups'
own time-out is longer by `MARGIN`.

Gloo waits on the host and raises there: its meshes have no watchdog.
"""

import collections
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final, NamedTuple, Protocol

import torch

from megatron_parallel.errors import CollectiveError

MARGIN: Final = timedelta(seconds=60)
"""By how much the time-out of a backend that queues exceeds that of its mesh.

In this time missing ranks are found out and groups aborted. A host that an abort does not release
within it is ended: its process would otherwise stay for ever.
"""

DIAGNOSIS_SECONDS: Final = 5.0
"""Seconds before the time-out at which missing ranks are asked for, which takes this at most."""


class Marker(Protocol):
    """A place in a stream, such as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Returns whether the device has come so far; does not wait."""


class Operation(Protocol):
    """A collective as `raise_collective_errors` knows it."""

    @property
    def axis_name(self) -> str:
        """Axis that communicates."""

    @property
    def description(self) -> str:
        """Operation, shape and dtype."""

    def diagnose(self, cause: str) -> str:
        """Returns the line that names the ranks that are missing; asks the store."""

    def failure_reported(self) -> bool:
        """Returns whether a rank of the mesh has reported a failure in the store."""


class _Queued(NamedTuple):
    operation: Operation
    marker: Marker
    since: float


class Watchdog:
    """Waits for the queued collectives of one mesh.

    Args:
        mark: Puts a marker behind what has been queued so far.
        abort: Aborts the groups, so that a host that waits for a device is released.
        timeout: Seconds that a collective may take.
    """

    def __init__(
        self,
        mark: Callable[[], Marker | None],
        abort: Callable[[], None],
        timeout: float,
    ) -> None:
        self._mark = mark
        self._abort = abort
        self._limit = max(timeout - DIAGNOSIS_SECONDS, timeout / 2)
        self._poll = min(0.5, timeout / 20)
        self._queued: collections.deque[_Queued] = collections.deque()
        self._last: dict[str, str] = {}
        self._failure: CollectiveError | None = None
        self._raised = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, operation: Operation) -> None:
        """Watches an operation that has just been queued by this thread."""
        marker = self._mark()
        if marker is None:
            return
        self._queued.append(_Queued(operation, marker, time.monotonic()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="collectives", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raises `CollectiveError` if a collective of this mesh was found to miss a rank."""
        if self._failure is not None:
            self._raised.set()
            raise self._failure

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()

    def last_completed(self, axis: str) -> str | None:
        """Returns the last operation on the axis that was seen to be complete, in words."""
        return self._last.get(axis)

    def _watch(self) -> None:
        while not self._closed.wait(self._poll):
            late = self._overdue()
            if late is not None:
                self._fail(late)
                return

    def _overdue(self) -> _Queued | None:
        """Drops what is complete; return the oldest of the rest if it takes too long."""
        while self._queued:
            oldest = self._queued[0]
            if not oldest.marker.query():
                age = time.monotonic() - oldest.since
                if age > self._limit or (
                    age > self._limit / 2 and oldest.operation.failure_reported()
                ):
                    return oldest
                return None
            self._last[oldest.operation.axis_name] = oldest.operation.description
            self._queued.popleft()
        return None

    def _fail(self, late: _Queued) -> None:
        waited = time.monotonic() - late.since
        last = self._last.get(late.operation.axis_name)
        before = (
            "no earlier one was completed" if last is None else f"the last completed was {last}"
        )
        line = late.operation.diagnose(f"not completed after {waited:.3g} s, {before}")
        self._failure = CollectiveError(line)
        try:
            self._abort()
        finally:
            if not self._raised.wait(MARGIN.total_seconds()) and not self._closed.is_set():
                # What NCCL's own watchdog does, with a line that says why.
                print(line, file=sys.stderr, flush=True)  # noqa: T201
                os._exit(1)


def marker_factory(device: torch.device) -> Callable[[], Marker | None] | None:
    """Returns what marks a place in the current stream of `device`; None where the host waits."""
    return _stream_marker if device.type == "cuda" else None


def backend_timeout(device: torch.device, timeout: timedelta) -> timedelta:
    """Returns the time-out of process groups for a mesh on `device` whose own is `timeout`."""
    return timeout if marker_factory(device) is None else timeout + MARGIN


def _stream_marker() -> Marker | None:
    if torch.cuda.is_current_stream_capturing():  # nothing runs, and events cannot be queried
        return None
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
