"""Batch-invariant attention: tiles of queries and keys at fixed positions, one after another.

Keys are cut at multiples of `KEYS` from the first key on, queries into tiles of `ROWS`. So the
products of a query do not depend on how many queries or sequences are computed with it, nor on keys
after it, which add zeros: the result is the same for a whole prompt, for the prompt in chunks with
a cache, and for one token after another.
"""

import functools
import math
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from megatron_kernels.errors import KernelError
from megatron_kernels.ops.attention.call import AttentionCall
from megatron_kernels.ops.attention.reference import reference
from megatron_kernels.ops.attention.sdpa import sdpa, sdpa_unsupported_reason
from megatron_kernels.ops.batch_invariant import NAME, with_gradients_of
from megatron_kernels.ops.invariant_product import (
    ALIGNMENT,
    SIZES,
    Setting,
    aligned,
    cycled,
    order_sensitive,
    rows_agree,
)
from megatron_kernels.ops.precision import upcast

ROWS: Final = 64
"""Queries of a tile, at most."""

KEYS: Final = 128
"""Keys of a tile."""


def invariant(call: AttentionCall) -> Tensor:
    """Returns attention in tiles; the backward pass is that of a fused or the reference backend."""
    known = sdpa if sdpa_unsupported_reason(call) is None else reference
    return with_gradients_of(
        lambda *fields: known(AttentionCall(*fields)),
        lambda *fields: _forward(AttentionCall(*fields)),
        *call,
    )


def invariant_unsupported_reason(call: AttentionCall) -> str | None:
    """Returns that scores have a bias, slopes or sinks, or probabilities dropout."""
    return call.unsupported_option("softcap")


def _forward(call: AttentionCall) -> Tensor:
    q, k, v, mask, scores, query_offset, _ = call
    if not q.numel() or not k.numel():
        return q.new_zeros(*q.shape[:-1], v.shape[-1])
    dtype, width = q.dtype, v.shape[-1]
    allowed = call.allowed()
    by_index = mask.causal and mask.prefix is None and mask.positions is None
    end = query_offset + ROWS if by_index else len(k)
    operands = upcast(q) * call.scale(), upcast(k), upcast(v)
    batch, groups = k.shape[1:3]
    shape = groups, q.shape[2] // groups, q.shape[3], v.shape[3], Setting.of(operands[0])
    sizes = row_sizes(batch, *shape)
    if sizes:
        out = _queries(*operands, allowed, scores.softcap, end, sizes)
    else:
        sizes = row_sizes(1, *shape)
        rows = []
        for row in range(batch):
            own = slice(row, row + 1)
            q, k, v = (x[:, own] for x in operands)
            seen = allowed[own] if len(allowed) > 1 else allowed
            rows.append(_queries(q, k, v, seen, scores.softcap, end, sizes))
        out = torch.cat(rows, 1)
    return out[..., :width].to(dtype)


@functools.cache
def row_sizes(
    batch: int, groups: int, per_group: int, channels: int, value_channels: int, setting: Setting
) -> tuple[int, ...]:
    """Returns the numbers of rows of a group that have the same bits as a whole tile.

    The rows of a group are the queries of its heads. The bits are those of a tile of one sequence,
    in the products with keys and with values.

    Args:
        batch: Number of sequences that are computed at once.
        groups: Number of groups of a sequence.
        per_group: Heads of a group.
        channels: Channels of queries and keys.
        value_channels: Channels of values.
        setting: Dtype, device and others.

    Returns:
        Sizes in rising order. Empty if several sequences at once have other bits than one.

    Raises:
        KernelError: The rows of the tile of one sequence have different bits.
    """
    whole = ROWS * per_group
    sizes = [*(size for size in SIZES if size < whole), whole]
    for k, n, of_keys in ((channels, KEYS, True), (KEYS, value_channels, False)):
        contents, columns = order_sensitive(k, n, setting)
        tile = aligned(columns if of_keys else columns.t())[:, None]

        def product(
            x: Tensor, batch: int = batch, tile: Tensor = tile, of_keys: bool = of_keys
        ) -> Tensor:
            stored = tile.expand(-1, batch * groups, -1).contiguous()
            rows = aligned(x.expand(batch * groups, *x.shape))
            return torch.bmm(rows, stored.permute(1, 2, 0) if of_keys else stored.transpose(0, 1))

        expected = product(cycled(contents, whole), 1)[0, : len(contents)]
        sizes = [size for size in sizes if rows_agree(product, contents, expected, size)]
    if whole in sizes:
        return tuple(sizes)
    if batch == 1:
        raise KernelError(
            f"rows of {setting.dtype} products of attention have bits that depend on their index "
            f"on {setting.device}; use another backend than {NAME}"
        )
    return ()


