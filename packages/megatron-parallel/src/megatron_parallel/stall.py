"""How long a device stood still for collectives that had been started before.

On a CPU the host waits, and its clock tells. On CUDA devices the host only tells the stream to
wait: events before and behind it are the clock, and reading them waits until the stream is there.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stall:
    """The time that passed in the `with` blocks of `waiting`, on the clock of `device`."""

    __slots__ = ("_events", "_on_stream", "_seconds")

    def __init__(self, device: torch.device) -> None:
        self._on_stream = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait; a wait that fails does not count."""
        if self._on_stream:
            before, behind = _event(), _event()
            before.record()
            yield
            behind.record()
            self._events.append((before, behind))
        else:
            since = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - since

    @property
    def seconds(self) -> float:
        """Seconds of all waits so far; on a CUDA device the host waits for the last of them."""
        for before, behind in self._events:
            behind.synchronize()
            self._seconds += before.elapsed_time(behind) / 1000  # milliseconds
        self._events.clear()
        return self._seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
