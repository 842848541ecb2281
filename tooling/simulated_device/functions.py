"""The functions of `torch.cuda` for a simulated device: one device, one stream, no waiting."""

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from simulated_device.tensors import CUDA, Dispatch

NAME = "a simulated device"


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
        return True

    def elapsed_time(self, end: "Event") -> float:
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
        return event or Event()

    def synchronize(self) -> None:
        """Does nothing."""

    def query(self) -> bool:
        return True


def properties() -> SimpleNamespace:
    """Returns the device properties in use here, with the memory of the host."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return SimpleNamespace(name=NAME, total_memory=memory)


def no_graph() -> bool:
    return False


@contextlib.contextmanager
def functions(dispatch: Dispatch) -> Iterator[None]:
    """Replaces functions of `torch.cuda` in the block."""
    only = Stream()
    with patch.multiple(
        torch.cuda,
        Event=Event,
        Stream=Stream,
        _lazy_init=lambda: None,
        current_device=lambda: 0,
        current_stream=lambda device=None: only,
        device_count=lambda: 1,
        get_device_capability=lambda device=None: (9, 0),
        get_device_name=lambda device=None: NAME,
        get_device_properties=lambda device=None: properties(),
        get_rng_state=lambda device="cuda": torch.empty(16, dtype=torch.uint8),
        is_available=lambda: True,
        is_current_stream_capturing=no_graph,
        set_device=lambda device: None,
        set_rng_state=lambda state, device="cuda": None,
        stream=lambda stream: contextlib.nullcontext(),
        synchronize=lambda device=None: dispatch.waits_for("synchronize"),
    ):
        yield
