"""Meshes in the worker pool: bound once per layout, and refused if ranks disagree."""

from datetime import timedelta

import pytest
from megatron_parallel import CollectiveError, LayoutError, Mesh, ParallelLayout
from megatron_parallel.testing import Rank, WorkerError, WorkerPool


def describe(mesh: Mesh) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    return mesh.rank, mesh.axis("tp").ranks, mesh.axis("dp").ranks, id(mesh)


def bind(rank: Rank, layouts: list[ParallelLayout], seconds: float) -> str:
    try:
        Mesh.bind(layouts[rank.rank], timeout=timedelta(seconds=seconds))
    except (LayoutError, CollectiveError) as error:
        return str(error)
    return ""


def test_a_mesh_is_bound_once_per_layout(worker_pool: WorkerPool) -> None:
    first = worker_pool.run_mesh(ParallelLayout(tp=2, dp=2), describe)
    assert [row[:3] for row in first] == [
        (0, (0, 1), (0, 2)),
        (1, (0, 1), (1, 3)),
        (2, (2, 3), (0, 2)),
        (3, (2, 3), (1, 3)),
    ]
    assert worker_pool.run_mesh(ParallelLayout(tp=2), describe, ranks=4) == first
    other = worker_pool.run_mesh(ParallelLayout(tp=4, dp=1), describe)
    assert {row[1] for row in other} == {(0, 1, 2, 3)}


def test_a_layout_that_does_not_fit_fails_every_rank(worker_pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"^ranks \d, \d of 2 raised .*LayoutError: .*multiple"):
        worker_pool.run_mesh(ParallelLayout(tp=4), describe, ranks=2)


def test_layouts_that_differ_are_named_on_every_rank(worker_pool: WorkerPool) -> None:
    layouts = [ParallelLayout(tp=2), ParallelLayout(tp=2), ParallelLayout(pp=2)]
    # The time-out of the pool is shorter than that of the mesh.
    answers = worker_pool.run(bind, layouts, 600.0, ranks=3, timeout=120)
    assert len(set(answers)) == 1
    message = answers[0]
    assert "ranks disagree on layout" in message and "ranks 0-1: " in message
    assert "rank 2: " in message and "pp 2" in message


def test_a_rank_that_never_binds_is_named_on_the_others(worker_pool: WorkerPool) -> None:
    def absent(rank: Rank) -> str:
        return bind(rank, [ParallelLayout()] * 3, 0.5) if rank.rank != 1 else ""

    answers = worker_pool.run(absent, ranks=3, timeout=120)
    for number in (0, 2):
        assert answers[number] == (
            "rank 1 did not join the comparison of layout and configuration on axis 'world' "
            "(ranks 0-2) within 0.5 s: dead, suspended or late, see its own output"
        )
