"""A backend on the CPU whose `wait` returns at once, as NCCL's does: for tests of lost ranks.

Collectives are Gloo's. A thread waits for one after the other, as a stream would; `wait` returns
before that. Where a rank is missing the thread hangs, nothing is raised, and so does reading a
value (`QueueingDevice.read`) until the group is aborted.
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
    """What a CUDA device with one stream is to NCCL."""

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
        """Wait for what has been queued, as `Tensor.item` does; False if it was aborted."""
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
    """A place in the stream, like an event."""

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

    def allreduce(self, *arguments: Any) -> Queued:
        return self._device.queue(self._gloo.allreduce(*arguments))

    def broadcast(self, *arguments: Any) -> Queued:
        return self._device.queue(self._gloo.broadcast(*arguments))

    def send(self, *arguments: Any) -> Queued:
        return self._device.queue(self._gloo.send(*arguments))

    def recv(self, *arguments: Any) -> Queued:
        return self._device.queue(self._gloo.recv(*arguments))

    def _allgather_base(self, *arguments: Any) -> Queued:
        """Returns when it is there: what is gathered is read at once, which waits on a GPU."""
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
    """In this process, bind meshes to groups whose `wait` returns at once."""
    device = QueueingDevice()
    dist.Backend.register_backend(NAME, device.group, devices=["cpu"])
    new_group: Callable[..., Any] = dist.new_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", partial(new_group, backend=NAME))
        for module in ("axes", "watchdog"):
            patch.setattr(f"megatron_parallel.{module}.marker_factory", lambda _: device.mark)
        yield device
