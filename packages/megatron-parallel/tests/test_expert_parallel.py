"""Token dispatch on several ranks against experts that one process applies to all tokens."""

import itertools
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import NamedTuple
from unittest import mock

import megatron_parallel.expert_parallel.exchange as exchange
import pytest
import torch
from megatron_parallel import LayoutError, Mesh, ParallelLayout
from megatron_parallel.expert_parallel import (
    RowLimits,
    RowOps,
    RowSplits,
    build_dispatcher,
    exchange_counts,
    start_all_to_all,
)
from megatron_parallel.testing import WorkerPool
from torch import Tensor

EXPERTS, CHOICES, HIDDEN, WIDTH = 4, 2, 6, 8
LAYOUTS = {
    "ep2": ParallelLayout(ep=2).resolve(2),
    "ep4": ParallelLayout(ep=4).resolve(4),
    "ep2 dp2": ParallelLayout(ep=2).resolve(4),
    "etp2": ParallelLayout(tp=2).resolve(2),
    "etp2 ep2": ParallelLayout(tp=2, ep=2).resolve(4),
    "tp2 etp1 ep4": ParallelLayout(tp=2, etp=1, ep=4).resolve(4),
    "ep before tp": ParallelLayout(tp=2, ep=2, order="ep-tp-cp-dp-pp").resolve(4),
}