def _queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    softcap: float,
    end: int,
    sizes: tuple[int, ...],
) -> Tensor:
    """Returns the result of all queries, with channels that `aligned` adds.

    Args:
        q: Queries `[s, b, n, d]`, times the scale.
        k: Keys `[t, b, g, d]`.
        v: Values `[t, b, g, dv]`.
        allowed: Which queries attend to which keys, `[b or 1, s, t]`.
        softcap: Bound of scores; 0 is none.
        end: Queries of the first tile attend to keys before this one, those of the next to `ROWS`
            more.
        sizes: Numbers of rows of a group.
    """
    last = min(end + len(q), len(k))
    keys, values = ([_tile(x, start) for start in range(0, last, KEYS)] for x in (k, v))
    out = []
    for start in range(0, len(q), ROWS):
        count = -(-min(end + start, len(k)) // KEYS)
        tiles = zip(keys[:count], values[:count], strict=True)
        rows = slice(start, start + ROWS)
        out.append(_rows(q[rows], k.shape[2], tiles, allowed[:, rows], softcap, sizes))
    return torch.cat(out) if len(out) > 1 else out[0]


def _rows(
    q: Tensor,
    groups: int,
    tiles: Iterable[tuple[Tensor, Tensor]],
    allowed: Tensor,
    softcap: float,
    sizes: tuple[int, ...],
) -> Tensor:
    """Returns the result of one tile of queries, over tiles of keys and values."""
    count, batch, heads, _ = q.shape
    per_group = heads // groups
    needed = count * per_group
    size = min(size for size in sizes if size >= needed)
    # [b g, rows of a group's heads, d]
    rows = q.view(count, batch, groups, per_group, -1).permute(1, 2, 0, 3, 4)
    rows = aligned(rows.reshape(batch * groups, needed, -1))
    rows = functional.pad(rows, (0, 0, 0, size - needed))
    hidden = ~allowed.repeat_interleave(per_group, 1)[:, None]
    hidden = functional.pad(hidden, (0, -hidden.shape[-1] % KEYS, 0, size - needed), value=True)
    largest = rows.new_full((*rows.shape[:2], 1), -math.inf)
    total = torch.zeros_like(largest)
    out = rows.new_zeros(*rows.shape[:2], 1)  # gets all channels from the first tile
    for start, (keys, values) in zip(range(0, hidden.shape[-1], KEYS), tiles, strict=False):
        products = torch.bmm(rows, keys.permute(1, 2, 0))
        if softcap:
            products = softcap * torch.tanh(products / softcap)
        by_sequence = products.view(batch, groups, size, KEYS)
        by_sequence.masked_fill_(hidden[..., start : start + KEYS], -math.inf)
        peak = torch.maximum(largest, products.amax(-1, keepdim=True))
        finite = peak.masked_fill(peak == -math.inf, 0.0)
        probabilities = products.sub_(finite).exp_()
        factor = (largest - finite).exp_()
        total = total * factor + probabilities.sum(-1, keepdim=True)
        weighted = torch.bmm(probabilities, values.transpose(0, 1))
        out = weighted.add_(out.mul_(factor))
        largest = peak
    out = (out / total).masked_fill_(total == 0, 0.0)
    heads_of = out[:, :needed].view(batch, groups, count, per_group, -1)
    return heads_of.permute(2, 0, 1, 3, 4).flatten(2, 3)


def _tile(x: Tensor, start: int) -> Tensor:
    """Returns keys or values `[KEYS, b g, d]` from an index on, padded with zeros."""
    part = aligned(x[start : start + KEYS].flatten(1, 2))
    if part.data_ptr() % ALIGNMENT:
        part = part.clone()
    if (count := len(part)) < KEYS:
        padded = part.new_empty(KEYS, *part.shape[1:])
        padded[:count] = part
        padded[count:] = 0.0
        return padded
    return part
