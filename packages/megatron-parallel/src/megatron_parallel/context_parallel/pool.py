"""Which ranks of a pool take which documents, and over how many each is cut, in pure Python.

Documents of a global batch that do not attend to each other need not be cut alike. The ranks of
data and context parallelism together are a pool, and every document gets a context-parallel size of
its own: a power of two, no larger than its length asks for. Short ones run unsplit, without any
message; long ones are cut over 2, 4, … ranks (Megatron-LM's hybrid, or dynamic, context
parallelism)::

    >>> plan = plan_pool([30, 9, 8, 7, 6], pool=4, capacity=16)
    >>> [(row.ranks, row.documents) for row in plan.rows]
    [(range(0, 2), (0,)), (range(2, 3), (1, 4)), (range(3, 4), (2, 3))]

Two rules make a plan safe and even:

- Groups are aligned: one of `c` ranks begins at a multiple of `c`, so any two are disjoint or
  nested, and a pool of `p` needs groups of `log2(p) + 1` sizes.
- Large groups come first. Whoever shares a group has shared all larger ones, so its ranks have done
  exactly the same before: nobody waits for anybody but for errors of the estimate, and all walk
  their common rows in the same order, so nobody waits for ever.

A row is the micro-batch of a group: documents one after the other, up to the capacity of its ranks.
All ranks have equally many rows, some of them empty, so that what happens once a micro-batch
(pipelines, weights gathered layer by layer) happens equally often on all. Plans depend on the
lengths alone, in whole numbers and in sums in a fixed order, so every rank makes the same plan.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from megatron_parallel.errors import LayoutError

BALANCED: Final = 1.05
"""Work of the busiest rank over the average below which nothing more is cut."""

_SHARES: Final = (1.0, 0.75, 0.5, 0.25, 0.125)
"""Largest part of a document that one rank may have, in units of a rank's average work."""


@dataclass(frozen=True)
class PoolRow:
    """Documents that some neighbouring ranks take together, as one micro-batch.

    Attributes:
        ranks: of the pool; their number is the row's context-parallel size.
        documents: their numbers, ascending.
        tokens: of all of them.
        padded_length: tokens with padding, which the ranks can share out evenly.
        work: of each of its ranks.
    """

    ranks: range
    documents: tuple[int, ...]
    tokens: int
    padded_length: int
    work: float


@dataclass(frozen=True)
class PoolPlan:
    """What a pool does with a global batch; made by `plan_pool`.

    Attributes:
        pool: Number of ranks.
        rows: Largest groups first; every rank takes its own in this order.
    """

    pool: int
    rows: tuple[PoolRow, ...]

    def rows_of(self, rank: int) -> tuple[PoolRow | None, ...]:
        """What a rank takes, in order, as many for every rank; None is an empty row of its own."""
        own = [row for row in self.rows if rank in row.ranks]
        return (*own, *(None,) * (self.rows_per_rank - len(own)))

    @property
    def rows_per_rank(self) -> int:
        """Rows of every rank, empty ones included; at least 1."""
        return max(1, *self._totals[0])

    @property
    def work(self) -> tuple[float, ...]:
        """Of every rank."""
        return self._totals[1]

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over that of the average one; the others wait for it."""
        work = self.work
        return max(work) * self.pool / sum(work) if any(work) else 1.0

    @property
    def sends_per_token(self) -> float:
        """How often the keys and values of an average token go to another rank in a ring."""
        tokens = sum(row.tokens for row in self.rows)
        return sum((len(row.ranks) - 1) * row.tokens for row in self.rows) / max(1, tokens)

    @cached_property
    def _totals(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Rows and work of every rank."""
        counts, work = [0] * self.pool, [0.0] * self.pool
        for row in self.rows:
            for rank in row.ranks:
                counts[rank] += 1
                work[rank] += row.work
        return tuple(counts), tuple(work)

    def __str__(self) -> str:
        by_size: dict[int, int] = {}
        for row in self.rows:
            by_size[len(row.ranks)] = by_size.get(len(row.ranks), 0) + len(row.documents)
        parts = [
            f"{count} {'unsplit' if size == 1 else f'over {size} ranks'}"
            for size, count in sorted(by_size.items())
        ]
        return (
            f"documents: {', '.join(parts) or 'none'}; micro-batches on each of {self.pool} ranks: "
            f"{self.rows_per_rank}; work of the busiest rank: {self.imbalance:.2f} of the average"
        )


