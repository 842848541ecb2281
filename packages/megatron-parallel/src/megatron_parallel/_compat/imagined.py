"""Fake tensors, fake process groups, and the classes of torch's operations."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils.flop_counter import flop_registry

_ATEN: Final = torch.ops.aten

_ATTENTION: Final = frozenset(
    {
        _ATEN._scaled_dot_product_flash_attention,
        _ATEN._scaled_dot_product_flash_attention_backward,
        _ATEN._scaled_dot_product_flash_attention_for_cpu,
        _ATEN._scaled_dot_product_flash_attention_for_cpu_backward,
        _ATEN._scaled_dot_product_efficient_attention,
        _ATEN._scaled_dot_product_efficient_attention_backward,
        _ATEN._scaled_dot_product_cudnn_attention,
        _ATEN._scaled_dot_product_cudnn_attention_backward,
    }
)

PRODUCTS: Final = frozenset(
    {
        _ATEN.mm,
        _ATEN.bmm,
        _ATEN.addmm,
        _ATEN.baddbmm,
        _ATEN.addmv,
        _ATEN.mv,
        _ATEN._grouped_mm,
        _ATEN._scaled_mm,
        _ATEN._scaled_grouped_mm,
        _ATEN.convolution,
        _ATEN.convolution_backward,
        *_ATTENTION,
    }
)
"""Matrix products and fused attention, in every overload."""

_PRODUCTS_INTO: Final = (_ATEN.mm.dtype_out, _ATEN.addmm.dtype_out)

OVERWRITES: Final = frozenset(
    {
        _ATEN.copy_,
        _ATEN.fill_,
        _ATEN.zero_,
        _ATEN._foreach_copy_,
        _ATEN._foreach_zero_,
    }
)
"""Operations in place that do not read what they overwrite."""

ALLOCATIONS: Final = frozenset(
    {
        _ATEN.empty,
        _ATEN.empty_like,
        _ATEN.empty_strided,
        _ATEN.new_empty,
        _ATEN.new_empty_strided,
        _ATEN.detach,
        _ATEN.lift_fresh,
        _ATEN.set_,
        _ATEN._unsafe_view,
        _ATEN._reshape_alias,
    }
)
"""Operations that start no kernel."""


QUERIES: Final = frozenset({torch.ops.prim.device, _ATEN.is_pinned})
"""Operations that return a property of a tensor."""


def result_of(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Calls an operation.

    torch 2.11 has no rule for fake tensors in products that add to an `out` of another dtype.
    """
    if func in _PRODUCTS_INTO and has_no_values(kwargs["out"]):
        return kwargs["out"]
    return func(*args, **kwargs)


def flops_of(packet: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> int:
    """Returns the floating-point operations of a matrix product or of attention, else 0."""
    if packet is _ATEN._grouped_mm:  # which torch does not count
        (left, right), groups = (t.shape for t in args[:2]), 1
        if len(left) == 3 and len(right) == 3:
            groups = left[0]
        return int(2 * groups * left[-2] * left[-1] * right[-1])
    if packet not in flop_registry:
        return 0
    shapes = [x for x in args if not isinstance(x, torch.dtype)]
    if packet in _ATTENTION:  # torch 2.11 does not count grouped heads
        heads = max(x.shape[1] for x in args if isinstance(x, Tensor) and x.dim() == 4)
        shapes = [
            (x.shape[0], heads, *x.shape[2:]) if isinstance(x, Tensor) and x.dim() == 4 else x
            for x in shapes
        ]
    named = {name: x for name, x in kwargs.items() if name != "out"}
    return int(flop_registry[packet](*shapes, **named, out_val=out))


def device_type_of(tensor: Tensor) -> str:
    """Returns the type of a tensor's device, without an operation."""
    if isinstance(tensor, FakeTensor):
        return tensor.fake_device.type
    return tensor.device.type


def has_no_values(tensor: Tensor) -> bool:
    """Returns whether a tensor has a shape, a dtype and a device only: it is fake or meta."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


class _FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    # Constants are not copied to a device that does not exist.
    avoid_device_init = True


@contextmanager
def fake_tensors(*, device_exists: bool) -> Iterator[FakeTensorMode]:
    """Makes new tensors fake in the block. Constants may be real.

    Args:
        device_exists: Whether torch may allocate a number on the device first, as it otherwise does
            when it believes that there is one.
    """
    # Without it, torch allocates constants of a factory on the device.
    torch._C._set_only_lift_cpu_tensors(True)
    init = fake_tensor.init_gpu_context if device_exists else _init_nothing
    try:
        with (
            patch.object(fake_tensor, "init_gpu_context", init),
            _FakeMode(allow_non_fake_inputs=True) as mode,
        ):
            yield mode
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


def _init_nothing(device: torch.device) -> None:
    """Replaces the allocation."""


def values_exist() -> AbstractContextManager[Any]:
    """Returns a context in which new tensors have values, within one of `fake_tensors`."""
    return unset_fake_temporarily()


def init_fake_group(rank: int, world_size: int) -> None:
    """Creates a default process group whose collectives return at once, with wrong values."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    store, hook = _distributed_c10d.HashStore(), sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=store)
    sys.excepthook = hook  # torch's writes the rank before every line


def new_fake_group(ranks: tuple[int, ...], timeout: timedelta) -> dist.ProcessGroup:
    """Creates such a group of these ranks. Other ranks need not take part."""
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout=timeout, use_local_synchronization=True
    )
    return group
