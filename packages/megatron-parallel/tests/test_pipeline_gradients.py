"""When `ChunkGradients` reduces buckets, and which stage mappings a `PipelineEngine` accepts."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_parallel import (
    DataParallelConfig,
    LayoutError,
    Mesh,
    ParallelLayout,
    Sharding,
    TrainableChunks,
)
from megatron_parallel.pipeline import (
    BackwardPass,
    ChunkGradients,
    FullyShardedChunks,
    PipelineEngine,
)
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


def test_closed_buffers_collect_no_gradients() -> None:
    chunk = weight_only().bfloat16()  # whose gradients are collected in float32
    gradients = ChunkGradients(Mesh(ParallelLayout(dp=2), 0), [chunk], TABLE)
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    with gradients.around_backward(BackwardPass(0, 0, last=False)):
        chunk(x).sum().backward()
    assert chunk.weight.grad is None
    gradients.close()
    chunk(x).sum().backward()
    assert chunk.weight.grad is not None


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


def holding_shards(rank: int, **settings: bool) -> tuple[list[nn.Module], TrainableChunks]:
    """Returns the chunks of both ends of a V, which share a weight, on a data-parallel rank."""
    tied = Weighted()
    chunks: list[nn.Module] = [nn.ModuleDict({end: Weighted(), "tied": tied}) for end in "ab"]
    mesh = Mesh(replace(V2, dp=2), rank, groups={(0, 1): object()})  # type: ignore[dict-item]
    config = DataParallelConfig(use_distributed_optimizer=True, **settings)
    unit = settings.get("overlap_param_gather")
    found = TrainableChunks(
        chunks,
        mesh,
        config,
        units=(lambda chunk: [chunk]) if unit else None,
        waits_by_unit=bool(unit) and rank == 1,
    )
    return chunks, found


def test_shards_are_those_of_each_chunk_and_of_what_chunks_share() -> None:
    names = [["a.weight"], ["b.weight"], ["tied.weight"]]
    for rank, held in ((0, names), (1, [[], [], []])):  # a weight fits into the first shard
        chunks, found = holding_shards(rank)
        assert [list(each.local_shards()) for each in found.shards] == held
        assert [list(each.regions()) for each in found.shards] == names
        assert not any(m._forward_pre_hooks for chunk in chunks for m in chunk.modules())
        assert list(found.parameters) == ["a.weight", "tied.weight", "b.weight"]
    plain = TrainableChunks([Weighted()], Mesh(ParallelLayout(dp=2), 0))
    assert plain.shards == [] and plain.shard_gradients() is not None


@pytest.mark.parametrize(("rank", "waiting"), [(0, ["a", "tied", "b"]), (1, ["", ""])])
def test_modules_or_units_wait_for_their_weights(rank: int, waiting: list[str]) -> None:
    chunks, _ = holding_shards(rank, overlap_param_gather=True)
    hooks = [n for c in chunks for n, m in c.named_modules() if m._forward_pre_hooks]
    assert sorted(set(hooks), key=waiting.index) == list(dict.fromkeys(waiting))
    assert hooks.count("tied") == (2 if rank == 0 else 0)


def test_fully_sharded_chunks_need_weights_and_passes_of_their_own() -> None:
    tied = Weighted()
    chunks = [nn.ModuleDict({end: Weighted(), "tied": tied}) for end in "ab"]
    with pytest.raises(LayoutError, match=r"^'tied\.weight' belongs to two stages of one rank"):
        FullyShardedChunks(Mesh(replace(V2, dp=2), 0), chunks, [(), ()], {})
    begun: list[tuple[str, bool]] = []
    made = object.__new__(FullyShardedChunks)  # without process groups
    made._of_stage = {  # type: ignore[assignment]
        stage: SimpleNamespace(begin=lambda *, last, stage=stage: begun.append((stage, last)))
        for stage in (0, 3)
    }
    for stage, last in ((3, False), (0, True)):
        with made.around_backward(BackwardPass(stage, 1, last=last)):
            pass
    assert begun == [(3, False), (0, True)]
    with pytest.raises(LayoutError, match="fully sharded training needs whole backward passes"):
        made.around_backward(BackwardPass(0, 0, last=False, split=True))


def test_fully_sharded_chunks_sum_what_stages_share_last_in_the_order_of_names() -> None:
    calls: list[str] = []

    def chunk(name: str, tied: list[str]) -> Any:
        return SimpleNamespace(
            tied=tied,
            sum_partial=lambda: calls.append(f"partial {name}"),
            sum_over_stages=lambda each: calls.append(f"{each} of {name}"),
            gradients=lambda: {name: torch.ones(1)},
            zero=lambda: calls.append(f"zero {name}"),
        )

    made = object.__new__(FullyShardedChunks)  # without process groups
    made.buffers = [chunk("one", ["c", "a"]), chunk("two", ["b"])]
    made.finish()
    assert calls == ["partial one", "partial two", "a of one", "b of two", "c of one"]
    assert list(made.gradients()) == ["one", "two"]
    made.zero()
    assert calls[5:] == ["zero one", "zero two"]


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
