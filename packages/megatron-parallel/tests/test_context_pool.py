"""Plans of a pool: each document once, within the capacity, and without deadlocks."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_parallel import LayoutError, ParallelLayout
from megatron_parallel.context_parallel import PoolPlan, PoolRow, plan_pool
from megatron_parallel.context_parallel.pool import BALANCED


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], int, int, int, float]:
    pool = 2 ** draw(st.integers(0, 4))
    multiple = draw(st.sampled_from([2, 4, 6]))
    capacity = draw(st.integers(multiple, 60))
    most = pool * (capacity // multiple * multiple)
    lengths = draw(st.lists(st.integers(1, most), max_size=40))
    return lengths, pool, capacity, multiple, draw(st.sampled_from([0.0, 0.01, 1.0]))


def plan_of(batch: tuple[list[int], int, int, int, float]) -> PoolPlan:
    lengths, pool, capacity, multiple, pair = batch
    return plan_pool(lengths, pool, capacity, multiple=multiple, tokens_per_pair=pair)


@settings(max_examples=150, deadline=None)
@given(batches())
def test_every_document_is_in_one_row_within_the_capacity(
    batch: tuple[list[int], int, int, int, float],
) -> None:
    lengths, _, capacity, multiple, _ = batch
    plan = plan_of(batch)
    taken = [number for row in plan.rows for number in row.documents]
    assert sorted(taken) == list(range(len(lengths)))
    for row in plan.rows:
        size = len(row.ranks)
        assert row.tokens == sum(lengths[number] for number in row.documents) <= row.padded_length
        assert row.padded_length % (size * multiple) == 0 and row.padded_length // size <= capacity
        assert row.padded_length - row.tokens < size * multiple  # no more padding than necessary


@settings(max_examples=150, deadline=None)
@given(batches())
def test_groups_are_aligned_powers_of_two_and_groups_of_the_mesh(
    batch: tuple[list[int], int, int, int, float],
) -> None:
    plan = plan_of(batch)
    layout = ParallelLayout(dp=plan.pool, hybrid_cp=True)
    for row in plan.rows:
        assert tuple(row.ranks) in layout.groups(f"hybrid_cp_{len(row.ranks)}")


@settings(max_examples=150, deadline=None)
@given(batches())
def test_ranks_that_process_their_rows_in_order_never_deadlock(
    batch: tuple[list[int], int, int, int, float],
) -> None:
    """Starts a row as soon as all of its ranks have reached it."""
    plan = plan_of(batch)
    walks = [list(plan.rows_of(rank)) for rank in range(plan.pool)]
    assert {len(walk) for walk in walks} == {plan.rows_per_rank}
    while any(walks):
        before = sum(map(len, walks))
        for rank, walk in enumerate(walks):
            row = walk[0] if walk else None
            members = row.ranks if row else range(rank, rank + 1)
            if walk and all(walks[other] and walks[other][0] is row for other in members):
                for other in members:
                    walks[other].pop(0)
        assert sum(map(len, walks)) < before


@settings(max_examples=150, deadline=None)
@given(batches())
def test_ranks_of_a_group_share_all_rows_before_it(
    batch: tuple[list[int], int, int, int, float],
) -> None:
    plan = plan_of(batch)
    for row in plan.rows:
        befores = []
        for rank in row.ranks:
            walk = plan.rows_of(rank)
            befores.append(walk[: walk.index(row)])
        assert all(before == befores[0] for before in befores)


def test_short_documents_are_not_cut_and_long_ones_use_few_ranks() -> None:
    plan = plan_pool([30, 9, 8, 7, 6], pool=4, capacity=16)
    assert plan.rows == (
        PoolRow(range(2), (0,), 30, 32, 15.0),
        PoolRow(range(2, 3), (1, 4), 15, 16, 15.0),
        PoolRow(range(3, 4), (2, 3), 15, 16, 15.0),
    )
    assert plan.imbalance == 1.0 and plan.rows_per_rank == 1
    assert plan.sends_per_token == 30 / 60
    assert plan.rows_of(1) == plan.rows[:1] and plan.rows_of(2) == plan.rows[1:2]


def test_a_document_with_most_of_the_work_is_cut_within_the_capacity() -> None:
    """One document of 64 tokens has 2,144 of the 2,752 units of work of the batch."""
    lengths = [64, *[16] * 4]
    without = plan_pool(lengths, pool=4, capacity=64)
    assert [len(row.ranks) for row in without.rows[:1]] == [2]  # 64 of 128 tokens
    plan = plan_pool(lengths, pool=4, capacity=64, tokens_per_pair=1.0)
    assert [(len(row.ranks), row.documents) for row in plan.rows[:1]] == [(4, (0,))]
    assert plan.imbalance == 1.0


@pytest.mark.parametrize(
    ("share", "lengths", "sizes"),
    [
        (1.0, [20, 10, 10], [2, 1, 1]),
        (0.75, [16, 6, 6, 6, 6], [4, 1, 1, 1, 1]),
        (0.5, [70] * 4 + [60] * 2, [2] * 6),
        (0.25, [40] * 10, [2] * 10),
        (0.125, [20] * 21, [2] * 21),
    ],
)
def test_documents_are_cut_by_the_largest_share_that_balances(
    share: float, lengths: list[int], sizes: list[int]
) -> None:
    """A document is cut until a rank has at most that share of the average work of a rank."""
    plan = plan_pool(lengths, pool=4, capacity=1000)
    found = {number: len(row.ranks) for row in plan.rows for number in row.documents}
    assert [found[number] for number in range(len(lengths))] == sizes
    assert plan.imbalance <= BALANCED
    most = share * sum(lengths) / 4
    assert all(length <= size * most for length, size in zip(lengths, sizes, strict=True))


def test_ranks_with_fewer_rows_get_empty_rows() -> None:
    plan = plan_pool([8, 8, 8], pool=2, capacity=8)
    assert plan.rows_per_rank == 2
    assert sum(row is None for rank in range(2) for row in plan.rows_of(rank)) in (0, 1)
    empty = plan_pool([], pool=2, capacity=8)
    assert (empty.rows_per_rank, empty.rows_of(0), empty.imbalance, empty.sends_per_token) == (
        1,
        (None,),
        1.0,
        0.0,
    )


def test_the_plan_is_printed_in_one_line() -> None:
    assert str(plan_pool([30, 9, 8, 7, 6], pool=4, capacity=16)) == (
        "documents: 4 unsplit, 1 over 2 ranks; micro-batches on each of 4 ranks: 1; work of the "
        "busiest rank: 1.00 of the average"
    )


def test_large_batches_are_balanced() -> None:
    lengths = [1 + (37 * number * number) % 997 for number in range(500)]
    plan = plan_pool(lengths, pool=16, capacity=512, tokens_per_pair=0.01)
    assert plan.imbalance <= BALANCED


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([33], 4, 9), r"33 tokens .* 4 ranks: .* of 9 tokens .* multiples of 2, they hold 32"),
        (([3], 3, 9), "a pool of 3 ranks is not a power of two"),
        (([1], 2, 1), "a capacity of 1 tokens on a rank is less than the multiple 2"),
    ],
)
def test_impossible_plans_are_refused(arguments: tuple[list[int], int, int], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        plan_pool(*arguments)


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys; from megatron_parallel.context_parallel import plan_pool; "
        "plan_pool([3], 1, 8); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
