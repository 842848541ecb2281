"""Dropout with bias and addition by our Triton kernel."""

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_kernels.ops import triton_op
from megatron_kernels.ops.triton_op import TritonOp

_DROPOUT: Final = TritonOp(
    "dropout_add(Tensor x, Tensor? bias, Tensor? residual, Tensor word0, Tensor word1, int site0, "
    "int site1, int least, float scale) -> Tensor",
    "megatron_kernels.triton_kernels.dropout",
    "megatron_kernels.ops.dropout.triton",
)


def dropout_add_fake(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    word0: Tensor,
    word1: Tensor,
    site0: int,
    site1: int,
    least: int,
    scale: float,
) -> Tensor:
    """Returns the output of `dropout_add` without values."""
    return torch.empty_like(x)


class _Dropout(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        word0: Tensor,
        word1: Tensor,
        site: tuple[int, int, int, float],
    ) -> Tensor:
        words = word0.contiguous(), word1.contiguous()
        ctx.save_for_backward(*words)
        ctx.site, ctx.bias_dtype = site, None if bias is None else bias.dtype
        bias = None if bias is None else bias.contiguous()
        y: Tensor = _DROPOUT(x.contiguous(), bias, residual.contiguous(), *words, *site)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx = _DROPOUT(grads[0].contiguous(), None, None, *ctx.saved_tensors, *ctx.site)
        of_bias = None
        if ctx.bias_dtype is not None and ctx.needs_input_grad[1]:
            of_bias = dx.flatten(0, 1).sum(0).to(ctx.bias_dtype)
        return dx, of_bias, grads[0], None, None, None


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    word0: Tensor,
    word1: Tensor,
    site: tuple[int, int, int, float],
) -> Tensor:
    """Computes all in one kernel each way; saves the key."""
    y: Tensor = _Dropout.apply(x, bias, residual, word0, word1, tuple(site))  # type: ignore[no-untyped-call]
    return y


def unsupported_reason(x: Tensor, bias: Tensor | None, residual: Tensor, *_: Any) -> str | None:
    """Returns why the kernel does not support these arguments."""
    if residual.dtype != x.dtype:
        return f"x is {x.dtype} and the residual stream {residual.dtype}; they must agree"
    return triton_op.unsupported_reason(x, bias)
