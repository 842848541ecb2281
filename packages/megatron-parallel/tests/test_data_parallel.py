"""Gradients of several data-parallel ranks equal one rank's, in float64 and with unequal masks.

The batch is cut unevenly in every respect that can matter: samples have different numbers of true
tokens, one rank has a whole micro-batch without any, and one parameter is used by one rank only.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron_parallel import (
    DataParallelConfig,
    GradientBuffers,
    Mesh,
    ParallelLayout,
    Sharding,
)
from megatron_parallel.data_parallel.bucket import Bucket
from megatron_parallel.testing import WorkerPool
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

SAMPLES, LENGTH, VOCABULARY, HIDDEN = 16, 6, 13, 10
SIZES = (1, 150, 10**6)  # elements of a bucket: one for each parameter, several, one for all


class Model(nn.Module):
    """Embedding, a block, output tied to the embedding; `seldom` has a gradient in few batches."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.up = nn.Linear(HIDDEN, 17)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.down = nn.Linear(17, HIDDEN)
        self.seldom = nn.Parameter(torch.ones(HIDDEN))
        self.norm = nn.LayerNorm(HIDDEN)
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            if parameter.requires_grad:
                draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.data = draw
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.down(functional.gelu(self.up(x)))
        special = (tokens == 0).any(dim=1)
        if special.any():
            x = torch.where(special[:, None, None], x * self.seldom, x)
        logits = functional.linear(self.norm(x), self.embedding.weight)
        losses = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        return losses.view(len(tokens), -1)


