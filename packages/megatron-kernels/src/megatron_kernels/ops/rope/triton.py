"""Rotary position embedding by our Triton kernels."""

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_kernels.ops import triton_op
from megatron_kernels.ops.triton_op import TritonOp

_MODULES: Final = ("megatron_kernels.triton_kernels.rope", "megatron_kernels.ops.rope.triton")
_ROTATE: Final = TritonOp(
    "rope_rotate(Tensor x, Tensor cos, Tensor sin, bool interleaved, int direction) -> Tensor",
    *_MODULES,
)
_UNPACK: Final = TritonOp(
    "rope_unpack(Tensor fused, Tensor cos, Tensor sin, int queries, bool interleaved) "
    "-> (Tensor, Tensor, Tensor)",
    *_MODULES,
)
_PACK: Final = TritonOp(
    "rope_pack(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, int queries, "
    "bool interleaved) -> Tensor",
    *_MODULES,
)


def rope_rotate_fake(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, direction: int
) -> Tensor:
    """Returns the output of `rope_rotate` without values."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def rope_unpack_fake(
    fused: Tensor, cos: Tensor, sin: Tensor, queries: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the outputs of `rope_unpack` without values."""
    s, b, groups, _, d = fused.shape
    k, v = (fused.new_empty(s, b, groups, d) for _ in range(2))
    return fused.new_empty(s, b, groups * queries, d), k, v


def rope_pack_fake(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, queries: int, interleaved: bool
) -> Tensor:
    """Returns the output of `rope_pack` without values."""
    s, b, heads, d = dq.shape
    return dk.new_empty(s, b, heads // queries, queries + 2, d)


def _rows(x: Tensor) -> Tensor:
    """Returns a tensor whose last dim is contiguous, which the kernels need."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        y: Tensor = _ROTATE(_rows(x), cos, sin, interleaved, 1)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _ROTATE(_rows(grads[0]), *ctx.saved_tensors, ctx.interleaved, -1), None, None, None


class _Packed(Function):
    @staticmethod
    def forward(
        ctx: Any, fused: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, repeat: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.queries, ctx.interleaved = fused.shape[3] - 2, interleaved
        q, k, v = _UNPACK(fused.contiguous(), cos, sin, ctx.queries, interleaved)
        if repeat:  # here, so that the backward pass gets the gradients of all heads
            k, v = (t.expand(-1, -1, ctx.queries, -1) for t in (k, v))
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        packed = _PACK(*map(_rows, grads), *ctx.saved_tensors, ctx.queries, ctx.interleaved)
        return packed, None, None, None, None


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates in one kernel each way."""
    y: Tensor = _Rope.apply(x, cos, sin, interleaved)  # type: ignore[no-untyped-call]
    return y


def rope_qkv(
    fused: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, repeat: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates and separates in one kernel each way; the fused projection is not saved."""
    found: tuple[Tensor, Tensor, Tensor] = _Packed.apply(fused, cos, sin, interleaved, repeat)  # type: ignore[no-untyped-call]
    return found


def unsupported_reason(x: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> str | None:
    """Returns why the kernels do not support these arguments."""
    return triton_op.unsupported_reason(x, cos, sin)
