"""Attention with dropout on a CPU, in tiles of scores that stay in the cache.

torch's fused kernel for CPUs has no dropout, and the reference writes and reads all scores about
twenty times. Here a tile is some heads of some queries over the keys up to the last of them: its
scores, their softmax, its dropout and both products are finished before the next tile. As in flash
attention, only the output and the log-sum-exp of each row are saved, and the backward pass computes
probabilities and dropout again (Dao, FlashAttention-2, section 3.1):

    p = exp(scores - lse)       out = (m p) v       dp = m (dout v^T)       ds = p (dp - dout . out)

with the mask m of dropout, 0 or 1 / (1 - rate). Sums are float32 (float64 for float64).
"""

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megatron_kernels.ops.attention.dropout import DropoutLike, TiledDropout
from megatron_kernels.ops.attention.mask import Mask
from megatron_kernels.ops.attention.scores import Scores
from megatron_kernels.ops.precision import upcast

_ROWS: Final = 64
_ELEMENTS: Final = 2**17  # of a tile: its scores and the words of its dropout fit into the cache


class Tile(NamedTuple):
    """Some heads of some queries of a sample."""

    sample: int
    heads: slice
    rows: slice
    keys: int  # it attends to keys before this one


def tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scores: Scores,
    query_offset: int,
    dropout: DropoutLike | None = None,
) -> Tensor:
    """Returns attention with dropout, differentiable by autograd."""
    return tiled_forward(q, k, v, mask, scores, query_offset, dropout)[0]


