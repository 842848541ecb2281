"""Combined 1F1B on real ranks: while rows of one micro-batch are in flight, another one computes.

A stage has a few layers whose rows are sent to the next rank of `ep` and back. Every event is
recorded.
"""

import time
from datetime import timedelta
from typing import Any
from unittest import mock

import megatron_parallel.expert_parallel.exchange as exchange
import pytest
import torch
from megatron_parallel import LayoutError, Mesh, ParallelLayout
from megatron_parallel.expert_parallel import RowOps, RowSplits, build_dispatcher, start_all_to_all
from megatron_parallel.pipeline import PassInterleaver, PipelineEngine, TensorSpec, planned_actions
from megatron_parallel.testing import Rank, WorkerPool
from torch import Tensor, nn

LAYERS, COUNT = 2, 4
EP2 = ParallelLayout(ep=2).resolve(2)
LAYOUTS = {
    "ep2": EP2,
    "pp2 ep2": ParallelLayout(pp=2, ep=2).resolve(4),
    "pp2 vpp2 ep2": ParallelLayout(pp=2, vpp=2, ep=2).resolve(4),
}
Event = tuple[str, str, int]
"""What happened, the kind of pass, and the micro-batch."""


class Compute(torch.autograd.Function):
    """A computation that records that it runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[Event], number: int) -> Tensor:
        ctx.events, ctx.number = events, number
        events.append(("compute", "F", number))
        return x * 0.5

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.events.append(("compute", "B", ctx.number))
        return grads[0] * 0.5, None, None


class Chunk(nn.Module):
    """Layers that each compute, send rows, compute on the other rank, and send them back."""

    def __init__(self, mesh: Mesh, events: list[Event], trouble: Any = None) -> None:
        super().__init__()
        self.axis, self.events, self.trouble = mesh.axis("ep"), events, trouble
        self.layers = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(LAYERS))
        for i, p in enumerate(self.parameters()):
            nn.init.normal_(p, std=0.5, generator=torch.Generator().manual_seed(i))

    def forward(self, x: Tensor, *, number: int, interleaver: PassInterleaver | None) -> Tensor:
        for layer in self.layers:
            if self.trouble is not None:
                x = self.trouble(x, number)
            y = Compute.apply(x, self.events, number)  # type: ignore[no-untyped-call]
            y = self.sent(self.sent(y, number, interleaver).tanh(), number, interleaver)
            x = x + layer(y)
        return x

    def sent(self, x: Tensor, number: int, interleaver: PassInterleaver | None) -> Tensor:
        half = len(x) // 2
        splits = RowSplits(self.axis, (half, half), (half, half), f"rows {number}")
        return start_all_to_all(x, splits, interleaver).wait()


def built(mesh: Mesh, events: list[Event], schedule: str, trouble: Any = None) -> PipelineEngine:
    engine = PipelineEngine(
        mesh,
        [Chunk(mesh, events, trouble) for _ in range(mesh.layout.vpp)],
        lambda output, batch: {"loss": (output**2).sum()},
        inputs=lambda batch, stage: {
            "number": batch["number"],
            "interleaver": engine.interleaver,
            **({"x": batch["x"]} if stage == 0 else {}),
        },
        stage_output_spec=lambda batch, stage: TensorSpec((4, 3), torch.float64),
        schedule=schedule,
    )
    return engine


def batches(mesh: Mesh) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(mesh.axis("ep").index)
    return [
        {
            "number": i,
            "x": torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True),
        }
        for i in range(COUNT)
    ]


def train(mesh: Mesh, schedule: str) -> tuple[list[Event], list[Any], list[Tensor]]:
    """Returns events, trace, and loss with gradients of one step."""
    events: list[Event] = []

    def note(what: str, true: Any, route_of: Any) -> Any:
        def noted(*arguments: Any) -> Any:
            kind = "F" if torch._C._current_graph_task_id() < 0 else "B"
            events.append((what, kind, int(route_of(arguments).purpose.split()[-1])))
            return true(*arguments)

        return noted

    launch, wait = exchange._launch, exchange._Message.wait
    with (
        mock.patch.object(exchange, "_launch", note("start", launch, lambda a: a[1])),
        mock.patch.object(exchange._Message, "wait", note("wait", wait, lambda a: a[0].splits)),
    ):
        engine = built(mesh, events, schedule)
        sums = engine.run(batches(mesh), {"loss": 8.0})
    gradients = [p.grad for chunk in engine.chunks for p in chunk.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return events, engine.trace, [sums["loss"], *gradients]  # type: ignore[list-item]


PLAIN = {"ep2": "1f1b", "pp2 ep2": "1f1b", "pp2 vpp2 ep2": "interleaved-1f1b"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_another_micro_batch_computes_while_rows_are_in_flight(
    worker_pool: WorkerPool, name: str
) -> None:
    layout = LAYOUTS[name]
    ranks = worker_pool.run_mesh(layout, train, "combined-1f1b")
    plain = worker_pool.run_mesh(layout, train, PLAIN[name])
    for rank, (events, trace, numbers) in enumerate(ranks):
        stage = layout.coordinates(rank).pp
        assert trace == planned_actions("combined-1f1b", layout.pp, stage, COUNT, layout.vpp)
        assert all(map(torch.equal, numbers, plain[rank][2]))
        hidden, all_of_them = used(events)
        assert used(plain[rank][0])[0] == 0
        pairs = COUNT * layout.vpp - 2 * (layout.pp - 1 - stage) - (layout.vpp - 1) * layout.pp - 1
        # A pair has 2 * LAYERS messages of each pass; only the last may not be hidden.
        assert all_of_them == 2 * 2 * LAYERS * COUNT * layout.vpp
        assert hidden >= pairs * (4 * LAYERS - 1) > 0
    # Ranks of one stage start and wait for the same messages in the same order.
    by_stage: dict[int, set[tuple[Event, ...]]] = {}
    for rank, (events, _, _) in enumerate(ranks):
        messages = tuple(event for event in events if event[0] != "compute")
        by_stage.setdefault(layout.coordinates(rank).pp, set()).add(messages)
    assert all(len(orders) == 1 for orders in by_stage.values())


def used(events: list[Event]) -> tuple[int, int]:
    """Returns the number of messages that another micro-batch hid, and of all messages."""
    hidden = count = 0
    for place, (what, kind, number) in enumerate(events):
        if what != "start":
            continue
        rest = events[place + 1 :]
        meanwhile = rest[: rest.index(("wait", kind, number))]
        hidden += any((other, n) != (kind, number) for _, other, n in meanwhile)
        count += 1
    return hidden, count


def test_an_evaluation_overlaps_nothing(worker_pool: WorkerPool) -> None:
    def evaluated(mesh: Mesh) -> tuple[float, float]:
        engine = built(mesh, [], "combined-1f1b")
        before = engine.evaluate(batches(mesh)[:3])["loss"]
        engine.run(batches(mesh), {"loss": 1.0})
        return float(before), float(engine.evaluate(batches(mesh)[:3])["loss"])

    for name in ("ep2", "pp2 ep2"):
        for before, after in worker_pool.run_mesh(LAYOUTS[name], evaluated):
            assert before == after


class Trouble(torch.autograd.Function):
    """Calls a function in one pass of micro-batch 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int, kind: str, act: Any) -> Tensor:
        ctx.number, ctx.kind, ctx.act = number, kind, act
        if (kind, number) == ("F", 1):
            act()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        if (ctx.kind, ctx.number) == ("B", 1):
            ctx.act()
        return grads[0], None, None, None


