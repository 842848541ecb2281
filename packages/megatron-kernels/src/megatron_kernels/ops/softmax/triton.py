"""Softmax by our Triton kernels."""

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_kernels.ops import triton_op
from megatron_kernels.ops.triton_op import TritonOp

_MODULES: Final = ("megatron_kernels.triton_kernels.softmax", "megatron_kernels.ops.softmax.triton")
_FORWARD: Final = TritonOp(
    "softmax_forward(Tensor scores, Tensor? allowed, float scale) -> Tensor", *_MODULES
)
_BACKWARD: Final = TritonOp(
    "softmax_backward(Tensor dy, Tensor y, float scale) -> Tensor", *_MODULES
)


def softmax_forward_fake(scores: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """Returns the output of `softmax_forward` without values."""
    return torch.empty_like(scores)


def softmax_backward_fake(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """Returns the output of `softmax_backward` without values."""
    return torch.empty_like(y)


class _Softmax(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
        if allowed is not None:
            allowed = allowed.expand_as(scores).contiguous()
        y: Tensor = _FORWARD(scores.contiguous(), allowed, scale)
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        return _BACKWARD(grads[0].contiguous(), y, ctx.scale), None, None


def softmax(scores: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """Computes scale, mask and softmax in one kernel each way; saves the result."""
    y: Tensor = _Softmax.apply(scores, allowed, scale)  # type: ignore[no-untyped-call]
    return y


def unsupported_reason(scores: Tensor, allowed: Tensor | None, scale: float) -> str | None:
    """Returns why the kernels do not support these arguments."""
    return triton_op.unsupported_reason(scores, row=scores.shape[-1])