def tiled_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scores: Scores,
    query_offset: int,
    dropout: DropoutLike | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns out `[s, b, n, dv]`, differentiable by autograd, and lse `[s, b, n]` of one block."""
    out, lse = _Tiled.apply(  # type: ignore[no-untyped-call]
        q, k, v, mask, scores, query_offset, dropout
    )
    return out, lse


def tiled_unsupported_reason(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scores: Scores,
    query_offset: int,
    dropout: DropoutLike | None = None,
) -> str | None:
    """Returns why `tiled` does not support these arguments."""
    if dropout is None:
        return "without dropout fused attention is faster"
    if q.device.type != "cpu":
        return f"needs a CPU tensor, q is on {q.device.type}"
    if torch.compiler.is_compiling():
        return "a compiler would unroll its tiles"
    if not isinstance(dropout, TiledDropout):
        return "the dropout is a function of all probabilities"
    if scores.softcap:
        return "it does not support softcap"
    for name in ("slopes", "bias", "sinks"):
        if getattr(scores, name) is not None:
            return f"it does not support {name}"
    return None


def backward_tiled_unsupported_reason(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Mask,
    scores: Scores,
    query_offset: int,
    dropout: DropoutLike | None = None,
) -> str | None:
    """Returns why `tiled_backward` does not support these arguments."""
    return tiled_unsupported_reason(q, k, v, mask, scores, query_offset, dropout)


class _Tiled(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        scores: Scores,
        query_offset: int,
        dropout: TiledDropout,
    ) -> tuple[Tensor, Tensor]:
        out, lse = _pass(q, k, v, mask, scores, query_offset, dropout)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.rest = mask, scores, query_offset, dropout
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        found = tiled_backward(grads[0], q, k, v, out, lse, *ctx.rest)
        return *found, None, None, None, None


def _pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scores: Scores,
    query_offset: int,
    dropout: TiledDropout,
) -> tuple[Tensor, Tensor]:
    run = _Run(q, k, v, mask, scores, query_offset, dropout)
    result = q.new_empty(*q.shape[:3], v.shape[-1])
    out = result.permute(1, 2, 0, 3)
    lse = upcast(q.new_empty(0)).new_empty(q.shape[1], q.shape[2], q.shape[0], 1)
    for tile in run.tiles():
        queries, keys, values = run.operands(tile)
        p = run.scores_of(tile, queries, keys)
        total = torch.logsumexp(p, -1, keepdim=True)
        run.probabilities_(p, total)
        run.drop_(p, run.kept(tile))
        part = (tile.sample, tile.heads, tile.rows)
        lse[part] = total
        out[part] = torch.bmm(p, values).mul_(run.factor)
    return result, lse.squeeze(-1).permute(2, 0, 1)


@torch.no_grad()
def tiled_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Mask,
    scores: Scores,
    query_offset: int,
    dropout: TiledDropout,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of one block from the final out and lse."""
    run = _Run(q, k, v, mask, scores, query_offset, dropout)
    gradient, final = (x.permute(1, 2, 0, 3) for x in (dout, out))
    totals = lse.permute(1, 2, 0).unsqueeze(-1)
    found = torch.empty_like(q, memory_format=torch.contiguous_format)
    sums = tuple(torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
    dq, dk, dv = (x.permute(1, 2, 0, 3) for x in (found, *sums))
    for tile in run.tiles():
        part = (tile.sample, tile.heads, tile.rows)
        queries, keys, values = run.operands(tile)
        p = run.scores_of(tile, queries, keys)
        run.probabilities_(p, totals[part])
        kept = run.kept(tile)
        arriving = upcast(gradient[part])
        share = (arriving * upcast(final[part])).sum(-1, keepdim=True)
        arriving = arriving * run.factor
        dp = torch.bmm(arriving, values.mT)
        run.drop_(dp, kept)
        dp.sub_(share).mul_(p)
        run.drop_(p, kept)
        dq[part] = torch.bmm(dp, keys).mul_(run.scale)
        groups = run.groups(tile)
        under = (tile.sample, groups, slice(0, tile.keys))
        dk[under] += run.over_groups(torch.bmm(dp.mT, queries), groups)  # queries are scaled
        dv[under] += run.over_groups(torch.bmm(p.mT, arriving), groups)
    return found, sums[0].to(k.dtype), sums[1].to(v.dtype)


class _Run:
    """What all tiles of a pass share."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        scores: Scores,
        query_offset: int,
        dropout: TiledDropout,
    ) -> None:
        self.q, self.k, self.v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        self.scale = 1 / math.sqrt(q.shape[-1]) if scores.scale is None else scores.scale
        self.dropout = dropout
        self.factor = 1 / (1 - dropout.probability)
        self.per_group = q.shape[2] // k.shape[2]
        allowed, self.is_causal = mask.lower(q.shape[0], k.shape[0], query_offset, device=q.device)
        self.forbidden = None if allowed is None else ~allowed

    def tiles(self) -> Iterator[Tile]:
        """Yields tiles whose heads are of whole groups, or of one group."""
        samples, heads, queries, _ = self.q.shape
        rows = max(1, min(_ROWS, queries))
        for start in range(0, queries, rows):
            end = min(start + rows, queries)
            keys = end if self.is_causal else self.k.shape[2]
            number = max(1, _ELEMENTS // max(1, rows * keys))
            if number >= self.per_group:
                number -= number % self.per_group
            else:
                number = max(n for n in range(1, number + 1) if self.per_group % n == 0)
            for sample in range(samples):
                for first in range(0, heads, number):
                    among = slice(first, min(first + number, heads))
                    yield Tile(sample, among, slice(start, end), keys)

    def groups(self, tile: Tile) -> slice:
        return slice(tile.heads.start // self.per_group, -(-tile.heads.stop // self.per_group))

    def operands(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the scaled queries, and the keys and values of each head."""
        queries = upcast(self.q[tile.sample, tile.heads, tile.rows]) * self.scale
        keys, values = (
            upcast(x[tile.sample, self.groups(tile), : tile.keys]) for x in (self.k, self.v)
        )
        copies = len(queries) // len(keys)
        if copies > 1:
            keys, values = (x.repeat_interleave(copies, 0) for x in (keys, values))
        return queries, keys, values

    def over_groups(self, x: Tensor, groups: slice) -> Tensor:
        """Returns the sum over the heads of each group."""
        number = groups.stop - groups.start
        return x if len(x) == number else torch.unflatten(x, 0, (number, -1)).sum(1)

    def scores_of(self, tile: Tile, queries: Tensor, keys: Tensor) -> Tensor:
        """Returns the scores `[heads, rows, keys]`, -inf where attending is forbidden."""
        found = torch.bmm(queries, keys.mT)
        if self.is_causal:
            start = tile.rows.start  # keys before it are allowed for all rows
            size = tile.keys - start
            above = torch.ones(size, size, dtype=torch.bool).triu_(1)
            found[..., start:].masked_fill_(above, -math.inf)
        elif self.forbidden is not None:
            sample = tile.sample if len(self.forbidden) > 1 else 0
            found.masked_fill_(self.forbidden[sample, tile.rows], -math.inf)
        return found

    def probabilities_(self, scores: Tensor, total: Tensor) -> None:
        """Computes exp(scores - total) in place; zeros for a row that may attend to nothing."""
        if self.forbidden is not None:
            total = total.masked_fill(torch.isneginf(total), 0)
        scores.sub_(total).exp_()

    def kept(self, tile: Tile) -> Tensor:
        """Returns words of ones for elements that are kept, in the size of the scores."""
        keys = slice(0, tile.keys)
        words = self.dropout.kept(tile.sample, tile.heads, tile.rows, keys, self.k.shape[2])
        return words.to(torch.int64) if self.q.dtype == torch.float64 else words

    @staticmethod
    def drop_(x: Tensor, kept: Tensor) -> None:
        """Zeros elements in place; a boolean mask would take ten times as long."""
        x.view(kept.dtype).bitwise_and_(kept)