def check_pool(longest: int, pool: int, capacity: int, multiple: int = 2) -> None:
    """Raises `LayoutError` unless documents of up to `longest` tokens can be planned.

    Arguments are those of `plan_pool`.
    """
    if pool < 1 or pool & (pool - 1):
        raise LayoutError(f"a pool of {pool} ranks is not a power of two")
    if capacity < multiple:
        raise LayoutError(
            f"a capacity of {capacity} tokens on a rank is less than the multiple {multiple}"
        )
    most = pool * (capacity // multiple * multiple)
    if longest > most:
        raise LayoutError(
            f"a document of {longest} tokens does not fit into a pool of {pool} ranks: with a "
            f"capacity of {capacity} tokens each, in multiples of {multiple}, they hold {most}"
        )


def plan_pool(
    lengths: Sequence[int],
    pool: int,
    capacity: int,
    *,
    multiple: int = 2,
    tokens_per_pair: float = 0.0,
) -> PoolPlan:
    """Plans one global batch.

    A document is cut over as few ranks as have room for it, or over more where that is more than
    its share of the work: of several limits on that share the first is taken by which the busiest
    rank is within `BALANCED` of the average, or else the best.

    Args:
        lengths: Tokens of every document, at least 1.
        pool: Ranks, a power of two.
        capacity: Tokens that one rank may hold at a time.
        multiple: Every rank's part of a row is a multiple of this; even, for a zig-zag inside
            documents, and for sequence parallelism a multiple of its ranks.
        tokens_per_pair: Work of a pair of query and key in attention, in units of all other work
            of one token: with `h` hidden channels about `1 / 6h`.

    Raises:
        LayoutError: A document that does not fit into the pool, or a pool of another size.
    """
    check_pool(max(lengths, default=0), pool, capacity, multiple)
    capacity = capacity // multiple * multiple
    work = [length + tokens_per_pair * length * (length + 1) / 2 for length in lengths]

    def planned(most: float) -> PoolPlan:
        sizes = [
            _size(length, own, pool, capacity, multiple, most)
            for length, own in zip(lengths, work, strict=True)
        ]
        return PoolPlan(pool, tuple(_rows(lengths, work, sizes, pool, capacity, multiple)))

    best = planned(math.inf)
    for share in _SHARES:
        if best.imbalance <= BALANCED:
            break
        best = min(best, planned(share * sum(work) / pool), key=lambda plan: plan.imbalance)
    return best


def _size(length: int, work: float, pool: int, capacity: int, multiple: int, most: float) -> int:
    """Ranks that a document is cut over: room for its tokens, and at most so much work on each."""
    size = 1
    while size < pool and (
        length > size * capacity or (work > size * most and length >= 2 * size * multiple)
    ):
        size *= 2
    return size


def _rows(
    lengths: Sequence[int],
    work: Sequence[float],
    sizes: Sequence[int],
    pool: int,
    capacity: int,
    multiple: int,
) -> list[PoolRow]:
    """Every document to the group of its size that has least to do, the largest first."""
    rows: list[PoolRow] = []
    loads = [0.0] * pool
    for size in sorted(set(sizes), reverse=True):
        numbers = [number for number, own in enumerate(sizes) if own == size]
        numbers.sort(key=lambda number: (-work[number], number))
        idle = [(loads[first], first) for first in range(0, pool, size)]  # equal in a group
        heapq.heapify(idle)
        taken: dict[int, list[int]] = {}
        for number in numbers:
            load, first = idle[0]
            taken.setdefault(first, []).append(number)
            heapq.heapreplace(idle, (load + work[number] / size, first))
        for load, first in idle:
            loads[first : first + size] = [load] * size
        for first in sorted(taken):
            for documents in _filled(taken[first], lengths, size * capacity):
                tokens = sum(lengths[number] for number in documents)
                length = -(-tokens // (size * multiple)) * size * multiple
                own = sum(work[number] for number in documents) / size
                rows.append(PoolRow(range(first, first + size), documents, tokens, length, own))
    return rows


def _filled(numbers: Sequence[int], lengths: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Documents in as few rows as first fit, the longest first, finds; few to begin with."""
    rows: list[list[int]] = []
    left: list[int] = []
    for number in sorted(numbers, key=lambda number: (-lengths[number], number)):
        where = next((i for i, free in enumerate(left) if free >= lengths[number]), len(rows))
        if where == len(rows):
            rows.append([])
            left.append(capacity)
        rows[where].append(number)
        left[where] -= lengths[number]
    return [tuple(sorted(row)) for row in rows]
