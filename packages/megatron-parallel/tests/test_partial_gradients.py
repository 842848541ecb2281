"""Gradients that are partial over tensor ranks are summed there: once a step, and only there.

Each rank of `tp` sees its own positions of the same samples, as in a sequence-parallel region.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from megatron_parallel import (
    DataParallelConfig,
    GradientBuffers,
    LayoutError,
    Mesh,
    ParallelLayout,
    Sharding,
    collect_shardings,
    initialize_parameters,
)
from megatron_parallel.data_parallel import Bucket, BucketCollective
from megatron_parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron_parallel.testing import WorkerPool
from torch import Tensor, nn

HIDDEN, FFN, LENGTH, SAMPLES, LAYERS = 6, 12, 12, 4, 3
Gradients = dict[str, Tensor]


class Layer(nn.Module):
    """Norm, column- and row-parallel pair; norm and row bias see this rank's positions only."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        options: dict[str, Any] = {"sequence_parallel": True, "dtype": dtype}
        self.gain = nn.Parameter(torch.ones(HIDDEN, dtype=dtype))
        self.sharding = {"gain": Sharding((HIDDEN,), partial="tp")}
        self.up = ColumnParallelLinear(HIDDEN, FFN, mesh, **options)
        self.down = RowParallelLinear(FFN, HIDDEN, mesh, **options)

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.gain
        return x + self.down(torch.tanh(self.up(normed)))


class Outcome(NamedTuple):
    gradients: Gradients
    """The global tensors, without the weights of sharded layers."""
    reductions: list[BucketCollective]
    norm: float
    has_storage: list[bool]


