"""Defects planted into a pipeline are noticed."""

from typing import Any

import pytest
from megatron_parallel import (
    Mesh,
    ParallelLayout,
)
from megatron_parallel.pipeline import (
    split_layers,
    stage_parameters,
)
from megatron_parallel.testing import WorkerPool

from .test_pipeline import assert_equal, build, denominators, make_batches, train


def without_tied_sum(mesh: Mesh) -> Any:
    engine = build(mesh, split_layers(4, 2), True)
    batches = make_batches(3)
    sums = engine.run(batches, denominators(batches))
    return [(sums, {n: p.grad for n, p in stage_parameters(engine.chunks).items()}, "")]


def with_average_of_averages(mesh: Mesh) -> Any:
    engine = build(mesh, split_layers(4, 2), False)
    batches = make_batches(3)
    for batch in batches:
        engine.run([batch], {name: 3 * d for name, d in denominators([batch]).items()})
    sums = engine.run(batches, {"loss": float("inf")})
    return [(sums, {n: p.grad for n, p in stage_parameters(engine.chunks).items()}, "")]


def with_scaled_gradients(mesh: Mesh) -> Any:
    from megatron_parallel._compat import pipelining

    run_schedule = pipelining.run_schedule

    def scaled(schedule: Any, stages: Any, *args: Any, **options: Any) -> None:
        run_schedule(schedule, stages, *args, **options)
        for stage in stages:
            stage.scale_grads(3)

    pipelining.run_schedule = scaled
    try:
        return train(mesh, split_layers(4, 2), [3], False, "1f1b")
    finally:
        pipelining.run_schedule = run_schedule


def with_swapped_gradients(mesh: Mesh) -> Any:
    """Sends the gradient of one micro-batch as that of another."""
    from megatron_parallel.pipeline.stage import Stage

    send = Stage.get_bwd_send_ops
    kept: list[Any] = []

    def first(self: Stage, number: int) -> Any:
        kept.append([*send(self, number)])  # the stage clears its own list
        return kept[0]

    Stage.get_bwd_send_ops = first  # type: ignore[method-assign]
    try:
        return train(mesh, split_layers(4, 2), [3], False, "gpipe")
    finally:
        Stage.get_bwd_send_ops = send  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("defect", "tied"),
    [
        (without_tied_sum, True),
        (with_average_of_averages, False),
        (with_scaled_gradients, False),
        (with_swapped_gradients, False),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_defect_is_noticed(worker_pool: WorkerPool, defect: Any, tied: bool) -> None:
    layout = ParallelLayout(pp=2, dp=1)
    ranks = worker_pool.run_mesh(layout, defect)
    with pytest.raises(AssertionError):
        assert_equal(ranks, [3], layout, 4, tied)
