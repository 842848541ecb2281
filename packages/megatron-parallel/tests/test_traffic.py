"""Calls and bytes of communication equal formulas written by hand, in both passes.

`s` sequence, `b` micro-batch, `h` hidden, `n` ranks of the axis, 8 bytes per element (float64).
"""

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from megatron_parallel import (
    ColumnParallelLinear,
    DataParallelConfig,
    GradientBuffers,
    Mesh,
    ParallelLayout,
    RowParallelLinear,
    Sharding,
    VocabParallelEmbedding,
    all_gather,
    all_reduce,
    broadcast,
    collect_shardings,
    initialize_parameters,
    reduce_scatter,
    vocab_parallel_cross_entropy,
)
from megatron_parallel.collectives import gather_from_axis, receive, scatter_to_axis, send
from megatron_parallel.pipeline import (
    BackwardPass,
    PipelineEngine,
    TensorSpec,
    chunk_layers,
    copy_tied_parameter,
    split_layers,
    sum_tied_gradient,
)
from megatron_parallel.testing import WorkerPool
from torch import Tensor, nn

S, B, H, F, V = 12, 3, 8, 24, 36
F64 = 8
Records = list[tuple[str, str, int, int]]


def aligned(numel: int, step: int = 64) -> int:
    return -(-numel // step) * step


def counted(mesh: Mesh, act: Callable[[Mesh], object]) -> Records:
    with mesh.counting() as traffic:
        act(mesh)
    return [tuple(record) for record in traffic.records]


# -- single calls ------------------------------------------------------------------------------


def test_bytes_are_those_of_the_payload(worker_pool: WorkerPool) -> None:
    def act(mesh: Mesh) -> None:
        tp, x = mesh.axis("tp"), torch.ones(4, 6)
        all_reduce(x, tp)
        all_reduce(x[:2].clone(), tp, "max", purpose="largest")
        all_gather(x, tp)
        reduce_scatter(x, tp)
        broadcast(x, tp, source=1)
        if tp.index == 0:
            send(x, tp, 1)
        elif tp.index == 1:
            receive(x, tp, 0, purpose="news")

    for index, records in enumerate(worker_pool.run_mesh(ParallelLayout(tp=4, dp=1), counted, act)):
        assert records[:5] == [
            ("tp", "all_reduce", 1, 96),
            ("tp", "all_reduce of largest", 1, 48),
            ("tp", "all_gather", 1, 96),
            ("tp", "reduce_scatter", 1, 96),
            ("tp", "broadcast", 1, 96),
        ]
        rest = [("tp", "send", 1, 96)], [("tp", "receive of news", 1, 96)], [], []
        assert records[5:] == rest[index]


def test_counting_begins_and_ends_with_the_block_and_may_be_nested(
    worker_pool: WorkerPool,
) -> None:
    def act(mesh: Mesh) -> list[Any]:
        tp, x = mesh.axis("tp"), torch.ones(4)
        all_reduce(x, tp)
        with mesh.counting() as outer:
            all_reduce(x, tp)
            with pytest.raises(KeyError), mesh.counting() as inner:
                all_reduce(x, tp)
                raise KeyError
            all_reduce(x, mesh.axis("world"))
        all_reduce(x, tp)
        assert not tp.ledger.open
        return [inner.records, outer.records, outer.of("tp", "all_reduce"), outer.of("pp", "send")]

    for inner, outer, of_tp, none in worker_pool.run_mesh(ParallelLayout(tp=2, dp=1), act):
        assert inner == [("tp", "all_reduce", 1, 16)]
        assert outer == [("tp", "all_reduce", 2, 32), ("world", "all_reduce", 1, 16)]
        assert (of_tp.calls, of_tp.nbytes) == (2, 32)
        assert none == ("pp", "send", 0, 0)


def test_one_rank_communicates_nothing(single: Mesh) -> None:
    def act(mesh: Mesh) -> None:
        pair(mesh, True)
        all_gather(torch.ones(1), mesh.axis("world"))

    assert counted(single, act) == []


def test_traffic_prints_as_a_table(worker_pool: WorkerPool) -> None:
    def act(mesh: Mesh) -> str:
        with mesh.counting() as traffic:
            for _ in range(3):
                all_reduce(torch.ones(500), mesh.axis("tp"))
        return str(traffic)

    assert worker_pool.run_mesh(ParallelLayout(tp=2, dp=1), act)[0] == (
        "axis  operation   calls  bytes\ntp    all_reduce      3  6,000"
    )


# -- tensor parallelism ------------------------------------------------------------------------


def pair(mesh: Mesh, sequence_parallel: bool) -> None:
    """Runs both passes of a column- and a row-parallel layer, then reduces its buffers."""
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "dtype": torch.float64}
    layers = nn.Sequential(
        ColumnParallelLinear(H, F, mesh, **options), RowParallelLinear(F, H, mesh, **options)
    )
    initialize_parameters(layers, seed=0, mesh=mesh)
    buffers = GradientBuffers(layers.named_parameters(), collect_shardings(layers), mesh)
    part = S // mesh.axis("tp").size if sequence_parallel else S
    x = torch.ones(part, B, H, dtype=torch.float64, requires_grad=True)
    layers(x).sum().backward()
    buffers.finish()


