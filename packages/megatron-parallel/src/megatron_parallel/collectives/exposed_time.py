"""Exposed communication time: how long a device waited for collectives started before.

On a CPU the host waits, so its clock measures the time. On a CUDA device the host only makes the
stream wait: CUDA events before and after the wait measure the time, and reading them blocks until
the stream has reached them.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ExposedTime:
    """Sum of the times spent in `with` blocks of `measure`, on the clock of `device`."""

    __slots__ = ("_events", "_on_stream", "_seconds")

    def __init__(self, device: torch.device) -> None:
        self._on_stream = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Adds the time of the `with` block, unless the block raises."""
        if self._on_stream:
            start, end = _event(), _event()
            start.record()
            yield
            end.record()
            self._events.append((start, end))
        else:
            start_time = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start_time

    @property
    def seconds(self) -> float:
        """Seconds of all waits so far. On a CUDA device, blocks until the last of them is over."""
        for start, end in self._events:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1000  # milliseconds
        self._events.clear()
        return self._seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
