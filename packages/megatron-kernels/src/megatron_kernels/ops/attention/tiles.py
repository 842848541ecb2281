"""Attention with dropout on a CPU, in tiles of scores that stay in the cache.

torch's fused kernel for CPUs has no dropout, and the reference writes and reads all scores about
twenty times. Here a tile is some queries of some samples and heads over the keys up to the last of
these queries: its scores, their softmax, its dropout and both products are finished before the next
tile. As in flash attention, no probability is saved, and the backward pass computes them again
(Dao, FlashAttention-2, section 3.1):

    p = softmax(scores)     out = (m p) v       dp = m (dout v^T)       ds = p (dp - dout . out)

with the mask m of dropout, 0 or 1 / (1 - rate). A tile has all keys that its queries attend to, so
the softmax needs no log-sum-exp, except in a block of a ring. Masks of short sequences are saved as
bits (`mask_bits.py`), others are computed again.

Scores, dp and sums are float32 (float64 for float64). With bfloat16 the other four products have
bfloat16 operands, as in torch's kernel, and take less than half the time; products of float16 are
slow on most CPUs.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megatron_kernels.ops.attention.call import AttentionCall
from megatron_kernels.ops.attention.dropout import TiledDropout
from megatron_kernels.ops.attention.mask_bits import ROWS, SHORT, MaskBits
from megatron_kernels.ops.precision import upcast

_ROWS: Final = 64
_ELEMENTS: Final = 2**19  # of a tile; few large operations cost less than a smaller cache saves


class Tile(NamedTuple):
    """Some queries of some samples and heads."""

    rows: slice
    keys: int  # they attend to keys before this one


def tiled(call: AttentionCall) -> Tensor:
    """Returns attention with dropout, differentiable by autograd."""
    saves_mask = torch.is_grad_enabled() and max(len(call.q), len(call.k)) <= SHORT
    return _tiled(False, saves_mask, *call)[0]


def tiled_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Returns out `[s, b, n, dv]`, differentiable by autograd, and lse `[s, b, n]` of one block."""
    return _tiled(True, False, *call)


def _tiled(*arguments: Any) -> tuple[Tensor, Tensor]:
    out, lse = _Tiled.apply(*arguments)  # type: ignore[no-untyped-call]
    return out, lse


def tiled_unsupported_reason(call: AttentionCall, *_: Tensor) -> str | None:
    """Returns why tiles do not support a call, in both passes."""
    if call.dropout is None:
        return "without dropout fused attention is faster"
    if call.q.device.type != "cpu":
        return f"needs a CPU tensor, q is on {call.q.device.type}"
    if torch.compiler.is_compiling():
        return "a compiler would unroll its tiles"
    if not isinstance(call.dropout, TiledDropout):
        return "the dropout is a function of all probabilities"
    return call.unsupported_option("dropout")


