"""What one rank does on its device: waits, copies, kernels, bytes and memory, by code line."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_parallel._compat.imagined import (
    ALLOCATIONS,
    OVERWRITES,
    PRODUCTS,
    QUERIES,
    device_type_of,
    flops_of,
    has_no_values,
    result_of,
    values_exist,
)
from megatron_parallel.imagined.code_line import code_line
from megatron_parallel.imagined.functions import Queue
from megatron_parallel.imagined.sizes import needs_size
from megatron_parallel.imagined.storages import StorageLedger

_ATEN: Final = torch.ops.aten
_COUNTED: Final = ("aten", "megatron_kernels", "megatron_optim")
"""Namespaces of operations that start kernels; all but the first have our own kernels."""


class DeviceLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations on tensors of one type of device in a `with` block.

    A wait is an operation whose result the host needs: a value (``item``), a copy to the host, or a
    shape that depends on values. An operation on several tensors at once (foreach) counts as one
    kernel. Element-wise bytes are those that all kernels but matrix products and fused attention
    read and write; a tensor changed in place counts twice.

    Args:
        device_type: Type of the device.
        storages: Records memory.

    Attributes:
        waits: Number of waits, by cause and code line.
        blocking_copies: Number of copies from the host for which the host waits, by code line.
        copies: Number of other copies from the host, by code line.
        kernels: Number of kernels, by operation.
        bytes_moved: Element-wise bytes, by code line.
        flops: Floating-point operations of matrix products and attention.
        storages: The memory.
        queue: The operations, by which events are reached.
    """

    def __init__(self, device_type: str, storages: StorageLedger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.storages = storages
        self.queue = Queue()
        self.clear()

    def clear(self) -> None:
        """Sets all counts to zero and starts a new peak of memory."""
        self.waits: Counter[str] = Counter()
        self.blocking_copies: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.bytes_moved: Counter[str] = Counter()
        self.flops = 0
        self.storages.reset_peak()

    def wait(self, cause: str) -> None:
        """Counts a wait."""
        self.queue.drain()
        self.waits[f"{cause} at {code_line()}"] += 1

    def kernel(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Counts an element-wise kernel and the bytes of tensors that it reads and writes."""
        self.kernels[name] += 1
        self.bytes_moved[code_line()] += sum(t.numel() * t.element_size() for t in tensors)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns that torch.compile may trace functions while operations are counted."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        packet = func.overloadpacket
        if packet in QUERIES:
            return False if packet is _ATEN.is_pinned else func(*args, **given)
        if packet is _ATEN._pin_memory:
            return args[0]
        if packet is _ATEN.record_stream:
            return None
        if "pin_memory" in given:
            given["pin_memory"] = False
        inputs = [t for t in tree_leaves((args, given)) if isinstance(t, Tensor)]
        on_device = [t for t in inputs if self._is_on_device(t)]
        if not on_device and self._stays_on_host(inputs, given):
            with values_exist():
                return func(*args, **given)
        if on_device:
            self.queue.add()
        self._note_transfers(func, args, given, on_device)
        if (found := self._assumed(packet, args, given)) is not None:
            return found
        out = result_of(func, args, given)
        self._note_result(func, args, given, on_device, out)
        return out

    def _stays_on_host(self, inputs: list[Tensor], kwargs: Mapping[str, Any]) -> bool:
        """Returns whether an operation is one of the host, which computes values."""
        if self.device_type == "cpu" or any(has_no_values(t) for t in inputs):
            return False
        wanted = kwargs.get("device")
        return wanted is None or torch.device(wanted).type == "cpu"

    def _assumed(self, packet: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Returns a result for an operation whose result depends on values, or None."""
        if packet is _ATEN._local_scalar_dense:
            if device_type_of(args[0]) == self.device_type:
                self.wait("item")
            dtype = args[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if packet is _ATEN.bincount:
            length = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
            return args[0].new_empty(length)
        return None

    def _note_transfers(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], on_device: list[Tensor]
    ) -> None:
        packet = func.overloadpacket
        if on_device and needs_size(func, args, kwargs):
            self.wait(f"size of {packet.__name__}")
        if packet is _ATEN._to_copy:
            source = device_type_of(args[0])
            wanted = kwargs.get("device")
            target = source if wanted is None else torch.device(wanted).type
            asynchronous = bool(kwargs.get("non_blocking"))
        elif packet is _ATEN.copy_:
            source, target = device_type_of(args[1]), device_type_of(args[0])
            asynchronous = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        else:
            return
        if source == target:
            return
        if source == self.device_type and not asynchronous:
            self.wait("copy to the host")
        if target == self.device_type:
            (self.copies if asynchronous else self.blocking_copies)[code_line()] += 1

    def _note_result(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], on_device: list[Tensor], out: Any
    ) -> None:
        packet = func.overloadpacket
        results = [t for t in tree_leaves(out) if self._is_on_device(t)]
        for result in results:
            self.storages.note(result)
        if func.namespace not in _COUNTED or func.is_view or packet in ALLOCATIONS:
            return
        if packet in PRODUCTS:
            self.kernels[packet.__name__] += 1
            self.flops += flops_of(packet, args, kwargs, out)
        elif results or on_device:
            self.kernel(packet.__name__, self._operands(func, args, kwargs, results))

    def _operands(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], results: list[Tensor]
    ) -> list[Tensor]:
        """Returns what an operation reads and writes; twice what it changes in place."""
        read, written = list[Tensor](), {id(t): t for t in results}
        for number, argument in enumerate(func._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            tensors = [t for t in tree_leaves(value) if self._is_on_device(t)]
            changed = argument.alias_info is not None and argument.alias_info.is_write
            if changed:
                written |= {id(t): t for t in tensors}
            if not changed or not (argument.is_out or func.overloadpacket in OVERWRITES):
                read += tensors
        return [*{id(t): t for t in read}.values(), *written.values()]

    def _is_on_device(self, value: Any) -> bool:
        return isinstance(value, Tensor) and device_type_of(value) == self.device_type
