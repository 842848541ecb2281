"""A CPU backend whose `wait` returns at once, as NCCL's does, for tests of lost ranks.

Collectives are Gloo's. A thread waits for them one by one, as a CUDA stream would, and `wait`
returns before that. If a rank is missing, nothing is raised: the thread hangs, and reading a value
(`QueueingDevice.read`) hangs until the group is aborted.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

NAME = "queued"


class QueueingDevice:
    """Stands in for a CUDA device with one stream."""

    def __init__(self) -> None:
        self.group_timeouts: list[timedelta] = []
        self._queue: queue.SimpleQueue[dist.Work] = queue.SimpleQueue()
        self._queued = self._done = 0
        self._aborted = threading.Event()
        threading.Thread(target=self._stream, daemon=True).start()

    def _stream(self) -> None:
        while True:
            try:
                self._queue.get().wait()
            except RuntimeError:  # NCCL would wait for ever
                return
            self._done += 1

    def queue(self, work: dist.Work) -> "Queued":
        self._queue.put(work)
        self._queued += 1
        return Queued(self.mark())

    def mark(self) -> "Mark":
        return Mark(self, self._queued)

    def reached(self, place: int) -> bool:
        return self._done >= place

    def read(self) -> bool:
        """Waits for all queued collectives, as `Tensor.item` does; returns False if they were
        aborted.
        """
        mark = self.mark()
        while not mark.query():
            if self._aborted.wait(0.01):
                return False
        return True

    def abort(self) -> None:
        self._aborted.set()

    def group(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> "QueuedGroup":
        self.group_timeouts.append(timeout)
        return QueuedGroup(self, dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


class Mark:
    """A position in the stream, like a CUDA event."""

    def __init__(self, device: QueueingDevice, place: int) -> None:
        self._device = device
        self._place = place

    def query(self) -> bool:
        return self._device.reached(self._place)


class Queued(dist.Work):
    """A collective whose `wait` returns at once."""

    def __init__(self, mark: Mark) -> None:
        super().__init__()
        self._mark = mark

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return self._mark.query()


class QueuedGroup(dist.ProcessGroup):
    """Gloo's collectives without their waits."""

    def __init__(self, device: QueueingDevice, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._device = device
        self._gloo = gloo
        self._name = ""

    @property
    def group_name(self) -> str:
        """The name that torch sets; its own property reads that of a backend in C++."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _get_backend(self, device: object) -> "QueuedGroup":
        """Returns this group, which coalesces no messages."""
        return self

    def allreduce(self, *arguments: Any) -> Queued:
        return self._device.queue(self._gloo.allreduce(*arguments))

    def broadcast(self, *arguments: Any) -> Queued:
        return self._device.queue(self._gloo.broadcast(*arguments))

    def send(self, *arguments: Any) -> Queued:
        return self._device.queue(self._gloo.send(*arguments))

    def recv(self, *arguments: Any) -> Queued:
        return self._device.queue(self._gloo.recv(*arguments))

    def _allgather_base(self, *arguments: Any) -> Queued:
        """Returns when the result is there: callers read it at once, which would wait on a GPU."""
        work = self._device.queue(self._gloo._allgather_base(*arguments))
        self._device.read()
        return work

    all_gather_single = _allgather_base

    def abort(self) -> None:
        self._device.abort()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME


@contextmanager
def queueing() -> Iterator[QueueingDevice]:
    """Binds meshes of this process to groups whose `wait` returns at once."""
    device = QueueingDevice()
    dist.Backend.register_backend(NAME, device.group, devices=["cpu"])
    new_group: Callable[..., Any] = dist.new_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", partial(new_group, backend=NAME))
        for module in ("mesh.axes", "collectives.watchdog"):
            patch.setattr(f"megatron_parallel.{module}.marker_factory", lambda _: device.mark)
        yield device
