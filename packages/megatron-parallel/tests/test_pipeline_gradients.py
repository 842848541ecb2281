"""When `ChunkGradients` reduces buckets, and which stage mappings a `PipelineEngine` accepts."""

from typing import Any

import pytest
import torch
from megatron_parallel import LayoutError, Mesh, ParallelLayout, Sharding, TrainableChunks
from megatron_parallel.pipeline import BackwardPass, ChunkGradients, PipelineEngine
from megatron_parallel.testing import WorkerPool
from torch import nn

V2 = ParallelLayout(pp=2, vpp=2, dp=1, stage_mapping="v")
TABLE = {"weight": Sharding((1, 2))}


def weight_only() -> nn.Linear:
    return nn.Linear(2, 1, bias=False)


def run_pass(gradients: ChunkGradients, backward: BackwardPass, chunk: nn.Linear) -> bool:
    """Runs a backward pass; returns whether reductions had started before its end."""
    loss = chunk(torch.ones(1, 2)).sum()
    with gradients.around_backward(backward):
        if backward.split:  # adds to `.grad` without calling hooks
            (found,) = torch.autograd.grad(loss, [chunk.weight])
            before = chunk.weight.grad
            chunk.weight.grad = found if before is None else before + found
        else:
            loss.backward()
        return any(bucket.launched for each in gradients.buffers for bucket in each.buckets)


def reduced_in_and_after(mesh: Mesh, split: bool) -> list[Any]:
    """Returns, for two passes, whether reductions started in it and by its end; the sum."""
    chunk = weight_only()
    gradients = ChunkGradients(mesh, [chunk], TABLE)
    (bucket,) = gradients.buffers[0].buckets
    found: list[Any] = []
    for last in (False, True):
        inside = run_pass(gradients, BackwardPass(0, int(last), last=last, split=split), chunk)
        found += [inside, bucket.launched]
    gradients.finish()
    return [*found, gradients.gradients()["weight"].tolist()]


@pytest.mark.parametrize("split", [False, True])
def test_reductions_start_in_a_whole_pass_and_after_a_split_one(
    worker_pool: WorkerPool, split: bool
) -> None:
    for found in worker_pool.run_mesh(ParallelLayout(dp=2), reduced_in_and_after, split):
        assert found == [False, False, not split, True, [[4.0, 4.0]]]


def shared_by_both_ends(mesh: Mesh, split: bool) -> list[Any]:
    """Returns for rank 0, after each last pass, whether the shared bucket is reduced; its sum."""
    if mesh.rank:
        return []
    first, last = weight_only(), weight_only()  # stages 0 and 3
    last.weight = first.weight
    gradients = ChunkGradients(mesh, [first, last], TABLE)
    (bucket,) = gradients.buffers[-1].buckets
    launched: list[Any] = []
    for stage, chunk in ((3, last), (0, first)):
        run_pass(gradients, BackwardPass(stage, 0, last=True, split=split), chunk)
        launched.append(bucket.launched)
    gradients.finish()
    return [*launched, gradients.gradients()["weight"].tolist()]


@pytest.mark.parametrize("split", [False, True])
def test_a_shared_parameter_is_reduced_after_the_last_pass_of_both_stages(
    worker_pool: WorkerPool, split: bool
) -> None:
    found, _ = worker_pool.run_mesh(V2, shared_by_both_ends, split)
    assert found == [False, True, [[2.0, 2.0]]]


class Weighted(nn.Linear):
    """A linear layer with the sharding of its weight."""

    def __init__(self) -> None:
        super().__init__(2, 1, bias=False)
        self.sharding = TABLE


def sums_of_two_steps(mesh: Mesh) -> list[Any]:
    """Returns the summed gradients of two steps; the input of a rank is its number plus 1."""
    chunk = Weighted()
    trainable = TrainableChunks([chunk], mesh)
    found = []
    for step in (1, 2):
        with trainable.around_backward(BackwardPass(0, 0, last=True)):
            chunk(torch.full((1, 2), step * (mesh.rank + 1.0))).sum().backward()
        trainable.finish()
        found.append(trainable.gradients()["weight"].tolist())
        trainable.zero()
    return found


def test_chunks_have_the_gradients_of_all_ranks_after_finish(worker_pool: WorkerPool) -> None:
    for found in worker_pool.run_mesh(ParallelLayout(dp=2), sums_of_two_steps):
        assert found == [[[3.0, 3.0]], [[6.0, 6.0]]]


def engine(mesh: Mesh, schedule: str) -> PipelineEngine:
    return PipelineEngine(
        mesh,
        [weight_only() for _ in range(mesh.layout.vpp)],
        lambda output, batch: {"loss": output.sum()},
        inputs=lambda batch, index: {"input": batch},
        schedule=schedule,
    )


def refusal(mesh: Mesh, schedule: str) -> str:
    with pytest.raises(LayoutError) as refused:
        engine(mesh, schedule)
    return str(refused.value)


def test_an_engine_refuses_the_stage_mapping_of_another_schedule(worker_pool: WorkerPool) -> None:
    for message in worker_pool.run_mesh(V2, refusal, "zero-bubble"):
        assert "'zero-bubble' needs ParallelLayout(stage_mapping='loop')" in message
    assert "'zb-v' does not support vpp=1" in refusal(Mesh.single(), "zb-v")
