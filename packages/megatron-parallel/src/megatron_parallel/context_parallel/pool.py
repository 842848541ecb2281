"""Plans of a pool: the ranks of each document of a global batch, in pure Python.

Documents that do not attend to each other need not be cut alike. The data- and context-parallel
ranks together form a pool, and each document has a context-parallel size of its own: a power of
two, no larger than its length requires. Short documents are not cut and need no messages. Long ones
are cut over 2, 4, … ranks. This is the hybrid, or dynamic, context parallelism of Megatron-LM::

    >>> plan = plan_pool([30, 9, 8, 7, 6], pool=4, capacity=16)
    >>> [(row.ranks, row.documents) for row in plan.rows]
    [(range(0, 2), (0,)), (range(2, 3), (1, 4)), (range(3, 4), (2, 3))]

Two rules make a plan balanced and free of deadlocks:

- Groups are aligned: a group of `c` ranks begins at a multiple of `c`. Any two groups are disjoint
  or nested, and a pool of `p` ranks needs groups of `log2(p) + 1` sizes.
- Large groups come first. Ranks that share a group share all larger groups before it, so they have
  had equal work and process their common rows in the same order. They wait for each other only
  because the estimates of the work are inexact, and never forever.

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
"""Ratio of the largest to the average work of a rank below which a plan is balanced."""

_SHARES: Final = (1.0, 0.75, 0.5, 0.25, 0.125)
"""Limits on the work of one rank for one document, relative to the average work of a rank."""


@dataclass(frozen=True)
class PoolRow:
    """Documents that a group of neighbouring ranks processes as one micro-batch.

    Attributes:
        ranks: Ranks of the pool. Their number is the context-parallel size of the row.
        documents: Indices of the documents, ascending.
        tokens: Number of tokens of all documents.
        padded_length: Number of tokens with padding, a multiple of the number of ranks.
        work: Work of each rank.
    """

    ranks: range
    documents: tuple[int, ...]
    tokens: int
    padded_length: int
    work: float


@dataclass(frozen=True)
class PoolPlan:
    """The rows of a pool for one global batch, from `plan_pool`.

    Attributes:
        pool: Number of ranks.
        rows: Rows, those of the largest groups first. Each rank processes its rows in this order.
    """

    pool: int
    rows: tuple[PoolRow, ...]

    def rows_of(self, rank: int) -> tuple[PoolRow | None, ...]:
        """Returns the rows of a rank in order, as many for all ranks; None is an empty row."""
        own = [row for row in self.rows if rank in row.ranks]
        return (*own, *(None,) * (self.rows_per_rank - len(own)))

    @property
    def rows_per_rank(self) -> int:
        """Number of rows of each rank, including empty ones; at least 1."""
        return max(1, *self._totals[0])

    @property
    def work(self) -> tuple[float, ...]:
        """Work of each rank."""
        return self._totals[1]

    @property
    def imbalance(self) -> float:
        """Largest work of a rank divided by the average."""
        work = self.work
        return max(work) * self.pool / sum(work) if any(work) else 1.0

    @property
    def sends_per_token(self) -> float:
        """Average number of times the keys and values of a token are sent in a ring."""
        tokens = sum(row.tokens for row in self.rows)
        return sum((len(row.ranks) - 1) * row.tokens for row in self.rows) / max(1, tokens)

    @cached_property
    def _totals(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Number of rows and work of each rank."""
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
    """Verifies that documents of up to `longest` tokens can be planned.

    Other arguments are those of `plan_pool`.

    Raises:
        LayoutError: The pool is not a power of two, the capacity is less than `multiple`, or such a
            document does not fit into the pool.
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

    A document is cut over as few ranks as can hold it, or over more if a rank would otherwise have
    more than a certain work for it. Of several limits on this work, the plan uses the first with
    which the largest work of a rank is at most `BALANCED` times the average, or else the best.

    Args:
        lengths: Number of tokens of each document, at least 1.
        pool: Number of ranks, a power of two.
        capacity: Maximum number of tokens that a rank may hold at a time.
        multiple: Each rank's part of a row is a multiple of this number. It must be even for a
            zig-zag inside documents, and a multiple of the tensor-parallel size with sequence
            parallelism.
        tokens_per_pair: Work of a pair of query and key in attention, relative to all other work of
            one token: about `1 / 6h` for hidden size `h`.

    Raises:
        LayoutError: See `check_pool`.
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
    """Returns the number of ranks for a document, with at most `most` work on each."""
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
    """Assigns each document to the group of its size with the least work, largest first."""
    rows: list[PoolRow] = []
    loads = [0.0] * pool
    for size in sorted(set(sizes), reverse=True):
        numbers = [number for number, own in enumerate(sizes) if own == size]
        numbers.sort(key=lambda number: (-work[number], number))
        idle = [
            (loads[first], first) for first in range(0, pool, size)
        ]  # loads are equal within a group
        heapq.heapify(idle)
        assigned: dict[int, list[int]] = {}
        for number in numbers:
            load, first = idle[0]
            assigned.setdefault(first, []).append(number)
            heapq.heapreplace(idle, (load + work[number] / size, first))
        for load, first in idle:
            loads[first : first + size] = [load] * size
        for first in sorted(assigned):
            for documents in _filled(assigned[first], lengths, size * capacity):
                tokens = sum(lengths[number] for number in documents)
                length = -(-tokens // (size * multiple)) * size * multiple
                own = sum(work[number] for number in documents) / size
                rows.append(PoolRow(range(first, first + size), documents, tokens, length, own))
    return rows


def _filled(numbers: Sequence[int], lengths: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Returns documents in few rows, by first fit with the longest documents first."""
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
