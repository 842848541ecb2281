"""Cross-entropy by our Triton kernels."""

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_kernels.ops import triton_op
from megatron_kernels.ops.triton_op import TritonOp

IGNORED: Final = -100
"""Target of a token without loss."""

_MODULES: Final = ("megatron_kernels.triton_kernels.loss", "megatron_kernels.ops.loss.triton")
_FORWARD: Final = TritonOp(
    "cross_entropy_forward(Tensor logits, Tensor targets, int ignored) -> (Tensor, Tensor)",
    *_MODULES,
)
_BACKWARD: Final = TritonOp(
    "cross_entropy_backward(Tensor logits, Tensor targets, Tensor lse, Tensor dloss, int ignored) "
    "-> Tensor",
    *_MODULES,
)


def cross_entropy_forward_fake(
    logits: Tensor, targets: Tensor, ignored: int
) -> tuple[Tensor, Tensor]:
    """Returns the outputs of `cross_entropy_forward` without values."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    loss = logits.new_empty(logits.shape[0], dtype=dtype)
    return loss, torch.empty_like(loss)


def cross_entropy_backward_fake(
    logits: Tensor, targets: Tensor, lse: Tensor, dloss: Tensor, ignored: int
) -> Tensor:
    """Returns the output of `cross_entropy_backward` without values."""
    return logits.new_empty(logits.shape)


class _Loss(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        targets = targets.contiguous()
        loss, lse = _FORWARD(logits, targets, IGNORED)
        ctx.save_for_backward(logits, targets, lse)
        out: Tensor = loss
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, lse = ctx.saved_tensors
        return _BACKWARD(logits, targets, lse, grads[0].contiguous(), IGNORED), None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Reads the logits once in each pass; saves them and one number for each row."""
    rows = logits.reshape(-1, logits.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    loss: Tensor = _Loss.apply(rows, targets.reshape(-1))  # type: ignore[no-untyped-call]
    return loss.view(targets.shape)


def unsupported_reason(logits: Tensor, targets: Tensor) -> str | None:
    """Returns why the kernels do not support these arguments."""
    return triton_op.unsupported_reason(logits)
