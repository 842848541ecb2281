"""Batch-invariant attention: tiles of queries and keys at fixed positions, one after another.

Keys are cut at multiples of `KEYS` from the first key on, queries into tiles of `ROWS`. So the
products of a query do not depend on how many queries or sequences are computed with it, nor on keys
after it, which add zeros: the result is the same for a whole prompt, for the prompt in chunks with
a cache, and for one token after another.
"""

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from megatron_kernels.ops.attention.mask import Mask
from megatron_kernels.ops.attention.reference import reference
from megatron_kernels.ops.attention.scores import Scores
from megatron_kernels.ops.attention.sdpa import sdpa, sdpa_unsupported_reason
from megatron_kernels.ops.batch_invariant import aligned, with_gradients_of
from megatron_kernels.ops.precision import upcast

ROWS: Final = 64
"""Queries of a tile."""

KEYS: Final = 128
"""Keys of a tile."""


def invariant(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scores: Scores,
    query_offset: int,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Returns attention in tiles; the backward pass is that of a fused or the reference backend."""
    inputs = q, k, v, mask, scores, query_offset, dropout
    known = sdpa if sdpa_unsupported_reason(*inputs) is None else reference
    return with_gradients_of(known, _forward, *inputs)


def invariant_unsupported_reason(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scores: Scores,
    query_offset: int,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> str | None:
    """Returns that scores have a bias, slopes or sinks, or probabilities dropout."""
    if dropout is not None:
        return "it does not support dropout"
    for name in ("bias", "slopes", "sinks"):
        if getattr(scores, name) is not None:
            return f"it does not support {name}"
    return None


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scores: Scores,
    query_offset: int,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    del dropout
    allowed = mask.allowed(len(q), len(k), query_offset, device=q.device)
    out = [
        _rows(
            q[start : start + ROWS],
            k,
            v,
            allowed[:, start : start + ROWS],
            scores,
            query_offset + start + ROWS if mask.causal and mask.prefix is None else len(k),
        )
        for start in range(0, len(q), ROWS)
    ]
    return torch.cat(out).to(q.dtype) if out else q.new_empty(*q.shape[:-1], v.shape[-1])


def _rows(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scores: Scores, end: int) -> Tensor:
    """Returns the result of one tile of queries, over keys before `end`."""
    count, (_, batch, groups, _) = len(q), k.shape
    per_group = q.shape[2] // groups
    scale = 1 / math.sqrt(q.shape[-1]) if scores.scale is None else scores.scale
    rows = functional.pad(upcast(q) * scale, (0,) * 6 + (0, ROWS - count))
    # [b g, rows of a group's heads, d]
    rows = (
        rows.view(ROWS, batch, groups, per_group, -1)
        .permute(1, 2, 0, 3, 4)
        .reshape(batch * groups, ROWS * per_group, -1)
    )
    rows = aligned(rows)
    largest = rows.new_full((*rows.shape[:2], 1), -math.inf)
    total = torch.zeros_like(largest)
    out = rows.new_zeros(*rows.shape[:2], v.shape[-1])
    for start in range(0, min(end, len(k)), KEYS):
        keys, values = (_tile(x, start) for x in (k, v))
        products = torch.bmm(rows, aligned(keys).mT)
        if scores.softcap:
            products = scores.softcap * torch.tanh(products / scores.softcap)
        seen = allowed[..., start : start + KEYS]
        seen = functional.pad(seen, (0, KEYS - seen.shape[-1], 0, ROWS - count))
        products = products.view(batch, groups, ROWS, per_group, KEYS)
        products = products.masked_fill_(~seen[:, None, :, None], -math.inf).view(
            batch * groups, -1, KEYS
        )
        peak = torch.maximum(largest, products.amax(-1, keepdim=True))
        finite = peak.masked_fill(peak == -math.inf, 0.0)
        probabilities = products.sub_(finite).exp_()
        factor = (largest - finite).exp_()
        total = total * factor + probabilities.sum(-1, keepdim=True)
        out = out * factor + torch.bmm(probabilities, values)
        largest = peak
    out = (out / total).masked_fill_(total == 0, 0.0)
    heads = out.view(batch, groups, ROWS, per_group, -1).permute(2, 0, 1, 3, 4)
    return heads.flatten(2, 3)[:count]


def _tile(x: Tensor, start: int) -> Tensor:
    """Returns keys or values `[b g, KEYS, d]` from an index on, padded with zeros."""
    part = upcast(x[start : start + KEYS]).permute(1, 2, 0, 3).flatten(0, 1)
    return functional.pad(part, (0, 0, 0, KEYS - part.shape[1])).contiguous()