def global_batch() -> tuple[Tensor, Tensor]:
    """Returns tokens `[b, s]` and loss mask `[b, s - 1]`; rows 12 to 15 are fully masked."""
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(1, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    tokens[1, 2] = tokens[2, 0] = 0
    lengths = torch.arange(SAMPLES) * 7 % LENGTH
    mask = torch.arange(LENGTH - 1) < lengths[:, None]
    mask[12:] = False
    return tokens, mask.double()


def table(model: nn.Module, **special: Sharding) -> dict[str, Sharding]:
    return {name: Sharding(tuple(p.shape)) for name, p in model.named_parameters()} | special


def train_step(
    mesh: Mesh,
    size: int,
    micro_batches: int,
    dtype: torch.dtype = torch.float64,
    signal: str = "begin",
    local_denominator: bool = False,
    steps: int = 1,
) -> dict[str, Tensor]:
    """Returns this rank's gradients of its contiguous slice of the batch."""
    model = Model(dtype)
    buffers = GradientBuffers(
        model.named_parameters(),
        table(model),
        mesh,
        config=DataParallelConfig(ddp_bucket_size=size),
    )
    tokens, mask = global_batch()
    axis = mesh.axis("dp")
    mine = slice(axis.index * SAMPLES // axis.size, (axis.index + 1) * SAMPLES // axis.size)
    total = mask[mine].sum().clamp(min=1) * axis.size if local_denominator else mask.sum()
    chunks = tokens[mine].chunk(micro_batches), mask[mine].chunk(micro_batches)
    parts = list(zip(*chunks, strict=True))
    for step in range(steps):
        for number, (some, kept) in enumerate(parts):
            if signal == "begin":
                buffers.begin(last=number + 1 == len(parts))
            ((model(some) * kept).sum() / total).backward()
        if signal == "complete":
            buffers.start_reductions()
        buffers.finish()
        gradients = {name: g.clone() for name, g in buffers.gradients().items()}
        if step + 1 < steps:
            buffers.zero()
    return gradients


def difference(gradients: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Returns the largest relative difference of any gradient, as the project defines it."""
    assert list(gradients) == list(truth)
    everything = torch.cat([g.flatten() for g in truth.values()])
    floor = 1e-3 * everything.square().mean().sqrt()
    return max(
        ((gradients[name] - g).abs().max() / torch.maximum(g.abs().max(), floor)).item()
        for name, g in truth.items()
    )


def plain_gradients(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    model = Model(dtype)
    tokens, mask = global_batch()
    ((model(tokens) * mask).sum() / mask.sum()).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (2, 4), (4, 1), (4, 2)])
def test_ranks_together_have_the_gradient_of_one_rank(
    worker_pool: WorkerPool, ranks: int, micro_batches: int, size: int
) -> None:
    layout = ParallelLayout(dp=ranks)
    truth = plain_gradients()
    results = worker_pool.run_mesh(layout, train_step, size, micro_batches)
    assert difference(results[0], truth) < 1e-12
    for other in results[1:]:
        assert all(torch.equal(other[name], g) for name, g in results[0].items())


@pytest.mark.parametrize("signal", ["complete", "none"])
def test_every_way_of_signalling_gives_the_same(worker_pool: WorkerPool, signal: str) -> None:
    arguments = (150, 2, torch.float64, signal)
    results = worker_pool.run_mesh(ParallelLayout(dp=2), train_step, *arguments)
    assert difference(results[1], plain_gradients()) < 1e-12


def test_the_next_step_starts_without_gradients(worker_pool: WorkerPool) -> None:
    def two(mesh: Mesh) -> float:
        return difference(train_step(mesh, 150, 2, steps=3), train_step(mesh, 150, 2, steps=1))

    assert worker_pool.run_mesh(ParallelLayout(dp=2), two) == [0.0, 0.0]


@pytest.mark.parametrize("tp", [1, 2])
def test_tensor_and_context_ranks_are_distinguished(worker_pool: WorkerPool, tp: int) -> None:
    """Gradients are summed over data and context ranks, not over tensor ranks."""

    def ranks_in_sum(mesh: Mesh) -> float:
        weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        buffers = GradientBuffers({"w": weight}, {"w": Sharding((3,))}, mesh)
        buffers.begin(last=True)
        (weight * 10.0**mesh.rank).sum().backward()
        buffers.finish()
        return buffers.gradients()["w"][0].item()

    layout = ParallelLayout(tp=tp, cp=2, dp=2 // tp)
    results = worker_pool.run_mesh(layout, ranks_in_sum)
    assert results == ([1111.0] * 4 if tp == 1 else [101.0, 1010.0, 101.0, 1010.0])


# -- planted defects ---------------------------------------------------------------------------


def averaged(stack: ExitStack) -> None:
    wait = Bucket.wait

    def divide(bucket: Bucket) -> None:
        wait(bucket)
        bucket.flat /= bucket.axes.inner.size

    stack.enter_context(patch.object(Bucket, "wait", divide))


def bucket_skipped(stack: ExitStack) -> None:
    launch = Bucket.launch

    def skip(bucket: Bucket, own_largest: torch.Tensor | None) -> None:
        if not bucket.label.startswith("2 "):
            launch(bucket, own_largest)

    stack.enter_context(patch.object(Bucket, "launch", skip))


def last_micro_batch_left_out(stack: ExitStack) -> None:
    begin = GradientBuffers.begin

    def too_early(buffers: GradientBuffers, *, last: bool = False) -> None:
        if last:
            buffers.start_reductions()
            for bucket in buffers.buckets:
                bucket.wait()
        else:
            begin(buffers)

    stack.enter_context(patch.object(GradientBuffers, "begin", too_early))
    stack.enter_context(patch.object(GradientBuffers, "_arrived", lambda *_: None))


def stale_gradient_kept(stack: ExitStack) -> None:
    stack.enter_context(patch.object(Bucket, "_fill_if_empty", lambda *_: None))
    stack.enter_context(patch("megatron_parallel.data_parallel.bucket.torch.zeros", torch.ones))


@pytest.mark.parametrize(
    "defect", [averaged, bucket_skipped, last_micro_batch_left_out, stale_gradient_kept]
)
def test_a_planted_defect_shows(
    worker_pool: WorkerPool, defect: Callable[[ExitStack], None]
) -> None:
    def broken(mesh: Mesh) -> dict[str, Tensor]:
        with ExitStack() as stack:
            defect(stack)
            return train_step(mesh, 150, 2)

    results = worker_pool.run_mesh(ParallelLayout(dp=2), broken)
    assert max(difference(result, plain_gradients()) for result in results) > 1e-3


def test_an_average_of_averages_shows(worker_pool: WorkerPool) -> None:
    arguments = (150, 2, torch.float64, "begin", True)
    results = worker_pool.run_mesh(ParallelLayout(dp=2), train_step, *arguments)
    assert difference(results[0], plain_gradients()) > 1e-3


# -- tied weights ------------------------------------------------------------------------------


def tied_step(mesh: Mesh) -> tuple[Tensor, Tensor, list[str]]:
    """Uses a weight that first and last stage use in different ways, and one of one stage."""
    stage, sample = mesh.axis("pp").index, mesh.axis("dp").index
    tied = nn.Parameter(torch.arange(1.0, 6.0, dtype=torch.float64))
    own = nn.Parameter(torch.ones(2, dtype=torch.float64))
    shardings = {"embedding": Sharding((5,), tied="embedding"), "own": Sharding((2,))}
    buffers = GradientBuffers({"embedding": tied, "own": own}, shardings, mesh)
    for number in range(2):
        buffers.begin(last=number == 1)
        used = tied**2 if stage == 0 else tied.exp() if stage == mesh.layout.pp - 1 else 0 * own
        (used.sum() * (1 + sample + number) + own.sum() * 10.0**mesh.rank).backward()
    buffers.finish()
    gradients = buffers.gradients()
    return gradients["embedding"], gradients["own"], [r.axis for r in buffers.reductions()]


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (2, 2), (3, 1)])
def test_a_tied_weight_is_summed_over_both_stages(
    worker_pool: WorkerPool, pp: int, dp: int
) -> None:
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    factor = sum(1 + sample + number for sample in range(dp) for number in range(2))
    truth = factor * (2 * weights + weights.exp())
    results = worker_pool.run_mesh(ParallelLayout(pp=pp, dp=dp), tied_step)
    for rank, (tied, own, axes) in enumerate(results):
        stage = rank // dp
        peers = range(stage * dp, stage * dp + dp)
        torch.testing.assert_close(
            own, torch.full((2,), sum(2 * 10.0**r for r in peers), dtype=torch.float64)
        )
        sums = ["dp"] * 2 if dp > 1 else []
        if stage in (0, pp - 1):
            torch.testing.assert_close(tied, truth, rtol=1e-14, atol=0)
            assert axes == [*sums, "embedding"]
        else:
            assert axes == sums
    assert torch.equal(results[0][0], results[-1][0])


def shared_step(mesh: Mesh) -> dict[str, Tensor]:
    """Uses three weights: of the stages 0 and 1, of 0, 2 and 3, and of 2 and 3."""
    stage, sample = mesh.axis("pp").index, mesh.axis("dp").index
    holders = {"low": (0, 1), "ends": (0, 2, 3), "high": (2, 3)}
    axes = {name: mesh.add_stage_group(stages) for name, stages in holders.items()}
    assert mesh.add_stage_group((1,)) is None
    assert mesh.add_stage_group((1, 0)) == axes["low"]  # creates nothing
    own = {
        name: nn.Parameter(torch.arange(1.0, 4.0, dtype=torch.float64))
        for name, stages in holders.items()
        if stage in stages
    }
    table = {name: Sharding((3,), tied=axes[name]) for name in own}
    buffers = GradientBuffers(own, table, mesh)
    buffers.begin(last=True)
    sum((weight ** (stage + 1)).sum() * (1 + sample) for weight in own.values()).backward()
    buffers.finish()
    assert {name: sharding.replica(mesh) // 2 for name, sharding in table.items()} == {
        name: holders[name].index(stage) for name in own
    }
    return buffers.gradients()


def test_any_stages_can_share_weights(worker_pool: WorkerPool) -> None:
    x = torch.arange(1.0, 4.0, dtype=torch.float64)
    powers = [(stage + 1) * x**stage * 3 for stage in range(4)]  # samples with factors 1 and 2
    truth = {"low": (0, 1), "ends": (0, 2, 3), "high": (2, 3)}
    for rank, gradients in enumerate(worker_pool.run_mesh(ParallelLayout(pp=4, dp=2), shared_step)):
        assert gradients.keys() == {name for name, own in truth.items() if rank // 2 in own}
        for name, gradient in gradients.items():
            assert torch.equal(gradient, sum(powers[stage] for stage in truth[name]))


def test_a_tied_weight_summed_twice_shows(worker_pool: WorkerPool) -> None:
    def twice(mesh: Mesh) -> Tensor:
        with patch.object(Bucket, "reduce_extra_axes", _twice(Bucket.reduce_extra_axes)):
            return tied_step(mesh)[0]

    right = worker_pool.run_mesh(ParallelLayout(pp=2, dp=1), tied_step)[0][0]
    wrong = worker_pool.run_mesh(ParallelLayout(pp=2, dp=1), twice)[0]
    assert torch.equal(wrong, 2 * right)


def _twice(function: Callable[[Any], None]) -> Callable[[Any], None]:
    def call(argument: Any) -> None:
        function(argument)
        function(argument)

    return call


def test_copies_of_a_tied_weight_are_numbered_over_both_stages() -> None:
    """The norm counts, and a checkpoint writes, copy 0 alone."""
    layout = ParallelLayout(tp=2, dp=2, pp=3)
    cut, whole = Sharding((8, 2), "tp", 0, tied="embedding"), Sharding((8,), tied="embedding")
    plain = Sharding((8, 2), "tp", 0)
    copies = [cut.replica(Mesh(layout, rank)) for rank in range(12)]
    assert [copies[rank] for rank in (0, 2, 8, 10)] == [0, 1, 2, 3]
    assert [copies[rank] for rank in (1, 3, 9, 11)] == [0, 1, 2, 3]
    copies = [whole.replica(Mesh(layout, rank)) for rank in range(12)]
    assert [copies[rank] for rank in (0, 1, 2, 3, 8, 9, 10, 11)] == list(range(8))
    assert [plain.replica(Mesh(layout, rank)) for rank in (0, 2, 8, 10)] == [0, 1, 0, 1]


# -- precision ---------------------------------------------------------------------------------


def test_gradients_of_bf16_parameters_are_added_up_in_fp32(worker_pool: WorkerPool) -> None:
    def step(mesh: Mesh) -> tuple[Tensor, Tensor | None]:
        weight = nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
        buffers = GradientBuffers({"w": weight}, {"w": Sharding((300,))}, mesh)
        for number in range(4):
            buffers.begin(last=number == 3)
            # 1, then three times 2^-9: bf16, with 8 bits, would stay at 1
            (weight * (1.0 if number == 0 else 2.0**-9)).sum().backward()
        buffers.finish()
        return buffers.gradients()["w"], weight.grad

    expected = torch.full((300,), 1 + 3 * 2.0**-9)
    for ranks in (1, 2):
        for gradient, left in worker_pool.run_mesh(ParallelLayout(dp=ranks), step):
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, ranks * expected)
            assert left is None


def second_step(mesh: Mesh, dtype: torch.dtype, *, sharded: bool) -> dict[str, Tensor]:
    """Returns gradients of a step that reaches `a` alone, after one that reached `a` and `b`."""
    weights = {name: nn.Parameter(torch.ones(64, dtype=dtype)) for name in "ab"}
    config = DataParallelConfig(use_distributed_optimizer=sharded)
    buffers = GradientBuffers(weights, dict.fromkeys(weights, Sharding((64,))), mesh, config)
    for reached in ("ab", "a"):
        buffers.begin(last=True)
        torch.stack([weights[name].sum() for name in reached]).sum().backward()  # type: ignore[no-untyped-call]
        buffers.finish()
        found = {name: gradient.clone() for name, gradient in buffers.gradients().items()}
        buffers.zero()
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_that_the_second_step_does_not_reach_is_zero(
    worker_pool: WorkerPool, single: Mesh, dtype: torch.dtype
) -> None:
    def steps(mesh: Mesh) -> list[dict[str, Tensor]]:
        return [second_step(mesh, dtype, sharded=sharded) for sharded in (False, True)]

    alone = steps(single)
    for ranks, of_rank in [(1, [alone]), (2, worker_pool.run_mesh(ParallelLayout(dp=2), steps))]:
        whole = [both[0] for both in of_rank]
        shards = [{n: g for both in of_rank for n, g in both[1].items()}]
        for found in (*whole, *shards):
            assert found.keys() == {"a", "b"}
            assert found["a"].eq(ranks).all() and not found["b"].any()


def test_split_backward_passes_of_bf16_parameters_are_collected(single: Mesh) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    buffers = GradientBuffers({"w": weight}, {"w": Sharding((3,))}, single)
    for value in (1.0, 2.0**-9, 2.0**-9):
        gradient = torch.full((3,), value, dtype=torch.bfloat16)
        weight.grad = gradient if weight.grad is None else weight.grad + gradient
        buffers.collect_gradients()
    buffers.start_reductions()
    buffers.finish()
    assert torch.equal(buffers.gradients()["w"], torch.full((3,), 1 + 2.0**-8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_without_hooks_are_moved_in_one_operation(
    single: Mesh, dtype: torch.dtype
) -> None:
    class Operations(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            moved.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    names = [f"w{number}" for number in range(8)]
    weights = {name: nn.Parameter(torch.ones(3, dtype=dtype)) for name in names}
    config = DataParallelConfig(accumulate_allreduce_grads_in_fp32=True)
    (bucket,) = GradientBuffers(
        weights, {name: Sharding((3,)) for name in names}, single, config
    ).buckets
    if not bucket.views:  # one rank leaves gradients in main precision where they are
        bucket.flat = torch.zeros(24)
        bucket.views = dict(zip(names, bucket.flat.view(8, 3).unbind(), strict=True))
    for step in range(2):
        moved: list[str] = []
        for number, weight in enumerate(weights.values()):
            own = torch.full((3,), float(number), dtype=dtype)
            weight.grad = own if weight.grad is None else weight.grad.add_(own)
        with Operations():
            bucket.collect_gradients()
        if dtype == torch.bfloat16:
            assert moved == ["_foreach_add_" if step else "_foreach_copy_"]
        else:  # autograd adds the second gradient into the bucket itself
            assert moved == ([] if step else ["_foreach_copy_"])
    for number, name in enumerate(names):
        assert bucket.views[name].eq(2 * number).all()
