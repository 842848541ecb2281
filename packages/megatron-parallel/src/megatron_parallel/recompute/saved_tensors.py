"""Where tensors saved for the backward pass stay: sharded over an axis, or in host memory."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from megatron_parallel import _compat
from megatron_parallel._compat import resolve_weak_storage, weak_storage_ref
from megatron_parallel.collectives.operations import all_gather
from megatron_parallel.mesh.axes import Axis

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
    once, however many functions save them or views of them. Copies run on the current stream: the
    host does not wait for them, and nothing hides their time.

    Args:
        except_for: Tensors that many layers share, such as tables and masks.

    Attributes:
        offloaded: Number of storages moved to host memory so far.
        reloaded: Number of storages moved back to the device so far.
        nbytes: Bytes moved to host memory so far.
    """

    def __init__(self, except_for: Iterable[Tensor] = ()) -> None:
        self._stays = {t.untyped_storage().data_ptr() for t in except_for}
        self._by_storage: WeakValueDictionary[tuple[int, int], _Offloaded] = WeakValueDictionary()
        self.offloaded = self.reloaded = self.nbytes = 0

    def enabled(self) -> AbstractContextManager[object]:
        """Returns the context of `SavedTensorsHooks`."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, t: Tensor) -> Any:
        owner = t if t._base is None else t._base
        storage = t.untyped_storage()
        if isinstance(owner, nn.Parameter) or storage.data_ptr() in self._stays or not t.numel():
            return t.detach()
        key = storage._cdata, t._version
        offloaded = self._by_storage.get(key)
        if offloaded is None or not offloaded.in_use():
            offloaded = self._by_storage[key] = _Offloaded(storage)
            self.offloaded += 1
            self.nbytes += offloaded.host.nbytes
        return offloaded, t.dtype, (t.shape, t.stride(), t.storage_offset())

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        offloaded, dtype, view = packed
        whole, copied = offloaded.reload()
        self.reloaded += copied
        result: Tensor = whole.view(dtype).as_strided(*view)
        return result


class _Offloaded:
    """A storage in host memory; views of it are reloaded together, with their original strides."""

    __slots__ = ("__weakref__", "_device", "_reloaded", "_source", "host")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        source = _bytes(storage)
        self.host = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
        self.host.copy_(source, non_blocking=True)
        self._device = source.device
        self._source = weak_storage_ref(storage)
        self._reloaded: Any = None

    def in_use(self) -> bool:
        """Returns whether a tensor still uses the storage that was copied."""
        return not self._source.expired()

    def reload(self) -> tuple[Tensor, bool]:
        """Returns the bytes on the device, and whether they had to be copied.

        They are not copied while a view of an earlier copy is in use.
        """
        storage = None if self._reloaded is None else resolve_weak_storage(self._reloaded)
        if storage is not None:
            return _bytes(storage), False
        on_device = self.host.to(self._device, non_blocking=True, copy=True)
        self._reloaded = weak_storage_ref(on_device.untyped_storage())
        return on_device, True


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
