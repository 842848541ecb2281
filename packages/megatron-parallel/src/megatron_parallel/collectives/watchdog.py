"""A watchdog thread for collectives that the backend only enqueues on a stream.

With NCCL, `wait` makes the stream wait and not the host, so a missing rank raises no error: the
host continues until it reads a value from the device, and hangs there until the watchdog of NCCL
ends the process in C++. This watchdog records a marker on the stream after each collective, and a
thread polls the markers. If a marker is not reached within the time-out of the mesh, the thread
determines the missing rank through the store of the job (`raise_collective_errors`) and aborts the
process groups, which releases the host. `check` then raises the error at the next collective of
this rank. The time-out of the process groups is longer than that of the mesh by `MARGIN`.

Gloo waits on the host and raises errors there, so meshes with Gloo have no watchdog.
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
"""Difference between the time-out of an enqueuing backend and that of its mesh.

In this time the missing ranks are determined and the groups aborted. If the abort does not release
the host within it, the process is ended, since it would otherwise never end.
"""

DIAGNOSIS_SECONDS: Final = 5.0
"""Seconds before the time-out at which the missing ranks are determined; takes at most this."""


class Marker(Protocol):
    """A point in a stream, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Returns whether the device has reached this point, without waiting."""


class Operation(Protocol):
    """A watched collective, such as a `raise_collective_errors`."""

    @property
    def axis_name(self) -> str:
        """Name of the axis."""

    @property
    def description(self) -> str:
        """Operation, shape and dtype."""

    def diagnose(self, cause: str) -> str:
        """Returns the line that names the missing ranks, using the store."""

    def failure_reported(self) -> bool:
        """Returns whether a rank of the mesh has reported a failure in the store."""


class _Queued(NamedTuple):
    operation: Operation
    marker: Marker
    since: float


class Watchdog:
    """Watches the enqueued collectives of one mesh.

    Args:
        mark: Records a marker after everything that has been enqueued so far.
        abort: Aborts the process groups, which releases a host that waits for the device.
        timeout: Maximum duration of a collective in seconds.
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
        """Watches an operation that this thread has just enqueued."""
        marker = self._mark()
        if marker is None:
            return
        self._queued.append(_Queued(operation, marker, time.monotonic()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="collectives", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raises the error of a failed collective of this mesh, if there is one.

        Raises:
            CollectiveError: A rank did not take part in a collective.
        """
        if self._failure is not None:
            self._raised.set()
            raise self._failure

    def close(self) -> None:
        """Stops the thread."""
        self._closed.set()

    def last_completed(self, axis: str) -> str | None:
        """Returns the last operation on the axis that is known to be complete, in words."""
        return self._last.get(axis)

    def _watch(self) -> None:
        while not self._closed.wait(self._poll):
            late = self._overdue()
            if late is not None:
                self._fail(late)
                return

    def _overdue(self) -> _Queued | None:
        """Drops complete operations. Returns the oldest incomplete one if it takes too long."""
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
                # As the watchdog of NCCL does, with a line that gives the reason.
                print(line, file=sys.stderr, flush=True)  # noqa: T201
                os._exit(1)


def marker_factory(device: torch.device) -> Callable[[], Marker | None] | None:
    """Returns a function that records a marker in the current stream; None if the host waits."""
    return _stream_marker if device.type == "cuda" else None


def backend_timeout(device: torch.device, timeout: timedelta) -> timedelta:
    """Returns the time-out of the process groups of a mesh on `device` with time-out `timeout`."""
    return timeout if marker_factory(device) is None else timeout + MARGIN


def _stream_marker() -> Marker | None:
    if torch.cuda.is_current_stream_capturing():  # nothing runs, and events cannot be queried
        return None
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
