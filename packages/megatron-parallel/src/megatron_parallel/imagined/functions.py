"""The functions of `torch.cuda` for a device that does not exist: one stream, no waiting."""

import contextlib
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import torch

CUDA: Final = torch.device("cuda:0")


class Event:
    """A point in the stream, which is reached immediately."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Does nothing, since all queued work is done."""

    def wait(self, stream: Any = None) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""

    def query(self) -> bool:
        """Returns True: all queued work is done."""
        return True

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
        return event or Event()

    def synchronize(self) -> None:
        """Does nothing."""

    def query(self) -> bool:
        """Returns True: all queued work is done."""
        return True


def no_graph() -> bool:
    """Returns False: no graph is captured."""
    return False


@contextlib.contextmanager
def cuda_functions(
    name: str, total_memory: int, waits_for: Callable[[str], None]
) -> Iterator[None]:
    """Replaces functions of `torch.cuda` in the block.

    Args:
        name: Name of the device.
        total_memory: Memory of the device in bytes.
        waits_for: Called with a description when the host would wait for the device.
    """
    only = Stream()
    properties = SimpleNamespace(name=name, total_memory=total_memory)
    with patch.multiple(
        torch.cuda,
        Event=Event,
        Stream=Stream,
        _lazy_init=lambda: None,
        current_device=lambda: 0,
        current_stream=lambda device=None: only,
        device_count=lambda: 1,
        get_device_capability=lambda device=None: (9, 0),
        get_device_name=lambda device=None: name,
        get_device_properties=lambda device=None: properties,
        get_rng_state=lambda device="cuda": torch.empty(16, dtype=torch.uint8),
        is_available=lambda: True,
        is_current_stream_capturing=no_graph,
        set_device=lambda device: None,
        set_rng_state=lambda state, device="cuda": None,
        stream=lambda stream: contextlib.nullcontext(),
        synchronize=lambda device=None: waits_for("synchronize"),
    ):
        yield


def host_memory() -> int:
    """Returns the memory of the host in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
