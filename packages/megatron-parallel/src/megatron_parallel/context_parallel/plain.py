"""The pair of block functions that a ring is built from: their contract, and plain torch.

    scores = scale * q k^T        p = softmax of the allowed scores        out = p v

The forward function also gives the log of each row's sum of exponentials, lse, by which the outputs
of several blocks are combined. The backward function takes the *final* out and lse, so that
p = exp(scores - lse) and a block's share of the gradients need nothing of other blocks (Dao,
FlashAttention-2, section 3.1; Liu et al., Ring Attention).
"""

import math
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_parallel.context_parallel.mask import BlockMask


@runtime_checkable
class BlockOperations(Protocol):
    """Attention over one block of keys, forward and backward.

    `mask` is what the plan of the ring holds. A function that drops probabilities may do so if it
    finds the same mask in both passes; lse is that of all probabilities.
    """

    def forward(
        self,
        q: Float[Tensor, "s b n d"],
        k: Float[Tensor, "t b g d"],
        v: Float[Tensor, "t b g dv"],
        mask: Any,
    ) -> tuple[Float[Tensor, "s b n dv"], Float[Tensor, "s b n"]]:
        """Returns out and lse, which is float32 or float64, and -inf where a row sees no key."""

    def backward(
        self,
        dout: Float[Tensor, "s b n dv"],
        q: Float[Tensor, "s b n d"],
        k: Float[Tensor, "t b g d"],
        v: Float[Tensor, "t b g dv"],
        out: Float[Tensor, "s b n dv"],
        lse: Float[Tensor, "s b n"],
        mask: Any,
    ) -> tuple[Float[Tensor, "s b n d"], Float[Tensor, "t b g d"], Float[Tensor, "t b g dv"]]:
        """Returns this block's share of dq, and dk and dv."""


class PlainBlocks:
    """`BlockOperations` over a `BlockMask`, written out in float32 (float64 for float64).

    Args:
        scale: Multiplies the scores; None for `1/sqrt(d)`.
    """

    def __init__(self, scale: float | None = None) -> None:
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
        """Attention over one block."""
        scores = self._scores(q, k, mask)
        lse = scores.logsumexp(-1)
        out = torch.einsum("bnst,tbnd->sbnd", _probabilities(scores, lse), _spread(v, q))
        return out.to(q.dtype), lse.permute(2, 0, 1)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: BlockMask,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients from one block."""
        p = _probabilities(self._scores(q, k, mask), lse.permute(1, 2, 0))
        gradient = _raised(dout)
        dp = torch.einsum("sbnd,tbnd->bnst", gradient, _spread(v, q))
        share = (gradient * _raised(out)).sum(-1).permute(1, 2, 0)[..., None]
        dscores = self._scale(q) * p * (dp - share)
        dq = torch.einsum("bnst,tbnd->sbnd", dscores, _spread(k, q))
        dk = torch.einsum("bnst,sbnd->tbnd", dscores, _raised(q))
        dv = torch.einsum("bnst,sbnd->tbnd", p, gradient)
        groups = (k.shape[2], -1)
        dk, dv = (torch.unflatten(x, 2, groups).sum(3) for x in (dk, dv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _scale(self, q: Tensor) -> float:
        return 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale

    def _scores(self, q: Tensor, k: Tensor, mask: BlockMask) -> Tensor:
        scores = torch.einsum("sbnd,tbnd->bnst", _raised(q), _spread(k, q)) * self._scale(q)
        if mask.all_allowed:
            return scores
        return scores.masked_fill(~mask.allowed()[:, None], -math.inf)


def _raised(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


def _spread(t: Tensor, q: Tensor) -> Tensor:
    """Keys or values `[t, b, g, d]`, once for every head of the queries."""
    return _raised(t).repeat_interleave(q.shape[2] // t.shape[2], 2)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse); zeros, not NaN, in a row that sees no key."""
    return torch.exp(scores - torch.where(torch.isneginf(lse), 0, lse)[..., None])
