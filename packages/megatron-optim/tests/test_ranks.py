"""Norms and steps on several ranks equal those of one rank."""

import dataclasses
import math

import pytest
import torch
from megatron_optim import Optimizer, OptimizerConfig, gradient_norm
from megatron_parallel import (
    DataParallelConfig,
    GradientBuffers,
    Mesh,
    ParallelLayout,
    Sharding,
    TrainableParameters,
)
from megatron_parallel.testing import WorkerPool
from torch import Tensor
from torch.nn import Parameter

TABLE = {
    "column.weight": Sharding((8, 6), axis="tp", dim=0),
    "row.weight": Sharding((6, 8), axis="tp", dim=1),
    "norm.weight": Sharding((6,)),
}
LAYOUTS = [
    ParallelLayout(tp=2, dp=2),
    ParallelLayout(tp=2, dp=1, pp=2),
    ParallelLayout(tp=4, dp=1),
]


def draw(stage: int, seed: int) -> dict[str, Tensor]:
    """Returns the global tensors of one pipeline stage, equal on every rank."""
    generator = torch.Generator().manual_seed(100 * stage + seed)
    return {
        name: torch.randn(sharding.shape, generator=generator, dtype=torch.float64)
        for name, sharding in TABLE.items()
    }


def local(mesh: Mesh, seed: int) -> dict[str, Tensor]:
    """Returns this rank's shards of the tensors of its stage, under names of that stage."""
    tensors = draw(mesh.axis("pp").index, seed)
    return {name: tensor[TABLE[name].box(mesh).slices].clone() for name, tensor in tensors.items()}


def norms(mesh: Mesh) -> tuple[float, float]:
    gradients = local(mesh, 1)
    largest = float(gradient_norm(gradients, TABLE, mesh, norm_type=math.inf))
    return float(gradient_norm(gradients, TABLE, mesh)), largest


def steps(mesh: Mesh, count: int, bad_rank: int | None = None) -> tuple[list, dict[str, Tensor]]:
    parameters = {name: Parameter(tensor) for name, tensor in local(mesh, 0).items()}
    optimizer = Optimizer(
        TrainableParameters(parameters, TABLE, mesh), OptimizerConfig(clip_grad=0.5)
    )
    results = []
    for step in range(count):
        for name, gradient in local(mesh, step + 1).items():
            parameters[name].grad = gradient
        if step == 1 and mesh.rank == bad_rank:
            parameters["column.weight"].grad[0, 0] = math.nan
        result = optimizer.step(1e-2)
        results.append((float(result.grad_norm), result.skipped))
    return results, {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_element_counts_once_on_any_layout(
    worker_pool: WorkerPool, layout: ParallelLayout
) -> None:
    stages = [draw(stage, 1) for stage in range(layout.pp)]
    parts = [tensor.flatten() for stage in stages for tensor in stage.values()]
    whole = torch.cat(parts)
    for norm, largest in worker_pool.run_mesh(layout, norms):
        assert norm == pytest.approx(whole.norm().item(), rel=1e-14)
        assert largest == whole.abs().max().item()


@pytest.mark.parametrize("layout", LAYOUTS[::2], ids=str)
def test_five_steps_equal_those_of_one_rank(
    worker_pool: WorkerPool, layout: ParallelLayout
) -> None:
    expected, whole = steps(Mesh.single(), 5)

    def cut(mesh: Mesh) -> tuple[list, float]:
        results, parts = steps(mesh, 5)
        errors = [
            (parts[name] - whole[name][TABLE[name].box(mesh).slices]).abs().max().item()
            for name in TABLE
        ]
        return results, max(errors)

    for results, error in worker_pool.run_mesh(layout, cut):
        assert [norm for norm, _ in results] == pytest.approx([n for n, _ in expected], rel=1e-14)
        assert error < 1e-12


def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(worker_pool: WorkerPool) -> None:
    for results, _ in worker_pool.run_mesh(LAYOUTS[1], steps, 3, 3):
        assert [skipped for _, skipped in results] == [False, True, False]


TIED = Sharding((7, 3), tied="embedding")
PIPELINE = {"embedding": TIED, "0.gain": Sharding((5,)), "1.gain": Sharding((5,))}


def pipeline_steps(
    mesh: Mesh, counted: Sharding = TIED, times: int = 20
) -> tuple[list[float], dict[str, Tensor]]:
    """Runs steps of a model whose first and last stages use the embedding differently.

    Stage and data rank add terms to one loss, so that every layout has the same gradient.
    """
    stages = range(2) if mesh.layout.pp == 1 else [mesh.axis("pp").index]
    names = ["embedding", *(f"{stage}.gain" for stage in stages)]
    weights = {
        name: Parameter(torch.linspace(-1, 2, math.prod(PIPELINE[name].shape)).double())
        for name in names
    }
    for name, weight in weights.items():
        weight.data = weight.data.view(PIPELINE[name].shape)
    buffers = GradientBuffers(weights, PIPELINE, mesh, DataParallelConfig(ddp_bucket_size=10))
    config = OptimizerConfig(clip_grad=0.5, weight_decay=0.1)
    table = {**PIPELINE, "embedding": counted}
    optimizer = Optimizer(
        TrainableParameters(weights, table, mesh, gradients=buffers.gradients), config
    )
    data = mesh.axis("dp")
    norms = []
    for step in range(times):
        samples = range(data.index, 4, data.size)
        for number, sample in enumerate(samples):
            buffers.begin(last=number + 1 == len(samples))
            terms = []
            for stage in stages:
                gain, tied = weights[f"{stage}.gain"], weights["embedding"]
                used = tied.sin() if stage == 0 else (tied * (step + 2)).cos()
                terms.append(used.sum() * gain.square().sum() * (sample + 1))
            sum(terms).backward()
        buffers.finish()
        norms.append(float(optimizer.step(1e-2).grad_norm))
        buffers.zero()
    return norms, {name: weight.detach() for name, weight in weights.items()}


@pytest.mark.parametrize(
    "layout", [ParallelLayout(dp=2), ParallelLayout(dp=4), ParallelLayout(pp=2, dp=2)], ids=str
)
def test_twenty_steps_on_gradient_buffers_equal_one_rank(
    worker_pool: WorkerPool, layout: ParallelLayout
) -> None:
    expected, whole = pipeline_steps(Mesh.single())
    for norms, weights in worker_pool.run_mesh(layout, pipeline_steps):
        assert norms == pytest.approx(expected, rel=1e-12)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, whole[name], rtol=0, atol=1e-12)


def test_counting_a_tied_weight_on_both_stages_is_detected(worker_pool: WorkerPool) -> None:
    twice = dataclasses.replace(TIED, tied=None)
    right, _ = pipeline_steps(Mesh.single(), times=1)
    layout = ParallelLayout(pp=2, dp=1)
    wrong = worker_pool.run_mesh(layout, pipeline_steps, twice, 1)[0][0]
    assert abs(wrong[0] - right[0]) > 1e-3 * right[0]
