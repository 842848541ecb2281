"""Softmax of scaled scores over the places that may be attended."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_kernels.ops.precision import upcast
from megatron_kernels.registry import AUTO, Backend, accept_all, op


def reference(scores: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """Written out: shift by the row's largest score, exponentiate, divide by the sum."""
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
    """`torch.softmax`; masked places get the lowest number, not -inf, so that no row is NaN."""
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
    Backend("reference", reference, accept_all, "plain torch, in float32 or float64"),
)
def softmax(
    scores: Float[Tensor, "*rows t"],
    allowed: Bool[Tensor, "..."] | None = None,
    scale: float = 1.0,
    *,
    backend: str = AUTO,
) -> Float[Tensor, "*rows t"]:
    """Softmax of `scale * scores` over the last dimension, among the allowed places only.

    Args:
        scores: `[..., t]`.
        allowed: True where a place may be attended; broadcasts against `scores`. None for all.
        scale: Multiplies the scores first.
        backend: "auto" or the name of one backend.

    Returns:
        `[..., t]` in the dtype of `scores`, computed in float32 at least. Each row sums to one; a
        row with no allowed place is all zeros.
    """
    return softmax.run(backend, scores, allowed, scale)
