"""Memory of a device over time, by what it is for and by the line of code that allocated it."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from torch import Tensor

from megatron_parallel.imagined.code_line import code_line

OTHER: Final = "activations and temporaries"
"""Part of allocations outside of `StorageLedger.part`."""


class Allocation(NamedTuple):
    """A storage on the device.

    Attributes:
        nbytes: Its size in bytes, rounded up to the granularity of the allocator.
        part: What it is for.
        line: The line of code that allocated it.
    """

    nbytes: int
    part: str
    line: str


class StorageLedger:
    """Storages on a device from their allocation until they are freed.

    Args:
        granularity: Sizes are multiples of this number of bytes, as those of torch's CUDA
            allocator are multiples of 512.

    Attributes:
        live: Bytes that are allocated now.
        peak: Largest number of bytes that were allocated at once, since `reset_peak`.
    """

    def __init__(self, granularity: int = 512) -> None:
        self._granularity = granularity
        self._storages: dict[int, Allocation] = {}
        self._events: list[tuple[int, Allocation]] = []  # 1 for an allocation, -1 for its end
        self._base: list[Allocation] = []  # live at `reset_peak`
        self._peak_event = 0
        self._part = OTHER
        self.live = 0
        self.peak = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Labels what is allocated in the block."""
        before, self._part = self._part, name
        try:
            yield
        finally:
            self._part = before

    def relabel(self, part: str, tensors: Iterable[Tensor]) -> None:
        """Labels the storages of tensors that are allocated already, from now on."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._storages:
                self._storages[key] = self._storages[key]._replace(part=part)

    def note(self, tensor: Tensor) -> None:
        """Records the storage of a tensor on the device, if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        nbytes = -(-storage.nbytes() // self._granularity) * self._granularity
        made = Allocation(nbytes, self._part, code_line())
        self._storages[key] = made
        self._events.append((1, made))
        self.live += nbytes
        if self.live > self.peak:
            self.peak, self._peak_event = self.live, len(self._events)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        gone = self._storages.pop(key)
        self._events.append((-1, gone))
        self.live -= gone.nbytes

    def reset_peak(self) -> None:
        """Starts a new peak from what is allocated now."""
        self._base = list(self._storages.values())
        self._events = []
        self._peak_event = 0
        self.peak = self.live

    def at_peak(self) -> Counter[tuple[str, str]]:
        """Returns the bytes that were allocated at the peak, by part and code line."""
        held: Counter[tuple[str, str]] = Counter()
        for one in self._base:
            held[one.part, one.line] += one.nbytes
        for sign, one in self._events[: self._peak_event]:
            held[one.part, one.line] += sign * one.nbytes
        return +held

    def by_part(self) -> Counter[str]:
        """Returns the bytes that are allocated now, by part."""
        held: Counter[str] = Counter()
        for one in self._storages.values():
            held[one.part] += one.nbytes
        return held
