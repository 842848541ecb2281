"""Softmax of scaled scores over the allowed entries."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_kernels.ops.precision import upcast
from megatron_kernels.ops.softmax import triton
from megatron_kernels.ops.triton_op import triton_backend
from megatron_kernels.registry import AUTO, Backend, accept_all, op


def reference(scores: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """Subtracts the largest score of the row, exponentiates, and divides by the sum."""
    values = upcast(scores) * scale
    if allowed is None:
        powers = torch.exp(values - values.amax(-1, keepdim=True))
        return (powers / powers.sum(-1, keepdim=True)).to(scores.dtype)
    lowest = torch.finfo(values.dtype).min
    largest = torch.where(allowed, values, lowest).amax(-1, keepdim=True)
    powers = torch.where(allowed, torch.exp(torch.where(allowed, values - largest, 0)), 0)
    total = powers.sum(-1, keepdim=True)
    return (powers / torch.where(total > 0, total, 1)).to(scores.dtype)


def fused(scores: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """Calls `torch.softmax`; masked entries are the lowest number, not -inf, so no row is NaN."""
    values = upcast(scores)
    if scale != 1.0:
        values = values * scale
    if allowed is None:
        return torch.softmax(values, -1).to(scores.dtype)
    forbidden = ~allowed
    values = values.masked_fill(forbidden, torch.finfo(values.dtype).min)
    return torch.softmax(values, -1).masked_fill(forbidden, 0).to(scores.dtype)


@op(
    Backend("torch", fused, accept_all, "torch.softmax"),
    triton_backend(triton.softmax, triton.unsupported_reason, "one kernel of ours each way"),
    Backend("reference", reference, accept_all, "plain torch, in float32 or float64"),
)
def softmax(
    scores: Float[Tensor, "*rows t"],
    allowed: Bool[Tensor, "..."] | None = None,
    scale: float = 1.0,
    *,
    backend: str = AUTO,
) -> Float[Tensor, "*rows t"]:
    """Computes the softmax of `scale * scores` over the last dim, among the allowed entries only.

    Args:
        scores: `[..., t]`.
        allowed: True for entries that take part; broadcasts against `scores`. None means all.
        scale: Factor of the scores.
        backend: "auto" or the name of one backend.

    Returns:
        `[..., t]` in the dtype of `scores`, computed in at least float32. Each row sums to one; a
        row without allowed entries is all zeros.
    """
    return softmax.run(backend, scores, allowed, scale)
