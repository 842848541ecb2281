"""Plans which blocks of attention each rank of a ring computes, from indices and masks only.

A rank has its own queries and receives the keys of each rank once. Both are cut into tiles. Pairs
of tiles in which no query may attend to any key are skipped, and the remaining tiles of keys of a
tile of queries form one range. Under a causal mask and the zig-zag split, exactly half of the pairs
remain, on every rank and in every step of the ring except the first. There a causal mask without
other rules is one triangle, because the indices of a rank ascend: fused kernels need no mask tensor
for it.

The host needs the pairs to know which blocks to compute. If split and mask do not depend on the
data, it computes them once for each shape. If they depend on documents that the split has on the
host, it computes them for each micro-batch. Otherwise it waits for the device, once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from megatron_parallel._compat import constant_to_compiler
from megatron_parallel.context_parallel.mask import BlockMask, SequenceMask, gather_rows
from megatron_parallel.context_parallel.split import ContextSplit
from megatron_parallel.imagined.reading import read_integers

SMALLEST_TILE: Final = 128
"""Smallest tile in tokens; smaller ones would cost more calls of the block function."""


@dataclass(frozen=True, eq=False)
class Block:
    """A block of attention: some queries of a rank and some keys of one rank.

    Attributes:
        rows: The queries.
        columns: The keys.
        mask: Argument of the block function: a `BlockMask`, or the result of `lower` in
            `plan_ring`.
    """

    rows: slice
    columns: slice
    mask: Any


@dataclass(frozen=True, eq=False)
class RingPlan:
    """The blocks that one rank computes. Built once per micro-batch, for all layers.

    Attributes:
        split: Split of the sequence over the ranks of the ring.
        blocks: Blocks by the rank that holds the keys.
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
        mask: Mask of the whole sequence.
        split: Split of the sequence over the ranks.
        index: Index of this rank on the axis.
        lower: Converts each mask to the form that the block function takes. Defaults to no
            conversion.
    """
    tiles = _tiles(mask, split)
    size = split.local_length // tiles
    needed, full = _pairs_of_tiles(mask, split, index, tiles)
    blocks: list[tuple[Block, ...]] = []
    for source, (some, every) in enumerate(zip(needed, full, strict=True)):
        if source == index and _only_causal(mask):
            own = split.indices[index]
            block = replace(mask.block(own, own), triangular=True)
            every_token = slice(0, split.local_length)
            triangle = Block(every_token, every_token, block if lower is None else lower(block))
            blocks.append((triangle,))
            continue
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


def _only_causal(mask: SequenceMask) -> bool:
    """Returns whether a query may attend to keys at indices up to its own, and to no others."""
    others = mask.document_ids, mask.positions, mask.window, mask.prefix, mask.chunk
    return mask.causal and all(rule is None for rule in others)


def _tiles(mask: SequenceMask, split: ContextSplit) -> int:
    """Returns the number of tiles per rank: two slices, or more if other rules than causal help."""
    tiles = 2
    while (
        (mask.document_ids is not None or mask.window is not None or mask.chunk is not None)
        and split.local_length % (2 * tiles) == 0
        and split.local_length // (2 * tiles) >= SMALLEST_TILE
    ):
        tiles *= 2
    return tiles


def _ranges(needed: list[list[bool]]) -> list[tuple[int, int, int, int]]:
    """Returns ranges of query tiles with the range of key tiles they need, merging neighbours."""
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


Pairs = list[list[list[bool]]]  # by rank, own tile and tile of that rank


def _pairs_of_tiles(
    mask: SequenceMask, split: ContextSplit, index: int, tiles: int
) -> tuple[Pairs, Pairs]:
    """Returns which pairs of tiles have an allowed pair of tokens, and which have only such pairs.

    The results are based on the extremes of each tile: the first may have additional pairs, and the
    second may lack some.
    """
    prefix = None if isinstance(mask.prefix, Tensor) else mask.prefix
    given = mask.positions is not None or isinstance(mask.prefix, Tensor)
    if split.host is not None and not given:
        ids = None if mask.document_ids is None else split.host.document_ids
        host = ContextSplit(split.host.indices)
        found = torch.stack(_classify(replace(mask, document_ids=ids), host, index, tiles))
        some, every = found.tolist()
        return some, every
    if split.ranges is None or given or mask.document_ids is not None:
        pairs = split.ranks * tiles**2
        found = torch.stack(_classify(mask, split, index, tiles)).int()
        values = read_integers(found, lambda: [1] * pairs + [0] * pairs)
        return _nested(values[:pairs], tiles), _nested(values[pairs:], tiles)
    return _pairs_by_index(split.ranges, index, tiles, mask.causal, mask.window, prefix, mask.chunk)


def _nested(values: list[int], tiles: int) -> Pairs:
    """Returns values by rank, own tile and tile of that rank."""
    rows = [list(map(bool, values[i : i + tiles])) for i in range(0, len(values), tiles)]
    return [rows[i : i + tiles] for i in range(0, len(rows), tiles)]


@constant_to_compiler
def _pairs_by_index(
    ranges: tuple[tuple[range, ...], ...],
    index: int,
    tiles: int,
    causal: bool,
    window: int | None,
    prefix: int | None,
    chunk: int | None,
) -> tuple[Pairs, Pairs]:
    """Returns the same for a mask that depends on indices alone, without a device."""
    return _cached_pairs(ranges, index, tiles, causal, window, prefix, chunk)


@lru_cache(maxsize=64)
def _cached_pairs(
    ranges: tuple[tuple[range, ...], ...],
    index: int,
    tiles: int,
    causal: bool,
    window: int | None,
    prefix: int | None,
    chunk: int | None,
) -> tuple[Pairs, Pairs]:
    indices = [torch.cat([torch.arange(r.start, r.stop) for r in own]) for own in ranges]
    split = ContextSplit(torch.stack(indices)[:, None])
    mask = SequenceMask(causal=causal, window=window, prefix=prefix, chunk=chunk)
    some, every = torch.stack(_classify(mask, split, index, tiles)).tolist()
    return some, every


def _classify(
    mask: SequenceMask, split: ContextSplit, index: int, tiles: int
) -> tuple[Bool[Tensor, "ranks tiles tiles"], Bool[Tensor, "ranks tiles tiles"]]:
    """Returns the pairs as tensors."""
    low, high = _extremes(mask.positions, split, tiles, split.indices)
    some, every = _by_position(mask, (low[index], high[index]), (low, high))
    if mask.document_ids is not None:
        ids = mask.document_ids
        shifted = torch.where(
            ids < 0, torch.iinfo(ids.dtype).max, ids
        )  # padding belongs to no document
        first, _ = _extremes(shifted, split, tiles)
        lowest, last = _extremes(ids, split, tiles)
        query, key = _pair(first[index], first)
        query_last, key_last = _pair(last[index], last)
        some = some & (torch.maximum(query, key) <= torch.minimum(query_last, key_last))
        query_lowest, key_lowest = _pair(lowest[index], lowest)
        one = (query_lowest == query_last) & (key_lowest == key_last) & (query_last == key_last)
        every = every & one & (query_lowest >= 0)
    return some.any(1), every.all(1)


def _by_position(
    mask: SequenceMask, query: tuple[Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Bool[Tensor, "... tiles tiles"], Bool[Tensor, "... tiles tiles"]]:
    """Returns the same by the rules that compare positions, from the extremes of the tiles."""
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
        distance = torch.maximum(query_low - key_high, key_low - query_high)
        some = some & (distance < mask.window)
        widest = torch.maximum(query_high - key_low, key_high - query_low)
        every = every & (widest < mask.window)
    if mask.chunk is not None:
        query_first, query_last = query_low // mask.chunk, query_high // mask.chunk
        key_first, key_last = key_low // mask.chunk, key_high // mask.chunk
        some = some & (key_first <= query_last) & (query_first <= key_last)
        every = every & (query_first == key_last) & (key_first == query_last)
    return some, every


def _extremes(
    values: Tensor | None, split: ContextSplit, tiles: int, indices: Tensor | None = None
) -> tuple[Int[Tensor, "... tiles"], Int[Tensor, "... tiles"]]:
    """Returns the smallest and largest value of each tile, by default of the indices."""
    if values is not None:
        indices = torch.stack([gather_rows(values, own) for own in split.indices])
    if indices is None:
        raise ValueError("neither values nor indices")
    tiled = torch.unflatten(indices, 2, (tiles, -1))
    return tiled.amin(-1), tiled.amax(-1)


def _pair(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `[b, tiles]` of queries and `[ranks, b, tiles]` of keys, broadcast for comparison."""
    return query[None, :, :, None], key[:, :, None, :]