def fail(rank: Rank, kind: str, how: str) -> tuple[str, float]:
    """Returns this rank's error when rank 1 fails in the middle of a pair."""

    def act() -> None:
        if how == "raises":
            raise ValueError("rank 1 has had enough")
        time.sleep(7)  # beyond the time-out, and beyond the other rank's wait for reports

    def trouble(x: Tensor, number: int) -> Tensor:
        if rank.rank != 1:
            return x
        troubled: Tensor = Trouble.apply(x, number, kind, act)  # type: ignore[no-untyped-call]
        return troubled

    Mesh.bind(EP2, timeout=timedelta(seconds=60)).close()
    mesh = Mesh.bind(EP2, timeout=timedelta(seconds=2))
    try:
        engine = built(mesh, [], "combined-1f1b", trouble)
        engine.run(batches(mesh), {"loss": 1.0})
    except (ValueError, RuntimeError) as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = "nothing happened"
    return said


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("B", "raises"),
        pytest.param("F", "raises", marks=pytest.mark.slow),
        pytest.param("F", "freezes", marks=pytest.mark.slow),
        pytest.param("B", "freezes", marks=pytest.mark.slow),
    ],
)
def test_trouble_in_either_pass_of_a_pair_ends_all_ranks_with_one_line(
    worker_pool: WorkerPool, kind: str, how: str
) -> None:
    other, own = worker_pool.run(fail, kind, how, ranks=2, timeout=90)
    assert "CollectiveError: rank 1 did not join all_to_all of rows" in other
    assert "\n" not in other + own
    if how == "raises":
        assert own == "ValueError: rank 1 has had enough"


def test_a_dispatcher_that_waits_where_it_sends_overlaps_nothing(single: Mesh) -> None:
    unused: Any = None
    ops = RowOps(lambda experts, count: (experts, experts), unused, unused)
    dispatcher = build_dispatcher("allgather", single, 4, ops)
    tokens, experts = torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(
        LayoutError, match=r"'allgather' communicates synchronously.*use 'alltoall'"
    ):
        dispatcher.route(experts).dispatch(tokens, torch.ones(2, 1), PassInterleaver())