def sort(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    flat = experts.flatten().tolist()
    order = [i for e in range(count) for i, chosen in enumerate(flat) if chosen == e]
    order += [i for i, chosen in enumerate(flat) if not 0 <= chosen < count]
    counts = [flat.count(e) for e in range(count)]
    return torch.tensor(order, dtype=torch.int64), torch.tensor(counts)


def permute(tokens: Tensor, order: Tensor, choices: int) -> Tensor:
    assert bool((order >= -1).all())
    return tokens[order // choices]


def unpermute(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    own = order >= 0
    rows, order = rows[own], order[own]
    weighted = rows * weights.flatten()[order][:, None]
    empty = rows.new_zeros(len(weights), rows.shape[1])
    return empty.index_add(0, order // weights.shape[1], weighted)


OPS = RowOps(sort, permute, unpermute)


def drawn(rank: int, equal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Draws tokens, experts and weights of a rank. Numbers of tokens are equal only if asked for.

    On odd ranks, no token chooses expert 2. The second token is padding.
    """
    generator = torch.Generator().manual_seed(rank)
    n = 5 if equal else 3 + 2 * rank
    tokens = torch.randn(n, HIDDEN, generator=generator, dtype=torch.float64)
    kept = torch.tensor([0, 1, 3]) if rank % 2 else torch.arange(4)
    experts = torch.stack(
        [kept[torch.randperm(len(kept), generator=generator)][:2] for _ in tokens]
    )
    experts[1] = -1
    weights = torch.rand(n, CHOICES, generator=generator, dtype=torch.float64)
    return tokens, experts, weights


def matrices() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(99)
    up = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator, dtype=torch.float64)
    return up, torch.randn(EXPERTS, WIDTH, HIDDEN, generator=generator, dtype=torch.float64)


def alone(ranks: int, equal: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Returns outputs and gradients on one rank: of tokens and weights by rank, and of matrices."""
    up, down = (m.requires_grad_() for m in matrices())
    outputs, inputs, shares = [], [], []
    for rank in range(ranks):
        tokens, experts, weights = drawn(rank, equal)
        inputs.append(tokens.requires_grad_())
        shares.append(weights.requires_grad_())
        zero = torch.zeros(HIDDEN, dtype=torch.float64)
        outputs.append(
            torch.stack(
                [
                    sum((w * ((x @ up[e]).tanh() @ down[e]) for e, w in pairs if e >= 0), zero)
                    for x, pairs in (
                        (x, list(zip(chosen, share, strict=True)))
                        for x, chosen, share in zip(tokens, experts.tolist(), weights, strict=True)
                    )
                ]
            )
        )
    torch.cat(outputs).square().sum().backward()
    grads = [[t.grad for t in ts] for ts in (inputs, shares, (up, down))]
    return [o.detach() for o in outputs], *grads  # type: ignore[return-value]


class Way(NamedTuple):
    """A dispatcher and its bound."""

    name: str
    limits: RowLimits = RowLimits()
    factor: float | None = None

    @property
    def equal(self) -> bool:
        """Whether ranks must have equal numbers of tokens."""
        return self.name == "allgather" or self != Way(self.name)


WAYS = {
    "allgather": Way("allgather"),
    "alltoall": Way("alltoall"),
    "allgather, experts with 5 tokens": Way("allgather", RowLimits(per_expert=5)),
    "alltoall, experts with 5 tokens": Way("alltoall", RowLimits(per_expert=5)),
    "alltoall, room for 5 tokens": Way("alltoall", RowLimits(per_expert=5, static=True)),
    "allgather, factor": Way("allgather", factor=4.0),
    "alltoall, factor": Way("alltoall", factor=4.0),
}


def through_ranks(mesh: Mesh, way: Way) -> dict[str, Tensor]:
    tokens, experts, weights = drawn(mesh.rank, way.equal)
    leaves = [tokens.requires_grad_(), weights.requires_grad_()]
    ep, etp = mesh.axis("ep"), mesh.axis("expert_tp")
    up, down = (m.chunk(ep.size)[ep.index] for m in matrices())
    up = up.chunk(etp.size, 2)[etp.index].clone().requires_grad_()
    down = down.chunk(etp.size, 1)[etp.index].clone().requires_grad_()
    dispatcher = build_dispatcher(way.name, mesh, EXPERTS, OPS, rank_capacity_factor=way.factor)
    route = dispatcher.route(experts, way.limits)
    assert (route.overflow is None) == (way.factor is None) and not route.overflow
    assert route.changes == (way in (WAYS["alltoall"], WAYS["alltoall, experts with 5 tokens"]))
    dispatch = route.dispatch(tokens, weights)
    rows, counts, has_tail = dispatch.wait()
    sizes = counts.tolist()
    tail = len(rows) - sum(sizes)
    assert has_tail or not tail
    *groups, rest = torch.split(rows, [*sizes, tail])
    products = [(x @ a).tanh() @ b for x, a, b in zip(groups, up, down, strict=True)]
    y = dispatch.combine(torch.cat([*products, torch.zeros_like(rest)])).wait()
    y.square().sum().backward()  # type: ignore[no-untyped-call]
    found = (y.detach(), *(t.grad for t in (*leaves, up, down)))
    return dict(zip(("y", "tokens", "weights", "up", "down"), found, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_experts_on_other_ranks_compute_the_same_as_on_one_rank(
    worker_pool: WorkerPool, layout: ParallelLayout, way: Way
) -> None:
    ranks = worker_pool.run_mesh(layout, through_ranks, way)
    outputs, inputs, shares, (up, down) = alone(layout.world_size, way.equal)
    sums = [torch.zeros_like(up), torch.zeros_like(down)]
    per = EXPERTS // layout.ep
    for rank, found in enumerate(ranks):
        for wanted, key in ((outputs, "y"), (inputs, "tokens"), (shares, "weights")):
            torch.testing.assert_close(found[key], wanted[rank], rtol=0, atol=1e-12)
        place = layout.expert_coordinates(rank)
        for total, key, dim in zip(sums, ("up", "down"), (2, 1), strict=True):
            part = total[place.ep * per : (place.ep + 1) * per].chunk(layout.expert_tp, dim)
            part[place.tp].add_(found[key])  # replicas on `expert_dp` are summed without scaling
    torch.testing.assert_close(sums[0], up, rtol=0, atol=1e-12)
    torch.testing.assert_close(sums[1], down, rtol=0, atol=1e-12)


def shapes(mesh: Mesh, way: Way) -> tuple[int, int]:
    """Returns the rows of a rank's experts, and the rows that it sends."""
    tokens, experts, weights = drawn(mesh.rank, way.equal)
    with mesh.counting() as traffic:
        dispatcher = build_dispatcher(way.name, mesh, EXPERTS, OPS, rank_capacity_factor=way.factor)
        dispatch = dispatcher.route(experts, way.limits).dispatch(tokens, weights)
        rows = dispatch.wait().rows
    sent = [record.nbytes for record in traffic.records if "dispatched tokens" in record.operation]
    return len(rows), sum(sent) // (HIDDEN * 8)


@pytest.mark.parametrize(
    ("way", "rows", "sent"),
    [
        (Way("allgather"), 2 * 5 * 2, 5),
        (Way("allgather", RowLimits(per_expert=3)), 2 * 3 * 2, 5),
        (Way("allgather", factor=1.2), 12, 5),
        (Way("alltoall", RowLimits(per_expert=3, static=True)), 2 * 6, 2 * 6),
        (Way("alltoall", factor=1.2), 2 * 6, 2 * 6),
        (Way("alltoall", RowLimits(per_expert=100), 100.0), 2 * 5 * 2, 2 * 5 * 2),
    ],
)
def test_bounds_of_rows_depend_on_no_choice(
    worker_pool: WorkerPool, way: Way, rows: int, sent: int
) -> None:
    assert worker_pool.run_mesh(LAYOUTS["ep2"], shapes, way) == [(rows, sent)] * 2


def overflowing(mesh: Mesh, name: str) -> tuple[int, bool]:
    """Routes five tokens to both experts of the first rank, with room for six choices."""
    dispatcher = build_dispatcher(name, mesh, EXPERTS, OPS, rank_capacity_factor=1.2)
    route = dispatcher.route(torch.tensor([[0, 1]] * 5))
    assert route.overflow is not None
    dispatch = route.dispatch(torch.ones(5, 3), torch.ones(5, 2))
    y = dispatch.combine(dispatch.wait().rows).wait()
    assert torch.isnan(y).all() or torch.isfinite(y).all()
    return int(route.overflow), bool(torch.isnan(y).all())


def test_more_rows_than_the_bound_are_counted_and_make_outputs_nan(
    worker_pool: WorkerPool,
) -> None:
    ranks = worker_pool.run_mesh(LAYOUTS["ep2"], overflowing, "alltoall")
    assert ranks == [(4, True), (4, True)]
    ranks = worker_pool.run_mesh(LAYOUTS["ep2"], overflowing, "allgather")
    assert ranks == [(8, True), (0, True)]  # the first rank has 20 choices and room for 12


def sent(mesh: Mesh, name: str) -> list[tuple[str, str, int, int]]:
    with mesh.counting() as traffic:
        through_ranks(mesh, Way(name))
    return [tuple(record) for record in traffic.records]  # type: ignore[misc]


def test_messages_are_counted_row_by_row(worker_pool: WorkerPool) -> None:
    ranks = worker_pool.run_mesh(LAYOUTS["ep2"], sent, "alltoall")
    row = HIDDEN * 8
    own = [CHOICES * (len(drawn(rank, False)[0]) - 1) for rank in range(2)]  # except padding
    here = [
        sum(int((drawn(r, False)[1] // 2 == rank).sum()) for r in range(2)) for rank in range(2)
    ]
    assert here != own and sum(here) == sum(own)
    for rank, records in enumerate(ranks):
        found = {record[:2]: record[2:] for record in records}
        rows = (own[rank] + here[rank]) * row  # forward, and back in the backward pass
        assert found.pop(("ep", "all_to_all of expert counts")) == (1, EXPERTS * 8)
        assert found.pop(("ep", "all_to_all of dispatched tokens")) == (2, rows)
        assert found.pop(("ep", "all_to_all of combined tokens")) == (2, rows)
        assert not found
    ranks = worker_pool.run_mesh(LAYOUTS["ep2"], sent, "allgather")
    for records in ranks:
        found = {record[:2]: record[2:] for record in records}
        longest = 5
        for gather, scatter in (("dispatched", "combined"), ("combined", "dispatched")):
            assert found["expert_tp_ep", f"all_gather of {gather} tokens"] == (1, longest * row)
            whole = found["expert_tp_ep", f"reduce_scatter of {scatter} tokens"]
            assert whole == (1, 2 * longest * row)


EVENTS: list[str] = []
"""What happened on a rank, in order."""


class Work(torch.autograd.Function):
    """A computation that overlaps an all-to-all."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        EVENTS.append("work")
        return x * 2

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        EVENTS.append("work backward")
        return grads[0] * 2


def noted(event: str, function: Callable[..., object]) -> Callable[..., object]:
    def wrapper(*arguments: object) -> object:
        EVENTS.append(event)
        return function(*arguments)

    return wrapper


def overlapping(mesh: Mesh) -> list[str]:
    EVENTS.clear()
    with (
        mock.patch.object(exchange, "_launch", noted("start", exchange._launch)),
        mock.patch.object(exchange._Message, "wait", noted("wait", exchange._Message.wait)),
    ):
        rows = torch.arange(4.0).view(2, 2).requires_grad_()
        moving = start_all_to_all(rows, RowSplits(mesh.axis("ep"), (1, 1), (1, 1), "rows"))
        other = Work.apply(rows)  # type: ignore[no-untyped-call]
        (moving.wait().sum() + other.sum()).backward()
    assert rows.grad is not None and (rows.grad == 3).all()
    return list(EVENTS)


def test_computation_between_start_and_wait_overlaps_the_backward_pass_too(
    worker_pool: WorkerPool,
) -> None:
    expected = ["start", "work", "wait", "start", "work backward", "wait"]
    assert worker_pool.run_mesh(LAYOUTS["ep2"], overlapping) == [expected] * 2


def exchanged(mesh: Mesh) -> tuple[Tensor, Tensor]:
    axis = mesh.axis("ep")
    counts = torch.tensor([[axis.index, 1], [2, 0], [0, 0], [1, axis.index]])
    theirs = exchange_counts(counts, axis)
    send, receive = (tuple(c.sum(1).tolist()) for c in (counts, theirs))
    rows = torch.full((sum(send), 1), float(axis.index), dtype=torch.bfloat16).requires_grad_()
    splits = RowSplits(axis, send, receive, "rows")
    with mesh.counting() as traffic:
        found = start_all_to_all(rows, splits).wait()
    compiles = mock.patch.object(torch.compiler, "is_compiling", lambda: True)
    with mesh.counting() as others, compiles:
        compiled = start_all_to_all(rows, splits).wait()
    assert torch.equal(compiled, found)
    assert others.records == traffic.records != []
    (compiled * (axis.index + 1)).sum().backward()  # type: ignore[no-untyped-call]
    back = [r + 1.0 for r, count in enumerate(send) for _ in range(count)]
    assert rows.grad is not None and rows.grad.flatten().tolist() == back
    return theirs, found.detach()


def test_rows_are_received_in_the_order_of_the_axis(worker_pool: WorkerPool) -> None:
    ranks = worker_pool.run_mesh(LAYOUTS["ep4"], exchanged)
    assert ranks[0][0].tolist() == [[0, 1], [1, 1], [2, 1], [3, 1]]
    for theirs, rows in ranks:
        expected = list(itertools.chain(*([s] * int(c.sum()) for s, c in enumerate(theirs))))
        assert rows.flatten().tolist() == expected


def test_row_splits_are_immutable(single: Mesh) -> None:
    splits = RowSplits(single.axis("ep"), (1,), (1,), "rows")
    with pytest.raises(FrozenInstanceError):
        splits.input_splits = (2, 2)  # type: ignore[misc]


def test_invalid_dispatches_are_refused_in_one_line(single: Mesh) -> None:
    with pytest.raises(LayoutError, match="no dispatcher is called 'flex': there are allgather, "):
        build_dispatcher("flex", single, 4, OPS)
    mesh = Mesh(LAYOUTS["ep4"], 0)
    with pytest.raises(LayoutError, match="6 experts cannot be cut into 4 equal parts over axis"):
        build_dispatcher("alltoall", mesh, 6, OPS)
    with pytest.raises(LayoutError, match=r"rank_capacity_factor 0\.0 leaves no rows"):
        build_dispatcher("alltoall", mesh, 8, OPS, rank_capacity_factor=0.0)
    with pytest.raises(LayoutError, match="3 numbers of rows for the 4 ranks of axis 'ep'"):
        RowSplits(mesh.axis("ep"), (1, 1, 1), (1, 1, 1, 1), "rows")
    with pytest.raises(LayoutError, match="2 rows were given, but input_splits has 4"):
        start_all_to_all(torch.zeros(2, 1), RowSplits(mesh.axis("ep"), (1,) * 4, (1,) * 4, "rows"))
