"""Gradient buffers of a pipeline, and weights that two stages share."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron_parallel import (
    DataParallelConfig,
    LayoutError,
    Mesh,
    ParallelLayout,
    Sharding,
    all_reduce,
)
from megatron_parallel.pipeline import (
    BackwardPass,
    ChunkGradients,
    copy_tied_parameter,
    split_layers,
    stage_parameters,
    sum_tied_gradient,
)
from megatron_parallel.testing import WorkerPool
from torch import Tensor, nn

from .test_pipeline import V2, Chunk, assert_equal, build, denominators, make_batches


def buffered(
    mesh: Mesh,
    split: tuple[range, ...],
    schedule: str,
    tied: bool,
    make: Callable[..., ChunkGradients] = ChunkGradients,
) -> Any:
    """Runs two steps through gradient buffers with small buckets.

    The first step has other micro-batches.
    """
    held: list[ChunkGradients] = []
    engine = build(
        mesh,
        split,
        tied,
        schedule=schedule,
        around_backward=lambda backward: held[0].around_backward(backward),
    )
    table = {
        name: Sharding(tuple(p.shape), tied="embedding" if tied and "embedding" in name else None)
        for name, p in stage_parameters(engine.chunks).items()
    }
    gradients = make(mesh, engine.chunks, table, DataParallelConfig(ddp_bucket_size=50))
    held.append(gradients)
    dp = mesh.axis("dp")
    results: list[Any] = []
    for batches in (make_batches(8, seed=3), make_batches(8)):
        gradients.zero()
        sums = engine.run(batches[dp.index :: dp.size], denominators(batches))
        for total in sums.values():
            all_reduce(total, dp)
        gradients.finish()
        results = [(sums, {n: g.clone() for n, g in gradients.gradients().items()}, [])]
    gradients.close()
    return results


BUFFERED = [
    (ParallelLayout(pp=2, dp=2), "1f1b"),
    (ParallelLayout(pp=2, vpp=2, dp=2), "interleaved-1f1b"),
    (ParallelLayout(pp=2, vpp=2, dp=2), "zero-bubble"),
    (replace(V2, dp=2), "zb-v"),
    (replace(V2, dp=2), "dualpipe-v"),
]


@pytest.mark.parametrize(("layout", "schedule"), BUFFERED, ids=[s for _, s in BUFFERED])
def test_gradient_buffers_receive_the_last_backward_pass(
    worker_pool: WorkerPool, layout: ParallelLayout, schedule: str
) -> None:
    split = split_layers(4, 2, layout.vpp)
    ranks = worker_pool.run_mesh(layout, buffered, split, schedule, True)
    assert_equal(ranks, [4], layout, 4, True)


class ReducedTooEarly(ChunkGradients):
    """Reduces buckets when the last weight half begins, not after it."""

    def around_backward(self, backward: BackwardPass) -> contextlib.AbstractContextManager[None]:
        if backward.split and backward.last and backward.stage > 0:  # hooks of stage 0 would raise
            early = self._of_stage[backward.stage]
            early.start_reductions()
            for bucket in early.buckets:  # a slow reduction might include later gradients
                bucket.wait()
            return contextlib.nullcontext()
        return super().around_backward(backward)


class InBothStages(ChunkGradients):
    """Puts the shared weight into the buffers of both its stages, and sums both."""

    def gradients(self) -> dict[str, Tensor]:
        found = super().gradients()
        shared = {name: 2 * found[name] for name in self._shared}
        return found | shared


@pytest.mark.parametrize("make", [ReducedTooEarly, InBothStages])
def test_a_defect_planted_into_the_buffers_is_noticed(worker_pool: WorkerPool, make: Any) -> None:
    layout = replace(V2, dp=2)
    ranks = worker_pool.run_mesh(layout, buffered, split_layers(4, 2, 2), "zb-v", True, make)
    with pytest.raises(AssertionError):
        assert_equal(ranks, [4], layout, 4, True)


def test_tied_copies_are_made_equal(worker_pool: WorkerPool) -> None:
    def copies(mesh: Mesh) -> Tensor:
        weight = nn.Parameter(torch.full((2,), float(mesh.rank)))
        copy_tied_parameter(weight, mesh)
        return weight.data

    ranks = worker_pool.run_mesh(ParallelLayout(pp=4, dp=1), copies)
    assert [t[0].item() for t in ranks] == [0.0, 1.0, 2.0, 0.0]  # inner stages hold none


def test_where_one_rank_has_all_stages_of_a_tied_weight_nothing_is_summed(single: Mesh) -> None:
    weight = nn.Parameter(torch.zeros(2))
    sum_tied_gradient(weight, single)
    assert weight.grad is None


def test_a_tied_gradient_that_one_stage_did_not_reach_is_zero_there(
    worker_pool: WorkerPool,
) -> None:
    def summed(mesh: Mesh) -> Tensor | None:
        weight = nn.Parameter(torch.zeros(2))
        if mesh.rank == 0:
            weight.grad = torch.ones(2)
        sum_tied_gradient(weight, mesh)
        return weight.grad

    first, last = worker_pool.run_mesh(ParallelLayout(pp=2, dp=1), summed)
    assert torch.equal(first, torch.ones(2)) and torch.equal(last, torch.ones(2))


def test_a_parameter_that_two_chunks_share_is_listed_once() -> None:
    first, last = Chunk(range(1), True, False, True), Chunk(range(1, 2), False, True, True)
    with pytest.raises(LayoutError, match=r"two chunks .* different parameters 'embedding.weight'"):
        stage_parameters([first, last])
    last.embedding = first.embedding
    parameters = stage_parameters([first, last])
    assert list(parameters) == [
        "layers.0.weight", "layers.0.bias", "embedding.weight", "layers.1.weight", "layers.1.bias",
    ]  # fmt: skip


# -- planted defects: the comparison above must find each of them --------------------------------