def train_step(mesh: Mesh, dtype: torch.dtype = torch.float64, size: int = 10**6) -> Outcome:
    """Runs two micro-batches of this rank's samples and positions, weighted unequally."""
    model = nn.Sequential(*(Layer(mesh, dtype) for _ in range(LAYERS)))
    table = collect_shardings(model)
    initialize_parameters(model, seed=1, mesh=mesh)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if table[name].axis is None:
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(drawn.to(dtype))
    x = torch.randn(LENGTH, SAMPLES, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weights = torch.rand(LENGTH, SAMPLES, 1, generator=generator, dtype=torch.float64)
    tp, dp = mesh.axis("tp"), mesh.axis("dp")
    own = [t.chunk(dp.size, 1)[dp.index].chunk(tp.size, 0)[tp.index] for t in (x, weights)]
    buffers = GradientBuffers(
        model.named_parameters(), table, mesh, DataParallelConfig(ddp_bucket_size=size)
    )
    for number in range(2):
        buffers.begin(last=number == 1)
        some, weighted = (t.chunk(2, 1)[number] for t in own)
        (model(some).square() * weighted).sum().backward()
    buffers.finish()
    gradients = buffers.gradients()
    counted = [
        gradients[name].double().square().sum().item()
        for name, sharding in table.items()
        if sharding.axis is None and sharding.replica(mesh) == 0
    ]
    return Outcome(
        {name: g.clone() for name, g in gradients.items() if table[name].axis is None},
        buffers.reductions(),
        sum(counted),
        [bucket.flat is not None for bucket in buffers.buckets],
    )


def largest_difference(found: Gradients, wanted: Gradients) -> float:
    assert list(found) == list(wanted) and len(wanted) == 2 * LAYERS
    return max(((found[n] - g).abs().max() / g.abs().max()).item() for n, g in wanted.items())


@pytest.fixture(scope="module")
def one_rank() -> Outcome:
    return train_step(Mesh.single())


def test_one_rank_sums_nothing(one_rank: Outcome) -> None:
    assert one_rank.reductions == [] and not any(one_rank.has_storage)


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (3, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("size", [1, 10**6])
def test_ranks_together_have_the_gradient_of_one_rank(
    worker_pool: WorkerPool, one_rank: Outcome, tp: int, dp: int, size: int
) -> None:
    outcomes = worker_pool.run_mesh(ParallelLayout(tp=tp, dp=dp), train_step, torch.float64, size)
    for outcome in outcomes:
        assert largest_difference(outcome.gradients, one_rank.gradients) < 1e-13
        for name, gradient in outcomes[0].gradients.items():
            assert torch.equal(outcome.gradients[name], gradient)
    # Replicas are numbered as before, so that a norm counts each of them once.
    assert sum(outcome.norm for outcome in outcomes) == pytest.approx(one_rank.norm, rel=1e-13)


def test_all_layers_share_one_sum_and_other_gradients_stay_where_they_are(
    worker_pool: WorkerPool,
) -> None:
    names = {f"{i}.{name}" for i in range(LAYERS) for name in ("gain", "down.bias")}
    for outcome in worker_pool.run_mesh(ParallelLayout(tp=2, dp=1), train_step):
        (reduction,) = outcome.reductions
        assert reduction.axis == "tp" and set(reduction.parameters) == names
        assert outcome.has_storage == [False, True]
    for outcome in worker_pool.run_mesh(ParallelLayout(tp=2, dp=2), train_step):
        assert [reduction.axis for reduction in outcome.reductions] == ["dp", "dp", "tp"]


def test_partial_bf16_gradients_are_summed_in_fp32(
    worker_pool: WorkerPool, one_rank: Outcome
) -> None:
    """Twice as precise as bf16: only the partial gradients themselves are rounded."""

    def parts(mesh: Mesh) -> Tensor:
        weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        buffers = GradientBuffers({"w": weight}, {"w": Sharding((4,), partial="tp")}, mesh)
        (weight * (1.0 if mesh.rank == 0 else 2.0**-9)).sum().backward()
        buffers.finish()
        return buffers.gradients()["w"]

    for summed in worker_pool.run_mesh(ParallelLayout(tp=2, dp=1), parts):
        assert torch.equal(summed, torch.full((4,), 1 + 2.0**-9))


@pytest.mark.parametrize(("tp", "dp", "pp"), [(2, 1, 2), (2, 1, 1), (1, 2, 2)])
def test_a_tied_weight_may_be_partial_too(
    worker_pool: WorkerPool, tp: int, dp: int, pp: int
) -> None:
    """As position embeddings of both ends would be; each rank adds a power of ten."""

    def step(mesh: Mesh) -> float:
        weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        sharding = Sharding((1,), partial="tp", tied="embedding")
        buffers = GradientBuffers({"w": weight}, {"w": sharding}, mesh)
        (weight * 10.0**mesh.rank).sum().backward()
        buffers.finish()
        return buffers.gradients()["w"].item()

    layout = ParallelLayout(tp=tp, dp=dp, pp=pp)
    every = float("1" * (tp * dp * pp))
    assert worker_pool.run_mesh(layout, step) == [every] * (tp * dp * pp)


# -- planted defects -------------------------------------------------------------------------------


def not_summed(stack: contextlib.ExitStack) -> None:
    stack.enter_context(patch.object(Bucket, "reduce_extra_axes", lambda *_: None))


def not_marked(stack: contextlib.ExitStack) -> None:
    make = Sharding.__post_init__

    def unmark(sharding: Sharding) -> None:
        make(sharding)
        object.__setattr__(sharding, "partial", None)

    stack.enter_context(patch.object(Sharding, "__post_init__", unmark))


def summed_twice(stack: contextlib.ExitStack) -> None:
    once = Bucket.reduce_extra_axes

    def twice(bucket: Bucket) -> None:
        once(bucket)
        once(bucket)

    stack.enter_context(patch.object(Bucket, "reduce_extra_axes", twice))


@pytest.mark.parametrize("defect", [not_summed, not_marked, summed_twice])
def test_a_planted_defect_shows(
    worker_pool: WorkerPool, one_rank: Outcome, defect: Callable[[contextlib.ExitStack], None]
) -> None:
    def broken(mesh: Mesh) -> Outcome:
        with contextlib.ExitStack() as stack:
            defect(stack)
            return train_step(mesh)

    for outcome in worker_pool.run_mesh(ParallelLayout(tp=2, dp=1), broken):
        assert largest_difference(outcome.gradients, one_rank.gradients) > 1e-2


# -- mistakes --------------------------------------------------------------------------------------


def test_gradients_that_would_be_summed_twice_are_refused(single: Mesh) -> None:
    with pytest.raises(LayoutError, match="cut over axis 'tp': its gradient cannot be partial"):
        Sharding((4, 4), "tp", 0, partial="tp")
    weight = nn.Parameter(torch.ones(2))
    for axis in ("dp", "tp_dp_cp", "world"):
        mesh = Mesh(ParallelLayout(tp=2, dp=2), 1)
        with pytest.raises(LayoutError, match=f"'w' is partial over axis '{axis}'.* 'dp'"):
            GradientBuffers({"w": weight}, {"w": Sharding((2,), partial=axis)}, mesh)
    with pytest.raises(LayoutError, match="no group is called 'rows'"):
        GradientBuffers({"w": weight}, {"w": Sharding((2,), partial="rows")}, single)
