"""Attention over blocks with the operations of torch: views of the pool, or a gathered copy."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from megatron_kernels.ops.attention import batch_invariant
from megatron_kernels.ops.attention.call import AttentionCall
from megatron_kernels.ops.attention.mask import Mask
from megatron_kernels.ops.attention.reference import reference as attention_reference
from megatron_kernels.ops.attention.scores import Scores
from megatron_kernels.ops.attention.sdpa import sdpa, sdpa_unsupported_reason
from megatron_kernels.ops.paged.pages import Pages

Attend = Callable[[AttentionCall], Tensor]
"""Attention over dense keys and values."""


def reference(
    q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None, scores: Scores
) -> Tensor:
    """Gathers the blocks of each sequence, and computes the definition of attention."""
    keys, values = pages.gather(k), pages.gather(v)
    return _over_all(attention_reference, q, keys, values, pages, window, scores)


def fused(
    q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None, scores: Scores
) -> Tensor:
    """Calls `F.scaled_dot_product_attention` on the pool in place, if blocks follow each other.

    Sequences of one length at equal distances in the pool are one call. Others are one call each on
    a CPU, where a call is cheap and needs no mask. On a GPU one call with a mask reads sequences at
    equal distances in place, and a copy of others.
    """
    runs = pages.known_runs(k.shape[1])
    if not runs:
        return _over_all(sdpa, q, *_dense(k, v, pages), pages, window, scores)
    one_length = len({length for _, length in runs}) == 1
    if one_length and (stride := _stride(k, runs)) is not None:
        keys, values = (_strided(x, *runs[0], len(runs), stride) for x in (k, v))
        return _of_one_length(sdpa, q, keys, values, window, scores)
    if q.device.type != "cpu":
        return _over_all(sdpa, q, *_dense(k, v, pages), pages, window, scores)
    rows = []
    for row, (first, length) in enumerate(runs):
        keys, values = (_strided(x, first, length) for x in (k, v))
        rows.append(_of_one_length(sdpa, q[:, row : row + 1], keys, values, window, scores))
    return torch.cat(rows, 1)


def fused_unsupported_reason(
    q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None, scores: Scores
) -> str | None:
    """Returns why `fused` does not support these arguments."""
    if not (q.dtype == k.dtype == v.dtype):
        return f"q is {q.dtype}, the pools are {k.dtype} and {v.dtype}; they must agree"
    return sdpa_unsupported_reason(AttentionCall(q, k, v, Mask(), scores))


def invariant(
    q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None, scores: Scores
) -> Tensor:
    """Computes batch-invariant attention, in place if sequences are at equal distances."""
    keys, values = _dense(k, v, pages)
    return _over_all(batch_invariant.invariant, q, keys, values, pages, window, scores)


def invariant_unsupported_reason(
    q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None, scores: Scores
) -> str | None:
    """Returns why batch-invariant attention does not support these arguments."""
    return batch_invariant.invariant_unsupported_reason(AttentionCall(q, k, v, Mask(), scores))


def _dense(k: Tensor, v: Tensor, pages: Pages) -> tuple[Tensor, Tensor]:
    """Returns keys and values `[t, b, g, d]`: views of the pool if possible, else copies."""
    runs = pages.known_runs(k.shape[1])
    if not runs or (stride := _stride(k, runs)) is None:
        return pages.gather(k), pages.gather(v)
    longest = max(length for _, length in runs)
    keys, values = (_strided(x, runs[0][0], longest, len(runs), stride) for x in (k, v))
    return keys, values


def _over_all(
    attend: Attend,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Pages,
    window: int | None,
    scores: Scores,
) -> Tensor:
    """Returns attention over all keys, of which a mask hides those after a sequence's last."""
    if not len(keys) or not q.numel():
        return q.new_zeros(*q.shape[:-1], values.shape[-1])
    mask = _mask(q, len(keys), pages.lengths, window)
    return attend(AttentionCall(q, keys, values, mask, scores))


def _mask(q: Tensor, keys: int, lengths: Tensor, window: int | None) -> Mask:
    """Returns the mask of new tokens at the end of sequences of these lengths."""
    positions = torch.arange(keys, dtype=torch.int32, device=q.device).expand(q.shape[1], -1)
    new = torch.arange(len(q), dtype=torch.int32, device=q.device) - len(q)
    own = lengths[:, None].to(torch.int32) + new
    return Mask(positions=positions, query_positions=own, window=window)


def _of_one_length(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, window: int | None, scores: Scores
) -> Tensor:
    """Returns attention of the last tokens of sequences `[t, b, g, d]` of one length."""
    first = len(k) - len(q)
    if not len(k) or not q.numel():
        return q.new_zeros(*q.shape[:-1], v.shape[-1])
    if first < 0:  # queries before the first key see nothing
        seen = _of_one_length(attend, q[-first:], k, v, window, scores)
        return torch.cat((seen.new_zeros(-first, *seen.shape[1:]), seen))
    if window is not None and first - window + 1 > 0:  # keys before all windows
        before = first - window + 1
        k, v, first = k[before:], v[before:], first - before
    return attend(AttentionCall(q, k, v, Mask(window=window), scores, first))


def _stride(pool: Tensor, runs: tuple[tuple[int, int], ...]) -> int | None:
    """Returns the distance in blocks of sequences, if a view of equal lengths is in the pool."""
    distances = {later[0] - first[0] for first, later in pairwise(runs)} or {0}
    stride, longest = distances.pop(), max(length for _, length in runs)
    end = (runs[0][0] + stride * (len(runs) - 1)) * pool.shape[1] + longest
    inside = stride >= 0 and end <= pool.shape[0] * pool.shape[1]
    return stride if inside and not distances else None


def _strided(pool: Tensor, first: int, length: int, sequences: int = 1, stride: int = 0) -> Tensor:
    """Returns sequences at equal distances in the pool as a view `[t, b, g, d]`."""
    entries = pool.flatten(0, 1)
    block = pool.shape[1] * entries.stride(0)
    shape = length, sequences, *entries.shape[1:]
    strides = entries.stride(0), stride * block, *entries.stride()[1:]
    return entries[first * pool.shape[1] :].as_strided(shape, strides)
