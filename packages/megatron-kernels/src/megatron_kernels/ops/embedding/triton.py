"""Embeddings by our Triton kernels."""

from typing import Any, Final

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_kernels.ops import triton_op
from megatron_kernels.ops.triton_op import TritonOp

_MODULES: Final = (
    "megatron_kernels.triton_kernels.embedding",
    "megatron_kernels.ops.embedding.triton",
)
_LOOKUP: Final = TritonOp(
    "vocab_lookup(Tensor tokens, Tensor weight, int start) -> Tensor", *_MODULES
)
_ADD: Final = TritonOp(
    "vocab_gradient_add(Tensor(a!) into, Tensor tokens, Tensor dy, int start, bool first) -> ()",
    *_MODULES,
)


def vocab_lookup_fake(tokens: Tensor, weight: Tensor, start: int) -> Tensor:
    """Returns the output of `vocab_lookup` without values."""
    return weight.new_empty(*tokens.shape, weight.shape[1])


def vocab_gradient_add_fake(
    into: Tensor, tokens: Tensor, dy: Tensor, start: int, first: bool
) -> None:
    """Returns nothing, as `vocab_gradient_add` does."""


class _Lookup(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, start: int) -> Tensor:
        tokens = tokens.contiguous()
        ctx.save_for_backward(tokens)
        ctx.start, ctx.shape = start, weight.shape
        y: Tensor = _LOOKUP(tokens, weight.contiguous(), start)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        of_weight = grads[0].new_empty(ctx.shape)
        _ADD(of_weight, tokens, grads[0].contiguous(), ctx.start, True)
        return None, of_weight, None


def vocab_embedding(weight: Tensor, tokens: Tensor, start: int) -> Tensor:
    """Reads rows in one kernel; the backward pass adds rows of equal tokens in their order."""
    y: Tensor = _Lookup.apply(tokens, weight, start)  # type: ignore[no-untyped-call]
    return y


def unsupported_reason(weight: Tensor, tokens: Tensor, start: int) -> str | None:
    """Returns why the kernels do not support these arguments."""
    return triton_op.unsupported_reason(weight)


def add_vocab_gradient(into: Tensor, dy: Tensor, tokens: Tensor, start: int, first: bool) -> Tensor:
    """Adds rows of equal tokens in their order, in float32; sorts the tokens first."""
    _ADD(into, tokens.contiguous(), dy.contiguous(), start, first)
    return into


def adding_unsupported_reason(
    into: Tensor, dy: Tensor, tokens: Tensor, start: int, first: bool
) -> str | None:
    """Returns why the kernels do not support these arguments."""
    if not into.is_contiguous():
        return "adds to a contiguous tensor only"
    return triton_op.unsupported_reason(into, dy)