@pytest.mark.parametrize("n", [2, 4])
def test_a_column_and_a_row_parallel_layer(worker_pool: WorkerPool, n: int) -> None:
    layout = ParallelLayout(tp=n, dp=1)
    whole = S * B * H * F64
    for records in worker_pool.run_mesh(layout, counted, lambda mesh: pair(mesh, False)):
        assert records == [("tp", "all_reduce", 2, 2 * whole)]  # one forward, one backward
    for records in worker_pool.run_mesh(layout, counted, lambda mesh: pair(mesh, True)):
        assert sorted(records) == [
            ("tp", "all_gather", 3, 3 * whole // n),  # the input twice: only a part is saved
            ("tp", "all_reduce of gradients", 1, aligned(H) * F64),  # the row-parallel bias
            ("tp", "reduce_scatter", 2, 2 * whole),
        ]


def embedding_and_loss(mesh: Mesh, sequence_parallel: bool) -> None:
    tp = mesh.axis("tp")
    embedding = VocabParallelEmbedding(
        V, H, mesh, sequence_parallel=sequence_parallel, dtype=torch.float64
    )
    initialize_parameters(embedding, seed=0, mesh=mesh)
    embedding(torch.zeros(S, B, dtype=torch.int64)).sum().backward()
    logits = torch.zeros(S, B, V // tp.size, dtype=torch.float64, requires_grad=True)
    targets = torch.ones(S, B, dtype=torch.int64)
    vocab_parallel_cross_entropy(logits, targets, tp, V).sum().backward()


@pytest.mark.parametrize("n", [2, 4])
def test_vocab_parallel_embedding_and_cross_entropy(worker_pool: WorkerPool, n: int) -> None:
    layout = ParallelLayout(tp=n, dp=1)
    whole = S * B * H * F64
    losses = ("tp", "all_reduce of token losses", 2, 3 * S * B * F64)
    for records in worker_pool.run_mesh(
        layout, counted, lambda mesh: embedding_and_loss(mesh, False)
    ):
        assert records == [("tp", "all_reduce", 1, whole), losses]
    for records in worker_pool.run_mesh(
        layout, counted, lambda mesh: embedding_and_loss(mesh, True)
    ):
        assert records == [
            ("tp", "reduce_scatter", 1, whole),
            ("tp", "all_gather", 1, whole // n),
            losses,
        ]


def test_gather_and_scatter_of_an_axis(worker_pool: WorkerPool) -> None:
    def act(mesh: Mesh) -> None:
        tp = mesh.axis("tp")
        x = torch.ones(2, 6, dtype=torch.float64, requires_grad=True)
        gather_from_axis(x, tp).sum().backward()  # backward: a rank keeps its part
        scatter_to_axis(x, tp).sum().backward()  # backward: parts are gathered

    for records in worker_pool.run_mesh(ParallelLayout(tp=2, dp=1), counted, act):
        assert records == [("tp", "all_gather", 2, 2 * 6 * F64 + 2 * 3 * F64)]


def test_compiled_functions_are_counted_too(worker_pool: WorkerPool) -> None:
    def act(mesh: Mesh) -> list[Records]:
        tp = mesh.axis("tp")

        def function(x: Tensor) -> Tensor:
            return all_reduce.__wrapped__(x * 2, tp) + 1

        compiled = torch.compile(function, backend="eager")
        assert compiled(torch.ones(3)).tolist() == [5.0] * 3
        records = counted(mesh, lambda _: compiled(torch.ones(3)))
        assert compiled(torch.ones(3)).tolist() == [5.0] * 3
        return [records, counted(mesh, lambda _: compiled(torch.ones(3)))]

    for records in worker_pool.run_mesh(ParallelLayout(tp=2, dp=1), act):
        assert records == [[("tp", "all_reduce", 1, 12)]] * 2


# -- data parallelism --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [2, 4])
def test_data_parallel_buckets(worker_pool: WorkerPool, n: int, dtype: torch.dtype) -> None:
    """Once a step for any number of micro-batches; bf16 gradients are sent as float32."""

    def act(mesh: Mesh) -> None:
        weights = {name: nn.Parameter(torch.ones(100, dtype=dtype)) for name in "abcde"}
        table = dict.fromkeys(weights, Sharding((100,)))
        buffers = GradientBuffers(weights, table, mesh, DataParallelConfig(ddp_bucket_size=250))
        for number in range(3):
            buffers.begin(last=number == 2)
            sum(weights.values()).sum().backward()
        buffers.finish()

    # Two parameters of 100, aligned to 64, fill a bucket, which is cut into n equal shards.
    full, rest = aligned(128 + 100, 64 * n), aligned(100, 64 * n)
    width = 8 if dtype is torch.float64 else 4
    for records in worker_pool.run_mesh(ParallelLayout(dp=n), counted, act):
        assert records == [("dp", "all_reduce of gradients", 3, (2 * full + rest) * width)]


def test_partial_and_tied_gradients_are_summed_over_their_axes_too(worker_pool: WorkerPool) -> None:
    def act(mesh: Mesh) -> None:
        weights = {name: nn.Parameter(torch.ones(100, dtype=torch.float64)) for name in "tnm"}
        norm = Sharding((100,), partial="tp")
        table = {"t": Sharding((100,), tied="embedding"), "n": norm, "m": norm}
        buffers = GradientBuffers(weights, table, mesh)
        sum(weights.values()).sum().backward()
        buffers.finish()

    tied, norms = aligned(100) * F64, aligned(228) * F64
    for records in worker_pool.run_mesh(ParallelLayout(tp=2, pp=2, dp=1), counted, act):
        assert sorted(records) == [
            ("embedding", "all_reduce of gradients", 1, tied),
            ("tp", "all_reduce of gradients", 1, norms),
        ]


# -- pipeline ----------------------------------------------------------------------------------


class Layers(nn.Module):
    """Linear layers of a stage."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(H, H).double() for i in layers})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def pipeline(mesh: Mesh, schedule: str, m: int, train: bool) -> Records:
    pp, vpp = mesh.axis("pp"), mesh.layout.vpp
    split = split_layers(pp.size * vpp, pp.size, vpp)
    chunks = [Layers(layers) for layers in chunk_layers(split, pp.size, pp.index)]
    engine = PipelineEngine(
        mesh,
        chunks,
        lambda output, batch: {"loss": output.sum(), "square": output.square().sum()},
        inputs=lambda batch, stage: {"x": batch} if stage == 0 else {},
        stage_output_spec=lambda batch, stage: TensorSpec((S, B, H), torch.float64),
        sums=("loss", "square"),
        schedule=schedule,
    )
    batches = [torch.ones(S, B, H, dtype=torch.float64)] * m
    with mesh.counting() as traffic:
        if train:
            engine.run(batches, {"loss": 1.0})
        else:
            engine.evaluate(batches)
    return [tuple(record) for record in traffic.records]


@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    ("schedule", "p", "vpp", "m"),
    [("1f1b", 2, 1, 5), ("1f1b", 4, 1, 3), ("gpipe", 2, 1, 3), ("interleaved-1f1b", 2, 2, 4)],
)
def test_pipeline(
    worker_pool: WorkerPool, schedule: str, p: int, vpp: int, m: int, train: bool
) -> None:
    layout = ParallelLayout(pp=p, vpp=vpp, dp=1)
    ranks = worker_pool.run_mesh(layout, pipeline, schedule, m, train)
    activation = S * B * H * F64
    for rank, records in enumerate(ranks):
        stages = [chunk * p + rank for chunk in range(vpp)]
        after = m * sum(
            stage < p * vpp - 1 for stage in stages
        )  # messages over later stage boundaries
        before = m * sum(stage > 0 for stage in stages)
        expected = [
            ("pp", "send of activations", after),
            ("pp", "receive of activations", before),
            ("pp", "send of gradient", before if train else 0),
            ("pp", "receive of gradient", after if train else 0),
        ]
        assert sorted(records) == sorted(
            [
                ("pp", "all_gather of step digest", 1, 8),
                ("pp", "broadcast of loss sums", 1, 2 * 8),
                *((*key, calls, calls * activation) for *key, calls in expected if calls),
            ]
        )


def test_buffers_under_a_pipeline_sum_once_a_step(worker_pool: WorkerPool) -> None:
    def step(mesh: Mesh) -> Records:
        chunk = Layers(range(1))

        @contextmanager
        def around(backward: BackwardPass) -> Iterator[None]:
            buffers.begin(last=backward.last)
            yield

        engine = PipelineEngine(
            mesh,
            chunk,
            lambda output, batch: {"loss": output.sum()},
            inputs=lambda batch, stage: {"x": batch} if stage == 0 else {},
            stage_output_spec=lambda batch, stage: TensorSpec((S, B, H), torch.float64),
            around_backward=around,
        )
        table = {name: Sharding(tuple(p.shape)) for name, p in chunk.named_parameters()}
        buffers = GradientBuffers(chunk.named_parameters(), table, mesh)
        with mesh.counting() as traffic:
            engine.run([torch.ones(S, B, H, dtype=torch.float64)] * 4, {"loss": 1.0})
            buffers.finish()
        return [tuple(traffic.of("dp", "all_reduce of gradients"))]

    for records in worker_pool.run_mesh(ParallelLayout(pp=2, dp=2), step):
        assert records == [("dp", "all_reduce of gradients", 1, aligned(64 + 8, 128) * F64)]


def test_tied_weights_without_buffers(worker_pool: WorkerPool) -> None:
    def act(mesh: Mesh) -> None:
        weight = nn.Parameter(torch.ones(10))
        copy_tied_parameter(weight, mesh)
        sum_tied_gradient(weight, mesh)

    for rank, records in enumerate(
        worker_pool.run_mesh(ParallelLayout(pp=3, dp=1), counted, act, ranks=3)
    ):
        ends = [
            ("embedding", "broadcast of tied parameter", 1, 40),
            ("embedding", "all_reduce of tied gradient", 1, 40),
        ]
        assert records == ([] if rank == 1 else ends)


# -- planted defects ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("defect", "calls"),
    [
        ("megatron_parallel.collectives.operations._sum", 3),
        ("megatron_parallel.mesh.axes.Axis.count", 4),
    ],
)
def test_a_planted_defect_changes_the_traffic(
    worker_pool: WorkerPool, defect: str, calls: int
) -> None:
    """An extra forward sum, or messages counted twice, contradict the formula."""

    def broken(mesh: Mesh) -> Records:
        with pytest.MonkeyPatch.context() as patch:
            owner, _, name = defect.rpartition(".")
            function = getattr(pkgutil.resolve_name(owner), name)

            def twice(*arguments: Any) -> Any:
                function(*arguments)
                return function(*arguments)

            patch.setattr(defect, twice)
            return counted(mesh, lambda mesh: pair(mesh, False))

    for records in worker_pool.run_mesh(ParallelLayout(tp=2, dp=1), broken):
        assert records == [("tp", "all_reduce", calls, calls * S * B * H * F64)]
