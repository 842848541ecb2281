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
    "vocab_loss_forward(Tensor logits, Tensor targets, int valid) -> (Tensor, Tensor, Tensor)",
    *_MODULES,
)
_REST: Final = (
    "Tensor targets, Tensor lse, Tensor dloss, int valid, float at_target, float everywhere"
)
_BACKWARD: Final = TritonOp(f"vocab_loss_backward(Tensor logits, {_REST}) -> Tensor", *_MODULES)
_BACKWARD_IN_PLACE: Final = TritonOp(
    f"vocab_loss_backward_(Tensor(a!) logits, {_REST}) -> ()", *_MODULES
)


def vocab_loss_forward_fake(
    logits: Tensor, targets: Tensor, valid: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the outputs of `vocab_loss_forward` without values."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    lse = logits.new_empty(logits.shape[0], dtype=dtype)
    return lse, torch.empty_like(lse), torch.empty_like(lse)


def vocab_loss_backward_fake(logits: Tensor, *_: Any) -> Tensor:
    """Returns the output of `vocab_loss_backward` without values."""
    return logits.new_empty(logits.shape)


def vocab_loss_backward__fake(logits: Tensor, *_: Any) -> None:
    """Returns nothing, as `vocab_loss_backward_` does."""


class _Loss(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        targets = targets.contiguous()
        lse, picked, _ = _FORWARD(logits, targets, logits.shape[-1])
        ctx.save_for_backward(logits, targets, lse)
        return torch.where(targets == IGNORED, 0.0, lse - picked)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, lse = ctx.saved_tensors
        dloss = torch.where(targets == IGNORED, 0.0, grads[0])
        return _BACKWARD(logits, targets, lse, dloss, logits.shape[-1], 1.0, 0.0), None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Reads the logits once in each pass; saves them and one number for each row."""
    loss: Tensor = _Loss.apply(_as_rows(logits), targets.reshape(-1))  # type: ignore[no-untyped-call]
    return loss.view(targets.shape)


def vocab_cross_entropy(
    logits: Tensor, targets: Tensor, valid: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Reads the logits once."""
    lse, picked, total = _FORWARD(_as_rows(logits), _flat(targets), valid)
    shape = targets.shape
    return lse.view(shape), picked.view(shape), total.view(shape)


def vocab_cross_entropy_gradient(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    dloss: Tensor,
    valid: int,
    at_target: float,
    everywhere: float,
    overwrites: bool,
) -> Tensor:
    """Reads the logits once, and writes the gradient once, over them if that is allowed."""
    rows = _as_rows(logits)
    rest = _flat(targets), _flat(lse), _flat(dloss), valid, at_target, everywhere
    if overwrites and logits.is_contiguous():
        _BACKWARD_IN_PLACE(rows, *rest)
        return logits
    out: Tensor = _BACKWARD(rows, *rest)
    return out.view(logits.shape)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1).contiguous()


def _as_rows(logits: Tensor) -> Tensor:
    """Returns the logits as a matrix whose rows are contiguous."""
    rows = logits.reshape(-1, logits.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def unsupported_reason(logits: Tensor, *_: Any) -> str | None:
    """Returns why the kernels do not support these arguments."""
    return triton_op.unsupported_reason(logits)