class _Tiled(Function):
    @staticmethod
    def forward(
        ctx: Any, returns_lse: bool, saves_mask: bool, q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        call = _Tiling(AttentionCall(q, k, v, *rest))
        if saves_mask:
            call.bits = MaskBits.empty(q.shape[1], q.shape[2], q.shape[0], k.shape[0])
        out, lse = _pass(call, returns_lse)
        ctx.save_for_backward(q, k, v, out, call.bits.words if call.bits is not None else None)
        ctx.mark_non_differentiable(lse)
        ctx.rest = rest
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, words = ctx.saved_tensors
        call = _Tiling(AttentionCall(q, k, v, *ctx.rest))
        if words is not None:
            call.bits = MaskBits(words)
        with torch.no_grad():
            found = _gradients(call, grads[0], out, None)
        return None, None, *found, *(None,) * len(ctx.rest)


@torch.no_grad()
def tiled_backward(
    call: AttentionCall, dout: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of one block from the final out and lse."""
    return _gradients(_Tiling(call), dout, out, lse)


def _pass(call: "_Tiling", returns_lse: bool) -> tuple[Tensor, Tensor]:
    """Returns the output and, if it is asked for, the log-sum-exp of each row."""
    s, b, n, _ = call.q.shape
    out = call.q.new_zeros(s, b, n, call.v.shape[-1])
    lse = torch.full((s if returns_lse else 0, b, n, 1), -math.inf, dtype=call.wide)
    for part in call.parts():
        values = call.narrowed(part.heads(call.v).squeeze(1))
        results, totals = part.of(out), part.of(lse)
        for tile in call.tiles():
            scores = part.scores(tile)
            p = part.softmax(scores, tile)
            if returns_lse:
                _write(_log_sum_exp(scores, p), totals, tile)
            kept = part.kept(tile)
            call.drop_(p, kept)
            if call.bits is not None:
                call.bits.write(kept, *part.at, tile.rows)
            products = torch.bmm(call.narrowed(p), values[:, : tile.keys])
            _write(products.mul_(call.factor), results, tile)
    return out, lse.squeeze(-1)


def _gradients(
    call: "_Tiling", dout: Tensor, out: Tensor, lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients; with the final lse, those of a block."""
    dq, dk, dv = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (call.q, call.k, call.v)
    )
    # The factor of dropout is that of all gradients, so that no tile is multiplied by it.
    by_row = (upcast(dout) * upcast(out)).sum(-1, keepdim=True).div_(call.factor)
    for part in call.parts():
        values, arriving = part.heads(call.v).squeeze(1), part.heads(dout)
        queries, keys, gradients = map(call.narrowed, (part.queries, part.keys, arriving))
        shares, results = part.heads(by_row), part.of(dq)
        totals = None if lse is None else part.heads(lse.unsqueeze(-1))
        sums: tuple[Tensor, Tensor] | None = None
        for tile in call.tiles():
            scores = part.scores(tile)
            if totals is None:
                p = part.softmax(scores, tile)
            else:
                p = _exp_of_difference_(scores, _rows(totals, tile))
            if call.bits is None:
                kept = part.kept(tile)
            else:
                kept = call.bits.read(*part.at, tile.rows, tile.keys)
            ds = torch.bmm(_rows(arriving, tile), values[:, : tile.keys].mT)
            call.drop_(ds, kept)
            ds.sub_(_rows(shares, tile)).mul_(p)
            call.drop_(p, kept)
            ds, p = call.narrowed(ds), call.narrowed(p)
            products = torch.bmm(ds, keys[:, : tile.keys])
            _write(products.mul_(call.factor * call.scale), results, tile)
            found = torch.bmm(ds.mT, _rows(queries, tile)), torch.bmm(p.mT, _rows(gradients, tile))
            if sums is None:  # the first tile has all keys
                sums = upcast(found[0]), upcast(found[1])
            else:
                for total, summand in zip(sums, found, strict=True):
                    total[:, : tile.keys].add_(summand)
        if sums is not None:
            sums[0].mul_(call.factor * call.scale)
            sums[1].mul_(call.factor)
            for total, x in zip(sums, (dk, dv), strict=True):
                gradient = part.of(x)
                gradient.copy_(total.view(gradient.shape))
    return dq, dk, dv


class _Tiling:
    """What all tiles of a call share."""

    def __init__(self, call: AttentionCall) -> None:
        q, k = self.q, self.k = call.q, call.k
        self.v = call.v
        self.wide = upcast(q.new_empty(0)).dtype
        self.narrow = q.dtype if q.dtype == torch.bfloat16 else self.wide
        self.scale = call.scale()
        self.dropout: TiledDropout = call.dropout  # type: ignore[assignment]  # what is supported
        self.factor = 1 / (1 - self.dropout.probability)
        self.heads = q.shape[2] // max(1, k.shape[2])  # of a group
        allowed, self.is_causal = call.lower_mask()
        self.forbidden = None if allowed is None else ~allowed
        rows = min(_ROWS, _ELEMENTS // max(1, self.heads * k.shape[0]))
        if max(len(q), len(k)) <= SHORT:
            rows = max(1, rows // ROWS) * ROWS  # tiles begin with a word of the saved mask
        self.rows = max(1, min(rows, len(q)))
        self.bits: MaskBits | None = None  # what the forward pass saves
        future = torch.ones(self.rows, self.rows, dtype=torch.bool).triu_(1)
        self.triangle = torch.zeros(future.shape, dtype=self.wide).masked_fill_(future, -math.inf)

    def narrowed(self, x: Tensor) -> Tensor:
        """Returns an operand of the products after the softmax."""
        return x.to(self.narrow)

    def drop_(self, x: Tensor, kept: Tensor) -> None:
        """Zeros elements in place, as a product of integers: a boolean mask takes longer."""
        words = kept.to(torch.int64) if self.wide == torch.float64 else kept
        x.view(words.dtype).mul_(words.reshape(x.shape))

    def parts(self) -> Iterator["_Part"]:
        """Yields whole samples, or groups of one sample; nothing if the call has no scores."""
        (length, samples, _, _), (keys, _, groups, _) = self.q.shape, self.k.shape
        if 0 in (length, samples, keys, groups):
            return
        number = max(1, _ELEMENTS // (self.rows * self.heads * keys))
        for some in _slices(samples, max(1, number // groups)):
            for among in _slices(groups, number):
                yield _Part(self, some, among)

    def tiles(self) -> Iterator[Tile]:
        """Yields the tiles of a part, the last queries first."""
        length, keys = self.q.shape[0], self.k.shape[0]
        for start in reversed(range(0, length, self.rows)):
            end = min(start + self.rows, length)
            yield Tile(slice(start, end), end if self.is_causal else keys)


class _Part:
    """Some samples and groups of heads of a call."""

    def __init__(self, call: _Tiling, samples: slice, groups: slice) -> None:
        self.call, self.samples, self.groups = call, samples, groups
        self.queries = self.heads(call.q)
        self.keys = self.heads(call.k).squeeze(1)
        self.scaled_keys = self.keys * call.scale
        self.forbidden = call.forbidden
        if self.forbidden is not None and len(self.forbidden) > 1:
            self.forbidden = self.forbidden[samples]
        heads = slice(groups.start * call.heads, groups.stop * call.heads)
        self.at = samples, heads
        self._words: Callable[[slice, slice], Tensor] | None = None

    def of(self, x: Tensor) -> Tensor:
        """Returns a view `[b, g, n/g, s, d]` of this part of `[s, b, n, d]`."""
        by_group = torch.unflatten(x, 2, (self.call.k.shape[2], -1)).permute(1, 2, 3, 0, 4)
        return by_group[self.samples, self.groups]

    def heads(self, x: Tensor) -> Tensor:
        """Returns this part of a tensor as `[b * g, n/g, s, d]`, in the precision of sums."""
        return upcast(self.of(x)).contiguous().flatten(0, 1)

    def scores(self, tile: Tile) -> Tensor:
        """Returns `[b * g, n/g * rows, keys]`, -inf where attending is forbidden."""
        found = torch.bmm(_rows(self.queries, tile), self.scaled_keys[:, : tile.keys].mT)
        if self.call.is_causal:  # keys before these queries are allowed for all of them
            start, size = tile.rows.start, tile.rows.stop - tile.rows.start
            diagonal = torch.unflatten(found, 1, (-1, size))[..., start:]
            diagonal.add_(self.call.triangle[:size, :size])
        elif self.forbidden is not None:
            forbidden = self.forbidden[:, tile.rows]
            summand = torch.zeros(forbidden.shape, dtype=found.dtype)
            summand.masked_fill_(forbidden, -math.inf)
            self._by_sample(found, tile).add_(summand.unsqueeze(1))
        return found

    def softmax(self, scores: Tensor, tile: Tile) -> Tensor:
        """Returns the probabilities; zeros for a row that may attend to nothing."""
        p = torch.softmax(scores, -1)
        if self.forbidden is not None:
            empty = self.forbidden[:, tile.rows].all(-1, keepdim=True)
            if empty.any():
                self._by_sample(p, tile).masked_fill_(empty.unsqueeze(1), 0)
        return p

    def kept(self, tile: Tile) -> Tensor:
        """Returns 1 for elements `[b, n, rows, keys]` that are kept and 0 for others."""
        if self._words is None:
            self._words = self.call.dropout.kept(*self.at, self.call.k.shape[0])
        return self._words(tile.rows, slice(0, tile.keys))

    def _by_sample(self, x: Tensor, tile: Tile) -> Tensor:
        """Returns a view `[b, n, rows, t]` of scores."""
        samples, rows = self.samples.stop - self.samples.start, tile.rows.stop - tile.rows.start
        return x.view(samples, -1, rows, tile.keys)


def _slices(length: int, most: int) -> Iterator[slice]:
    """Yields slices of at most this length, as equal as possible."""
    size = -(-length // -(-length // most))
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _rows(x: Tensor, tile: Tile) -> Tensor:
    """Returns `[b * g, n/g * rows, d]`, the rows of a tile of `[b * g, n/g, s, d]`."""
    return x[:, :, tile.rows].flatten(1, 2)


def _write(products: Tensor, into: Tensor, tile: Tile) -> None:
    """Copies `[b * g, n/g * rows, d]` into rows of `[b, g, n/g, s, d]`."""
    rows = into[..., tile.rows, :]
    rows.copy_(products.view(rows.shape))


def _exp_of_difference_(scores: Tensor, total: Tensor) -> Tensor:
    """Returns exp(scores - total) in the memory of the scores; zeros for a row without keys."""
    return scores.sub_(total.masked_fill(torch.isneginf(total), 0)).exp_()


def _log_sum_exp(scores: Tensor, p: Tensor) -> Tensor:
    """Returns `[..., 1]`; the largest of the probabilities p is 1 / sum(exp(scores - largest))."""
    largest = scores.amax(-1, keepdim=True)
    found = largest - p.amax(-1, keepdim=True).log_()
    return torch.where(torch.isneginf(largest), largest, found)
