"""Rows of experts without other ranks: slots, bounds, one rank with all experts, and refusals."""

import math

import pytest
import torch
from megatron_parallel import LayoutError, Mesh, ParallelLayout
from megatron_parallel.collectives.traffic import Traffic
from megatron_parallel.expert_parallel import (
    RowLimits,
    RowOps,
    RowSplits,
    all_to_all,
    assign_slots,
    build_dispatcher,
    gather_rows,
    micro_batches_of_experts,
    scatter_rows,
    start_all_to_all,
    uncompiled,
)
from megatron_parallel.expert_parallel.all_gather import AllGatherDispatcher
from megatron_parallel.expert_parallel.all_to_all import AllToAllDispatcher
from megatron_parallel.expert_parallel.slots import clipped, order_by_expert, refused
from megatron_parallel.imagined import imagined_device
from megatron_parallel.pipeline import PassInterleaver
from torch import Tensor

FIRST = Mesh(ParallelLayout(ep=2).resolve(2), 0)


def sort(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    flat = experts.flatten()
    place = torch.where((flat >= 0) & (flat < count), flat, count)
    return place.argsort(stable=True), torch.bincount(place, minlength=count + 1)[:count]


def permute(tokens: Tensor, order: Tensor, choices: int) -> Tensor:
    return tokens[order // choices]


def unpermute(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    choice = order.clamp(min=0)
    weighted = rows * weights.flatten()[choice][:, None]
    chosen = torch.where((order >= 0)[:, None], weighted, 0)
    tokens = choice // weights.shape[1]
    return rows.new_zeros(len(weights), rows.shape[1]).index_add(0, tokens, chosen)


OPS = RowOps(sort, permute, unpermute)
EXPERTS = torch.tensor([[1, 0], [-1, -1], [2, 0], [2, 1]])


@pytest.mark.parametrize("name", ["allgather", "alltoall"])
@pytest.mark.parametrize(
    ("limits", "factor", "bound"),
    [
        (RowLimits(), None, 8),
        (RowLimits(all_routed=True), None, 8),
        (RowLimits(per_expert=2), None, 6),
        (RowLimits(per_expert=2, static=True), None, 6),
        (RowLimits(per_expert=9), None, 8),
        (RowLimits(), 1.0, 8),
        (RowLimits(), 0.8, 7),
        (RowLimits(per_expert=2), 0.5, 4),
    ],
    ids=str,
)
def test_a_rank_with_all_experts_has_rows_up_to_the_bound(
    single: Mesh, name: str, limits: RowLimits, factor: float | None, bound: int
) -> None:
    """Three experts, four tokens with two choices each, of which one is padding."""
    tokens = torch.arange(4.0)[:, None] + 1
    weights = torch.arange(1.0, 9.0).view(4, 2)
    dispatcher = build_dispatcher(name, single, 3, OPS, rank_capacity_factor=factor)
    with single.counting() as traffic:
        route = dispatcher.route(EXPERTS, limits)
        dispatch = route.dispatch(tokens, weights, None)
        rows, counts, has_tail = dispatch.wait()
    assert not traffic.records and not route.changes
    sorted_rows = [1, 3, 1, 4, 3, 4, 2, 2]  # of experts 0, 1 and 2, then of none
    assert rows.flatten().tolist() == sorted_rows[:bound]
    assert has_tail == (not limits.all_routed)
    lost = max(0, 6 - bound)
    assert counts.tolist() == [2, 2, 2 - lost]
    assert (route.overflow is None) == (factor is None)
    y = dispatch.combine(10 * rows).wait().flatten().tolist()
    if factor is None:
        assert y == [10 * (1 + 2), 0 if bound == 6 else 20 * (3 + 4), 30 * (5 + 6), 40 * (7 + 8)]
    else:
        assert route.overflow is not None and int(route.overflow) == lost
        assert [math.isnan(each) for each in y] == [lost > 0, False, lost > 0, lost > 0]


STATIC = RowLimits(per_expert=3, static=True)


@pytest.mark.parametrize(
    ("tokens", "choices", "limits", "factor", "slots"),
    [
        (5, 2, RowLimits(), None, None),
        (5, 2, RowLimits(static=True), None, None),
        (5, 2, RowLimits(per_expert=3), None, None),
        (5, 2, STATIC, None, 2 * 3),
        (5, 1, STATIC, None, 5),
        (5, 3, RowLimits(per_expert=9, static=True), None, 5 * 2),
        (5, 2, RowLimits(), 1.0, 5),
        (5, 2, RowLimits(), 0.5, 3),
        (5, 2, RowLimits(per_expert=1), 1.0, 2),
        (0, 2, STATIC, 1.0, None),
        (5, 0, STATIC, 1.0, None),
    ],
)
def test_slots_of_a_pair_of_ranks_have_the_tightest_bound(
    tokens: int, choices: int, limits: RowLimits, factor: float | None, slots: int | None
) -> None:
    """Each of two ranks has two of four experts."""
    assert AllToAllDispatcher(FIRST, 4, OPS, factor).slots(tokens, choices, limits) == slots


@pytest.mark.parametrize(
    ("choices", "limits", "factor", "bound"),
    [
        (1, RowLimits(), None, 10),
        (3, RowLimits(), None, 10 * 2),
        (3, RowLimits(per_expert=2), None, 2 * 2 * 2),  # of two micro-batches
        (2, RowLimits(), 1.2, 12),
        (2, RowLimits(), 0.33, 4),
    ],
)
def test_rows_of_a_rank_have_the_tightest_bound(
    choices: int, limits: RowLimits, factor: float | None, bound: int
) -> None:
    assert AllGatherDispatcher(FIRST, 4, OPS, factor).bound(10, choices, limits) == bound


def test_rows_for_other_ranks_are_a_tail_though_every_choice_is_an_expert() -> None:
    with Mesh.imagined(ParallelLayout(ep=2, dp=2)) as mesh, imagined_device("cpu"):
        dispatcher = build_dispatcher("allgather", mesh, 4, OPS)
        route = dispatcher.route(torch.zeros(5, 2, dtype=torch.int64), RowLimits(all_routed=True))
        assert route.dispatch(torch.zeros(5, 3), torch.zeros(5, 2)).wait().has_tail


def test_numbers_of_rows_are_copied_aside_unless_a_compiler_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[Tensor] = []
    copy = all_to_all.HostCopy

    def noted(numbers: Tensor) -> object:
        copies.append(numbers)
        return copy(numbers)

    monkeypatch.setattr(all_to_all, "HostCopy", noted)
    with Mesh.imagined(ParallelLayout(ep=2, dp=2)) as mesh, imagined_device("cpu"):
        dispatcher = build_dispatcher("alltoall", mesh, 4, OPS)
        for count, compiles in enumerate((False, True)):
            with monkeypatch.context() as patch:
                patch.setattr(torch.compiler, "is_compiling", lambda own=compiles: own)
                route = dispatcher.route(torch.zeros(5, 2, dtype=torch.int64))
                found = route.dispatch(torch.zeros(5, 3), torch.zeros(5, 2)).wait()
            assert len(copies) == 1 and len(found.rows) == 10, count


def test_an_interleaver_is_refused_where_nothing_is_in_flight(single: Mesh) -> None:
    gathered = build_dispatcher("allgather", single, 3, OPS).route(EXPERTS)
    with pytest.raises(LayoutError, match="communicates synchronously"):
        gathered.dispatch(torch.ones(4, 1), torch.ones(4, 2), PassInterleaver())
    alone = build_dispatcher("alltoall", single, 3, OPS).route(EXPERTS)
    assert len(alone.dispatch(torch.ones(4, 1), torch.ones(4, 2), PassInterleaver()).wait().rows)


@pytest.mark.parametrize(
    ("layout", "rank", "rows"),
    [
        (ParallelLayout(ep=4, dp=4), 0, 4 * 3),
        (ParallelLayout(ep=4, dp=4), 1, 4 * 3),
        (ParallelLayout(ep=4, dp=4), 2, 4 * 2),
        (ParallelLayout(tp=2, ep=2, dp=2), 3, 2 * 2 * 5),  # gathered from two ranks
    ],
    ids=str,
)
def test_experts_have_equal_loads_where_no_numbers_exist(
    layout: ParallelLayout, rank: int, rows: int
) -> None:
    """Ten choices of five tokens: 3, 3, 2 and 2 for each of four ranks, or 5 for each of two."""
    with Mesh.imagined(layout, rank) as mesh, imagined_device("cpu") as ledger:
        dispatcher = build_dispatcher("alltoall", mesh, 4, OPS)
        traffic = Traffic()
        mesh.axis("ep").ledger.open.append(traffic)
        route = dispatcher.route(torch.zeros(5, 2, dtype=torch.int64))
        ledger.clear()
        dispatch = route.dispatch(torch.zeros(5, 3), torch.zeros(5, 2))
        found = dispatch.wait()
        assert found.rows.shape == (rows, 3) and not found.has_tail
        assert dispatch.combine(found.rows).wait().shape == (5, 3)
    assert traffic.of("ep", "all_to_all of dispatched tokens").nbytes == 10 * 3 * 4
    assert route.changes and route.overflow is None


def test_passes_of_compiled_code_are_not_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    rows, splits = torch.ones(3, 2), RowSplits(FIRST.axis("ep"), (1, 2), (3, 0), "rows")
    with pytest.raises(LayoutError, match="cannot be interleaved; leave out --compile"):
        start_all_to_all(rows, splits, PassInterleaver())
    with pytest.raises(LayoutError, match="axis 'ep' of 2 ranks has no process group"):
        start_all_to_all(rows, splits)  # sends


def test_the_first_rows_of_each_rank_get_slots() -> None:
    """Rows 0 to 2 go to rank 0, rows 3 to 5 to rank 1, and the last two to none."""
    slots = assign_slots(torch.tensor([[2, 1], [0, 3]]), 8, 2)
    assert slots.source.tolist() == [0, 1, 3, 4] and slots.used.all()
    assert slots.sent.tolist() == [True, True, False, True, True, False, False, False]
    assert slots.place[slots.sent].tolist() == [0, 1, 2, 3]
    assert slots.counts.tolist() == [[2, 0], [0, 2]]
    assert int(slots.place.min()) >= 0 and int(slots.place.max()) < 4


def test_slots_without_a_row_have_copies_of_different_rows() -> None:
    slots = assign_slots(torch.tensor([[1, 0], [0, 0], [1, 1]]), 4, 3)
    assert slots.used.tolist() == [True, *[False] * 5, True, True, False]
    assert slots.source[slots.used].tolist() == [0, 1, 2]
    empty = slots.source[~slots.used]
    assert empty.bincount(minlength=4).max() <= 2 and int(empty.max()) < 4
    assert slots.sent.tolist() == [True, True, True, False]
    assert slots.place[:3].tolist() == [0, 6, 7] and slots.place[3] < 9
    assert slots.counts.tolist() == [[1, 0], [0, 0], [1, 1]]


def test_slots_are_sorted_by_expert_with_the_empty_ones_last() -> None:
    found = order_by_expert(torch.tensor([[1, 1], [2, 0]]), 3)
    assert found.tolist() == [0, 3, 4, 1, 2, 5]
    assert order_by_expert(torch.tensor([[0, 2], [1, 1]]), 2).tolist() == [2, 0, 1, 3]


def test_rows_beyond_a_bound_are_taken_from_the_last_experts() -> None:
    counts = torch.tensor([[2, 2, 1], [0, 0, 1], [9, 1, 1]])
    assert clipped(counts, 3).tolist() == [[2, 1, 0], [0, 0, 1], [3, 0, 0]]
    assert clipped(counts, 20).tolist() == counts.tolist()


def test_weights_are_nan_only_if_choices_were_lost() -> None:
    weights = torch.ones(2, 2)
    assert refused(weights, None) is weights
    assert torch.equal(refused(weights, torch.tensor(0)), weights)
    assert refused(weights, torch.tensor(1)).isnan().all()


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        (ParallelLayout().resolve(1), 1),
        (ParallelLayout(ep=4).resolve(4), 4),
        (ParallelLayout(tp=2, etp=1, ep=4).resolve(4), 2),
        (ParallelLayout(tp=2, ep=2).resolve(4), 2),
        (ParallelLayout(cp=2, ep=2).resolve(2), 1),
        (ParallelLayout(pp=2, ep=2).resolve(4), 2),
    ],
    ids=["one", "ep4", "tp2 etp1 ep4", "tp2 ep2", "cp2 ep2", "pp2 ep2"],
)
def test_ranks_of_one_micro_batch_are_counted_once(layout: ParallelLayout, count: int) -> None:
    for rank in range(layout.world_size):
        assert micro_batches_of_experts(Mesh(layout, rank)) == count
        assert micro_batches_of_experts(Mesh(layout, rank + 8, first_rank=8)) == count


def test_one_rank_exchanges_nothing(single: Mesh) -> None:
    rows, axis = torch.ones(3, 2), single.axis("ep")
    pending = start_all_to_all(rows, RowSplits(axis, (3,), (3,), "rows"))
    assert pending.wait() is rows
    assert gather_rows(rows, (3,), axis) is rows and scatter_rows(rows, (3,), axis) is rows


def test_numbers_of_rows_that_do_not_fit_are_refused() -> None:
    axis, rows = FIRST.axis("ep"), torch.ones(3, 2)
    with pytest.raises(LayoutError, match="3 rows were given, but sizes has 2 for this rank"):
        gather_rows(rows, (2, 3), axis)
    with pytest.raises(LayoutError, match="3 rows were given, but sizes add up to 4"):
        scatter_rows(rows, (1, 3), axis)
    with pytest.raises(LayoutError, match="output_splits has 1 numbers of rows for the 2 ranks"):
        RowSplits(axis, (1, 2), (3,), "rows")
    back = RowSplits(axis, (1, 2), (3, 4), "rows").transposed
    assert back == RowSplits(axis, (3, 4), (1, 2), "rows")


def test_factors_below_one_and_numbers_that_divide_are_accepted() -> None:
    build_dispatcher("allgather", FIRST, 4, OPS, rank_capacity_factor=0.25)
    for factor in (-1.0, math.nan):
        with pytest.raises(LayoutError, match=f"rank_capacity_factor {factor} leaves no rows"):
            build_dispatcher("allgather", FIRST, 4, OPS, rank_capacity_factor=factor)
    with pytest.raises(LayoutError, match="3 experts cannot be cut into 2 equal parts"):
        build_dispatcher("allgather", FIRST, 3, OPS)


def test_a_function_between_graphs_is_called_once_with_its_arguments() -> None:
    calls: list[tuple[int, int]] = []
    assert uncompiled(lambda a, b: calls.append((a, b)) or a - b, 5, 3) == 2  # type: ignore[func-returns-value]
    assert calls == [(5, 3)]
