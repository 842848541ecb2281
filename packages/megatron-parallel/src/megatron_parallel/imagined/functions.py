"""The functions of `torch.cuda` for a device that does not exist: one stream, no waiting.

Operations run when they are called. To find reads that would wait, the stream counts as `BEHIND`
operations behind the host: an event is reached only when so many more were queued, or when the host
has waited for it or polled it.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final, NoReturn
from unittest.mock import patch

import torch

from megatron_parallel.errors import LayoutError

CUDA: Final = torch.device("cuda:0")


BEHIND: Final = 100
"""Operations that the stream is behind the host."""
POLLED: Final = 10
"""Operations that the stream completes while the host polls an event once."""


_CAPABILITY: Final = (9, 0)
"""Compute capability of the device: that of an H100 or H200."""


class Queue:
    """The operations of a device.

    Attributes:
        queued: Number of operations so far.
        completed: Number of them that had completed when the host last waited.
    """

    def __init__(self) -> None:
        self.queued = self.completed = 0

    def add(self) -> None:
        """Adds an operation."""
        self.queued += 1

    def drain(self) -> None:
        """Completes all operations, since the host waits for them."""
        self.completed = self.queued


class Event:
    """A point in the stream."""

    queue: Queue
    waits_for: Callable[[str], None]

    def __init__(self, *_: Any, **__: Any) -> None:
        self._position = self._polled = 0

    def record(self, stream: Any = None) -> None:
        """Sets the point to the operations queued so far."""
        self._position, self._polled = self.queue.queued, 0

    def wait(self, stream: Any = None) -> None:
        """Does nothing, since there is one stream."""

    def synchronize(self) -> None:
        """Reports a wait unless the stream has reached the event."""
        if not self._reached():
            type(self).waits_for("event")

    def query(self) -> bool:
        """Returns whether the stream has reached the event."""
        self._polled += POLLED
        return self._reached()

    def _reached(self) -> bool:
        completed = max(self.queue.completed, self.queue.queued + self._polled - BEHIND)
        return completed >= self._position

    def elapsed_time(self, end: "Event") -> float:
        """Returns 0: nothing takes time."""
        return 0.0


class Stream:
    """The only stream; operations run when they are called."""

    device, device_index, stream_id = CUDA, 0, 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Does nothing."""

    def wait_event(self, event: Any) -> None:
        """Does nothing."""

    def record_event(self, event: Event | None = None) -> Event:
        """Returns the event, or a new one."""
        return event or torch.cuda.Event()  # type: ignore[no-untyped-call,return-value]

    def synchronize(self) -> None:
        """Does nothing."""

    def query(self) -> bool:
        """Returns True: all queued work is done."""
        return True


def no_graph() -> bool:
    """Returns False: no graph is captured."""
    return False


def refuse_graphs(*_: Any, **__: Any) -> NoReturn:
    """Raises an error: what a graph replays would not be counted."""
    raise LayoutError("a device that does not exist captures no graphs: run without CUDA graphs")


@contextlib.contextmanager
def cuda_functions(
    name: str, total_memory: int, waits_for: Callable[[str], None], queue: Queue
) -> Iterator[None]:
    """Replaces functions of `torch.cuda` in the block.

    Args:
        name: Name of the device.
        total_memory: Memory of the device in bytes.
        waits_for: Called with a description when the host would wait for the device.
        queue: The operations of the device.
    """
    only = Stream()
    bound = type("Event", (Event,), {"queue": queue, "waits_for": staticmethod(waits_for)})
    # A device of this process: ranks of a job may not share one.
    properties = SimpleNamespace(
        name=name,
        total_memory=total_memory,
        uuid=os.getpid(),
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
    )
    # torch's own method accepts only streams of torch.
    stays = patch.object(torch.Tensor, "record_stream", lambda t, stream: None)
    with (
        stays,
        patch.multiple(
            torch.cuda,
            CUDAGraph=refuse_graphs,
            Event=bound,
            Stream=Stream,
            _lazy_init=lambda: None,
            _sleep=lambda cycles: None,
            current_device=lambda: 0,
            current_stream=lambda device=None: only,
            device_count=lambda: 1,
            get_device_capability=lambda device=None: _CAPABILITY,
            get_device_name=lambda device=None: name,
            get_device_properties=lambda device=None: properties,
            graph=refuse_graphs,
            graph_pool_handle=refuse_graphs,
            get_rng_state=lambda device="cuda": torch.empty(16, dtype=torch.uint8),
            is_available=lambda: True,
            is_current_stream_capturing=no_graph,
            set_device=lambda device: None,
            set_rng_state=lambda state, device="cuda": None,
            stream=lambda stream: contextlib.nullcontext(),
            synchronize=lambda device=None: waits_for("synchronize"),
        ),
    ):
        yield


def host_memory() -> int:
    """Returns the memory of the host in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
