"""Block functions of ring attention: their protocol, and an implementation in torch.

    scores = scale * q k^T        p = softmax of the allowed scores        out = p v

The forward function also returns lse, the log-sum-exp of the scores of each row, with which the
outputs of several blocks are combined. The backward function takes the *final* out and lse, so
p = exp(scores - lse), and the gradients of a block do not depend on other blocks (Dao,
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

    `mask` is the mask of the block in the plan of the ring. With dropout of probabilities, both
    passes must use the same dropout mask, and lse is computed without dropout.
    """

    def forward(
        self,
        q: Float[Tensor, "s b n d"],
        k: Float[Tensor, "t b g d"],
        v: Float[Tensor, "t b g dv"],
        mask: Any,
    ) -> tuple[Float[Tensor, "s b n dv"], Float[Tensor, "s b n"]]:
        """Returns out and lse, float32 or float64; lse is -inf for a row without allowed keys."""

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
        """Returns the contribution of this block to dq, and dk and dv."""


class PlainBlocks:
    """`BlockOperations` for a `BlockMask`, computed in float32 (float64 for float64 inputs).

    Args:
        scale: Factor of the scores. Defaults to `1/sqrt(d)`.
    """

    def __init__(self, scale: float | None = None) -> None:
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
        """Returns the output and the log-sum-exp of one block."""
        scores = self._scores(q, k, mask)
        lse = scores.logsumexp(-1)
        out = torch.einsum("bnst,tbnd->sbnd", _probabilities(scores, lse), _repeat_heads(v, q))
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
        """Returns the gradients of one block."""
        p = _probabilities(self._scores(q, k, mask), lse.permute(1, 2, 0))
        gradient = _upcast(dout)
        dp = torch.einsum("sbnd,tbnd->bnst", gradient, _repeat_heads(v, q))
        correction = (gradient * _upcast(out)).sum(-1).permute(1, 2, 0)[..., None]
        dscores = self._scale(q) * p * (dp - correction)
        dq = torch.einsum("bnst,tbnd->sbnd", dscores, _repeat_heads(k, q))
        dk = torch.einsum("bnst,sbnd->tbnd", dscores, _upcast(q))
        dv = torch.einsum("bnst,sbnd->tbnd", p, gradient)
        groups = (k.shape[2], -1)
        dk, dv = (torch.unflatten(x, 2, groups).sum(3) for x in (dk, dv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _scale(self, q: Tensor) -> float:
        return 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale

    def _scores(self, q: Tensor, k: Tensor, mask: BlockMask) -> Tensor:
        scores = torch.einsum("sbnd,tbnd->bnst", _upcast(q), _repeat_heads(k, q)) * self._scale(q)
        if mask.all_allowed:
            return scores
        return scores.masked_fill(~mask.allowed()[:, None], -math.inf)


def _upcast(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


def _repeat_heads(t: Tensor, q: Tensor) -> Tensor:
    """Repeats keys or values `[t, b, g, d]` for all heads of the queries."""
    return _upcast(t).repeat_interleave(q.shape[2] // t.shape[2], 2)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """Returns exp(scores - lse), with zeros instead of NaN in a row without allowed keys."""
    return torch.exp(scores - torch.where(torch.isneginf(lse), 0, lse)[..., None])
