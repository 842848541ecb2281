"""Which blocks of attention a rank of a ring computes, in pure index arithmetic.

A rank has a few queries and sees the keys of every rank once. Both are cut into tiles. Pairs of
tiles in which nobody may attend to anybody are left out; what is left for a tile of queries is one
range of keys. Under a causal mask and the zig-zag split that is exactly half of the pairs, on every
rank and in every step of the ring but the first.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from megatron_parallel.context_parallel.mask import BlockMask, SequenceMask, gather_rows
from megatron_parallel.context_parallel.split import ContextSplit

SMALLEST_TILE: Final = 128
"""Tokens below which documents are not told apart: a call of the block function costs as well."""


@dataclass(frozen=True, eq=False)
class Block:
    """Some of a rank's queries against some of the keys of one rank.

    Attributes:
        rows: Which of the queries.
        columns: Which of the keys.
        mask: Handed to the block function: a `BlockMask`, or what `plan_ring` was told to make
            of it.
    """

    rows: slice
    columns: slice
    mask: Any


@dataclass(frozen=True, eq=False)
class RingPlan:
    """What one rank computes; made once for each micro-batch, for all layers.

    Attributes:
        split: Of the sequence over the ranks of the ring.
        blocks: For every rank, those with its keys.
    """

    split: ContextSplit
    blocks: tuple[tuple[Block, ...], ...]


def plan_ring(
    mask: SequenceMask,
    split: ContextSplit,
    index: int,
    lower: Callable[[BlockMask], Any] | None = None,
) -> RingPlan:
    """Plans the blocks of rank `index`.

    Args:
        mask: Of the whole sequence.
        split: Of the sequence over the ranks.
        index: This rank on the axis.
        lower: Turns each mask into what the block function takes, once for all layers.
    """
    tiles = _tiles(mask, split)
    size = split.local_length // tiles
    needed, whole = _classify(mask, split, index, tiles)
    blocks = []
    for source, (some, every) in enumerate(zip(needed, whole, strict=True)):
        found = []
        for first, last, begin, end in _ranges(some):
            rows, columns = slice(first * size, last * size), slice(begin * size, end * size)
            block = mask.block(
                split.indices[index][:, rows].contiguous(),
                split.indices[source][:, columns].contiguous(),
            )
            block = replace(block, all_allowed=all(all(r[begin:end]) for r in every[first:last]))
            found.append(Block(rows, columns, block if lower is None else lower(block)))
        blocks.append(tuple(found))
    return RingPlan(split, tuple(blocks))


def _tiles(mask: SequenceMask, split: ContextSplit) -> int:
    """Tiles of each rank's part: its two chunks, or finer where documents may be told apart."""
    tiles = 2
    while (
        (mask.document_ids is not None or mask.window is not None)
        and split.local_length % (2 * tiles) == 0
        and split.local_length // (2 * tiles) >= SMALLEST_TILE
    ):
        tiles *= 2
    return tiles


def _ranges(needed: list[list[bool]]) -> list[tuple[int, int, int, int]]:
    """Tiles of queries and the range of key tiles they need; neighbours with one range are one."""
    found: list[tuple[int, int, int, int]] = []
    for row, columns in enumerate(needed):
        if not any(columns):
            continue
        begin, end = columns.index(True), len(columns) - columns[::-1].index(True)
        if found and found[-1][1:] == (row, begin, end):
            found[-1] = (found[-1][0], row + 1, begin, end)
        else:
            found.append((row, row + 1, begin, end))
    return found


def _classify(
    mask: SequenceMask, split: ContextSplit, index: int, tiles: int
) -> tuple[list[list[list[bool]]], list[list[list[bool]]]]:
    """For every rank, own tile and tile of that rank: may anybody attend, may everybody?

    Judged by the extremes of each tile, so that the first errs towards yes and the second to no.
    """
    low, high = _extremes(mask.positions, split, tiles, split.indices)
    some, every = _by_place(mask, (low[index], high[index]), (low, high))
    if mask.document_ids is not None:
        ids = mask.document_ids
        shifted = torch.where(ids < 0, torch.iinfo(ids.dtype).max, ids)  # padding is no document
        first, _ = _extremes(shifted, split, tiles)
        lowest, last = _extremes(ids, split, tiles)
        query, key = _pair(first[index], first)
        query_last, key_last = _pair(last[index], last)
        some = some & (torch.maximum(query, key) <= torch.minimum(query_last, key_last))
        query_lowest, key_lowest = _pair(lowest[index], lowest)
        one = (query_lowest == query_last) & (key_lowest == key_last) & (query_last == key_last)
        every = every & one & (query_lowest >= 0)
    return some.any(1).tolist(), every.all(1).tolist()


def _by_place(
    mask: SequenceMask, query: tuple[Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Bool[Tensor, "... tiles tiles"], Bool[Tensor, "... tiles tiles"]]:
    """By the rules that compare positions, from their extremes in the tiles."""
    query_low, key_low = _pair(query[0], key[0])
    query_high, key_high = _pair(query[1], key[1])
    some = every = torch.ones_like(query_low == key_low)
    if mask.causal:
        some, every = key_low <= query_high, key_high <= query_low
        if mask.prefix is not None:
            first = mask.prefix
            first = first[:, None, None] if isinstance(first, Tensor) else first
            some = some | (key_low < first)
    if mask.window is not None:
        apart = torch.maximum(query_low - key_high, key_low - query_high)
        some = some & (apart < mask.window)
        widest = torch.maximum(query_high - key_low, key_high - query_low)
        every = every & (widest < mask.window)
    return some, every


def _extremes(
    values: Tensor | None, split: ContextSplit, tiles: int, indices: Tensor | None = None
) -> tuple[Int[Tensor, "... tiles"], Int[Tensor, "... tiles"]]:
    """Smallest and largest value of every tile; the indices themselves if there are no values."""
    if values is not None:
        indices = torch.stack([gather_rows(values, own) for own in split.indices])
    if indices is None:
        raise ValueError("neither values nor indices")
    tiled = torch.unflatten(indices, 2, (tiles, -1))
    return tiled.amin(-1), tiled.amax(-1)


def _pair(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """`[b, tiles]` of the queries and `[ranks, b, tiles]` of the keys, to be compared."""
    return query[None, :, :, None], key[:, :, None, :]
