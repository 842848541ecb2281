"""Where tensors saved for the backward pass stay: sharded over an axis, or in host memory."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from megatron_parallel import _compat
from megatron_parallel._compat import weak_storage_ref
from megatron_parallel.collectives.operations import all_gather
from megatron_parallel.mesh.axes import Axis
from megatron_parallel.side_stream import SideStream

PURPOSE: Final = "saved activations"
"""Purpose of the gathers, as reported in `Traffic` and in errors."""


class SavedTensorsHooks(Protocol):
    """A way to save tensors."""

    def enabled(self) -> AbstractContextManager[object]:
        """Returns a context in which autograd packs tensors to save and unpacks them on use."""


class ShardSavedTensors:
    """Saves on each rank of an axis its shard of a tensor that all of them have (ZeRO-R's P_a).

    Rajbhandari et al. 2020, section 6.1; Megatron's `--distribute-saved-activations`. The backward
    pass restores the tensor with one all-gather.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def enabled(self) -> AbstractContextManager[object]:
        """Returns the context of `SavedTensorsHooks`; hooks already active save the shards."""
        outer = _compat.active_saved_tensors_hooks()
        if outer is None:
            return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        put, take = outer

        def pack(t: Tensor) -> Any:
            shard, shape = self._pack(t)
            return put(shard), shape

        return torch.autograd.graph.saved_tensors_hooks(
            pack, lambda packed: self._unpack((take(packed[0]), packed[1]))
        )

    def _pack(self, t: Tensor) -> tuple[Tensor, torch.Size | None]:
        size = self.axis.size
        if size == 1 or t.numel() < size:
            return t.detach(), None
        length = -(-t.numel() // size)
        start = min(self.axis.index * length, t.numel())
        local = t.detach().flatten()[start : start + length]
        shard = local.new_zeros(length)
        shard[: local.numel()] = local
        return shard, t.shape

    def _unpack(self, packed: tuple[Tensor, torch.Size | None]) -> Tensor:
        shard, shape = packed
        if shape is None:
            return shard
        whole = all_gather(shard, self.axis, purpose=PURPOSE)
        return whole[: shape.numel()].view(shape)


class OffloadSavedTensors:
    """Saves activations in host memory, pinned if the device is a GPU.

    Parameters and the tensors in `except_for` stay on the device. Whole storages are moved, each
    once, however many functions save them or views of them. They return to the device once in a
    backward pass and stay there until the last function that saved them has run.

    On a GPU the copies run on a stream beside computation. What was saved in one `enabled()` block
    returns together, while the backward pass runs through the block after it: the device holds the
    activations of two blocks.

    Args:
        except_for: Tensors that many layers share, such as tables and masks.

    Attributes:
        offloaded: Number of storages moved to host memory so far.
        reloaded: Number of storages moved back to the device so far.
        nbytes: Bytes moved to host memory so far.
    """

    def __init__(self, except_for: Iterable[Tensor] = ()) -> None:
        self._stays = {t.untyped_storage()._cdata for t in except_for}
        self._by_storage: WeakValueDictionary[Any, _Offloaded] = WeakValueDictionary()
        self._blocks: list[WeakValueDictionary[int, _Offloaded]] = []
        self._side: SideStream | None = None
        self._next: int | None = None  # the block that returns next
        self.offloaded = self.reloaded = self.nbytes = 0

    def enabled(self) -> AbstractContextManager[object]:
        """Returns the context of `SavedTensorsHooks`."""
        self._blocks.append(WeakValueDictionary())
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, t: Tensor) -> Any:
        owner = t if t._base is None else t._base
        storage = t.untyped_storage()
        if isinstance(owner, nn.Parameter) or storage._cdata in self._stays or not t.numel():
            return t.detach()
        key = storage._cdata, t._version, t.dtype
        offloaded = self._by_storage.get(key)
        if offloaded is None or not offloaded.in_use():
            if self._side is None:
                self._side = SideStream.of(t.device)
            offloaded = self._by_storage[key] = _Offloaded(t, self._side, len(self._blocks) - 1)
            self._blocks[-1][self.offloaded] = offloaded
            self._next = None
            self.offloaded += 1
            self.nbytes += offloaded.host.nbytes
        return offloaded, (t.shape, t.stride(), t.storage_offset())

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        offloaded, view = packed
        self._reload(offloaded)
        if self._side is not None:
            self._reload_blocks(offloaded.block)
        result: Tensor = offloaded.take().as_strided(*view)
        return result

    def _reload_blocks(self, block: int) -> None:
        """Starts the copies of a block, and of the one before it."""
        if self._next is None:
            self._next = block
        while self._next >= max(0, block - 1):
            for each in reversed(list(self._blocks[self._next].values())):
                self._reload(each)
            self._next -= 1

    def _reload(self, offloaded: "_Offloaded") -> None:
        if offloaded.reloaded is None:
            offloaded.reload()
            self.reloaded += 1


class _Offloaded:
    """A storage in host memory; views of it are reloaded together, with their original strides."""

    __slots__ = (
        "__weakref__",
        "_copied",
        "_device",
        "_side",
        "_source",
        "block",
        "host",
        "reloaded",
    )

    def __init__(self, t: Tensor, side: SideStream | None, block: int) -> None:
        storage = t.untyped_storage()
        source = t.detach().as_strided((storage.nbytes() // t.element_size(),), (1,), 0)
        self.block = block
        self.host = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
        self.reloaded: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._device = source.device
        self._side = side
        self._source = weak_storage_ref(storage)
        with nullcontext() if side is None else side.running():
            self.host.copy_(source, non_blocking=True)
        if side is not None:
            side.uses(source)

    def in_use(self) -> bool:
        """Returns whether a tensor still uses the storage that was copied."""
        return not self._source.expired()

    def reload(self) -> None:
        """Starts copying the elements to the device."""
        with nullcontext() if self._side is None else self._side.running():
            self.reloaded = self.host.to(self._device, non_blocking=True, copy=True)
        if self._side is not None:
            self._copied = self._side.mark()

    def take(self) -> Tensor:
        """Returns the elements on the device; the current stream waits for their copy."""
        reloaded = cast(Tensor, self.reloaded)
        if self._side is not None and self._copied is not None:
            self._side.hand_over(reloaded, self._copied)
        return reloaded
