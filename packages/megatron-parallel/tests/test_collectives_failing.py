"""Each failed message is reported in one line with the missing rank, the axis and the operation.

A rank exits, freezes, or runs another operation than the others. Meshes have a short time-out.
"""

import os
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from megatron_parallel import (
    CollectiveError,
    FullySharded,
    GradientBuffers,
    Mesh,
    ParallelLayout,
    Sharding,
    all_gather,
    all_reduce,
    broadcast,
    reduce_scatter,
    vocab_parallel_cross_entropy,
)
from megatron_parallel.collectives import (
    broadcast_tensors,
    copy_to_axis,
    gather_sequence,
    raise_collective_errors,
    receive,
    reduce_from_axis,
    scatter_sequence,
    send,
)
from megatron_parallel.pipeline import sum_tied_gradient
from megatron_parallel.pipeline.shared import broadcast_from_last_stage
from megatron_parallel.testing import Rank, WorkerError, WorkerPool
from torch import Tensor, nn
from waiting import HANG, Answers

SECONDS = 2.0
Act = Callable[[Mesh, Callable[[], None]], object]


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.float64, requires_grad=True)


def backward_of(mapping: Callable[..., Tensor], mesh: Mesh, trouble: Callable[[], None]) -> None:
    """Loses the rank between the forward and the backward pass."""
    result = mapping(ones(4, 2), mesh.axis("tp")).sum()
    trouble()
    result.backward()


def after(act: Callable[[Mesh], object]) -> Act:
    """Loses the rank before it takes part."""

    def run(mesh: Mesh, trouble: Callable[[], None]) -> object:
        trouble()
        return act(mesh)

    return run


def partial_gradients(mesh: Mesh) -> None:
    weight = nn.Parameter(torch.ones(3))
    buffers = GradientBuffers({"norm": weight}, {"norm": Sharding((3,), partial="tp")}, mesh)
    weight.sum().backward()
    buffers.finish()


def token_losses(mesh: Mesh) -> None:
    targets = torch.zeros(3, dtype=torch.int64)
    vocab_parallel_cross_entropy(ones(3, 4).detach(), targets, mesh.axis("tp"), 8)


def message(mesh: Mesh, source: int) -> None:
    pp, t = mesh.axis("pp"), ones(2).detach()
    if pp.index == source:
        send(t, pp, 1 - source, purpose="a thing")
    else:
        receive(t, pp, source, purpose="a thing")


def plain(function: Callable[..., object], axis: str = "tp") -> Act:
    return after(lambda mesh: function(ones(4, 2).detach(), mesh.axis(axis)))


def fully_sharded(mesh: Mesh) -> None:
    layer = nn.Linear(4, 4)
    table = {"weight": Sharding((4, 4)), "bias": Sharding((4,))}
    FullySharded(layer, [], table, mesh).module(torch.ones(2, 4))


def weight(mesh: Mesh) -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


TP, PP = ParallelLayout(tp=2, dp=1), ParallelLayout(pp=2, dp=1)
DP = ParallelLayout(dp=2)
F64 = r" \[4, 2\] float64"
CASES: dict[str, tuple[ParallelLayout, Act, str]] = {
    "all_reduce": (TP, plain(all_reduce), rf"all_reduce{F64} on axis 'tp'"),
    "all_gather": (TP, plain(all_gather), rf"all_gather{F64} on axis 'tp'"),
    "reduce_scatter": (TP, plain(reduce_scatter), rf"reduce_scatter{F64} on axis 'tp'"),
    "forward": (TP, plain(reduce_from_axis), rf"all_reduce{F64} on axis 'tp'"),
    "gather_sequence": (TP, plain(gather_sequence), rf"all_gather{F64} on axis 'tp'"),
    "copy, backward": (
        TP,
        lambda mesh, trouble: backward_of(copy_to_axis, mesh, trouble),
        rf"all_reduce{F64} on axis 'tp'",
    ),
    "gather_sequence, backward": (
        TP,
        lambda mesh, trouble: backward_of(gather_sequence, mesh, trouble),
        r"reduce_scatter \[8, 2\] float64 on axis 'tp'",
    ),
    "scatter_sequence, backward": (
        TP,
        lambda mesh, trouble: backward_of(scatter_sequence, mesh, trouble),
        r"all_gather \[2, 2\] float64 on axis 'tp'",
    ),
    "broadcast_tensors": (
        TP,
        after(lambda mesh: broadcast_tensors({}, mesh.axis("tp"), purpose="samples")),
        r"broadcast of sizes of samples \[2\] int64 on axis 'tp'",
    ),
    "token losses": (
        TP,
        after(token_losses),
        r"all_reduce of token losses \[2, 3, 1\] float64 on axis 'tp'",
    ),
    "partial gradients": (
        TP,
        after(partial_gradients),
        r"all_reduce of gradient bucket 1 of 1 \('norm' ...\) on axis 'tp'",
    ),
    "fully sharded": (
        DP,
        after(fully_sharded),
        r"all_gather of parameters \[10\] float32 on axis 'dp'",
    ),
    "send": (
        PP,
        after(lambda mesh: message(mesh, 0)),
        r"send of a thing to rank 1 \[2\] float64 on axis 'pp'",
    ),
    "receive": (
        PP,
        after(lambda mesh: message(mesh, 1)),
        r"receive of a thing from rank 1 \[2\] float64 on axis 'pp'",
    ),
    "from the last stage": (
        PP,
        after(lambda mesh: broadcast_from_last_stage(torch.ones(2), mesh)),
        r"broadcast \[2\] float32 on axis 'pp'",
    ),
    "tied gradient": (
        PP,
        after(lambda mesh: sum_tied_gradient(weight(mesh), mesh)),
        r"all_reduce of tied gradient \[3\] float32 on axis 'embedding'",
    ),
    "comparison": (
        PP,
        after(lambda mesh: mesh.agree("cakes", {"size": "3"}, axis="pp")),
        r"the comparison of cakes on axis 'pp'",
    ),
}


def attempt(act: Callable[[Mesh], object], layout: ParallelLayout) -> str:
    """Returns the line of the error."""
    Mesh.bind(
        layout, timeout=timedelta(seconds=60)
    ).close()  # all ranks have imported their modules
    mesh = Mesh.bind(layout, timeout=timedelta(seconds=SECONDS))
    try:
        act(mesh)
    except CollectiveError as error:
        return str(error)
    return ""


def lose_rank_1(rank: Rank, name: str, how: str, answers: Answers) -> str:
    layout, act, _ = CASES[name]

    def trouble() -> None:
        if rank.rank == 1 and how == "exits":
            os._exit(7)
        if rank.rank == 1 and how == "freezes":
            answers.wait_for([0])

    with pytest.MonkeyPatch.context() as patch:
        if how == "exits":  # the pool waits only one second for the other ranks
            patch.setattr("megatron_parallel.collectives.failure.GRACE", 0.3)
        line = attempt(lambda mesh: act(mesh, trouble), layout)
    if how == "exits":  # if a rank is lost, the pool returns errors but no results
        raise CollectiveError(line)
    answers.give(rank.rank)
    return line


EXITS = [(name, "exits") for name in CASES if name != "comparison"]
FREEZES = [(name, "freezes") for name in ("all_reduce", "send", "token losses", "comparison")]


@pytest.mark.parametrize(("name", "how"), EXITS + FREEZES)
def test_a_lost_rank_is_named(patient: WorkerPool, name: str, how: str, tmp_path: Path) -> None:
    lost = (lose_rank_1, name, how, Answers(tmp_path))
    if how == "exits":
        with pytest.raises(WorkerError) as failed:
            patient.run(*lost, ranks=2, timeout=HANG)
        summaries = {failure.rank: failure.summary for failure in failed.value.failures}
        assert summaries[1] == "exited with status 7"
        line = summaries[0].partition("CollectiveError: ")[2]
    else:
        line, _ = patient.run(*lost, ranks=2, timeout=HANG)
    expected = (
        rf"^rank 1 did not join {CASES[name][2]} \(ranks 0-1\)[^\n]*: dead, suspended or late"
    )
    assert re.search(expected, line), line


def test_every_rank_names_the_late_rank_and_the_late_rank_gets_an_error(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    given = Answers(tmp_path)

    def run(rank: Rank) -> str:
        def act(mesh: Mesh) -> None:
            if rank.rank == 2:
                given.wait_for([0, 1, 3])
            all_reduce(torch.ones(1), mesh.axis("tp"))

        line = attempt(act, ParallelLayout(tp=4, dp=1))
        given.give(rank.rank)
        return line

    answers = worker_pool.run(run, ranks=4, timeout=HANG)
    where = "all_reduce [1] float32 on axis 'tp' (ranks 0-3)"
    for rank in (0, 1, 3):
        assert answers[rank].startswith(f"rank 2 did not join {where}: dead, suspended or late")
    assert re.match(
        re.escape(where) + r" failed because rank \d gave up: rank 2 did not join", answers[2]
    )


DIFFERENT: dict[str, tuple[Callable[[Mesh], object], str]] = {
    "two collectives": (
        lambda mesh: (all_reduce if mesh.rank == 0 else broadcast)(torch.ones(4), mesh.axis("tp")),
        "rank 0: all_reduce [4] float32 on axis 'tp' (ranks 0-1); "
        "rank 1: broadcast [4] float32 on axis 'tp' (ranks 0-1)",
    ),
    "collective and message": (
        lambda mesh: (
            all_reduce(torch.ones(4), mesh.axis("tp"))
            if mesh.rank == 0
            else receive(torch.ones(3), mesh.axis("tp"), 0)
        ),
        "rank 0: all_reduce [4] float32 on axis 'tp' (ranks 0-1); "
        "rank 1: receive from rank 0 [3] float32 on axis 'tp' (ranks 0-1)",
    ),
    "both receive": (
        lambda mesh: receive(torch.ones(2), mesh.axis("tp"), 1 - mesh.rank),
        "rank 0: receive from rank 1 [2] float32 on axis 'tp' (ranks 0-1); "
        "rank 1: receive from rank 0 [2] float32 on axis 'tp' (ranks 0-1)",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_run_different_operations_are_reported(
    worker_pool: WorkerPool, name: str
) -> None:
    act, expected = DIFFERENT[name]

    def run(rank: Rank) -> str:
        return attempt(act, TP)

    for line in worker_pool.run(run, ranks=2, timeout=HANG):
        assert line.startswith(f"ranks run different operations: {expected} ("), line


def test_reports_of_one_mesh_do_not_affect_the_next(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    """All ranks report a failure on a first mesh. On a second mesh, rank 1 is lost."""
    given = Answers(tmp_path)

    def run(rank: Rank) -> tuple[str, str]:
        first = attempt(lambda mesh: receive(torch.ones(2), mesh.axis("tp"), 1 - mesh.rank), TP)

        def late(mesh: Mesh) -> None:
            if rank.rank == 1:
                given.wait_for([0])
            all_reduce(torch.ones(1), mesh.axis("tp"))

        second = attempt(late, TP)
        given.give(rank.rank)
        return first, second

    (first, second), _ = worker_pool.run(run, ranks=2, timeout=HANG)
    assert first.startswith("ranks run different operations")
    assert second.startswith("rank 1 did not join all_reduce [1] float32")


def test_errors_of_the_caller_are_not_translated(worker_pool: WorkerPool) -> None:
    def run(mesh: Mesh) -> str:
        with pytest.raises(ValueError, match=r"contiguous|cannot be cut") as caught:
            reduce_scatter(torch.ones(3), mesh.axis("tp"))
        return type(caught.value).__name__

    assert worker_pool.run_mesh(TP, run, ranks=2) == ["LayoutError", "LayoutError"]


def test_a_lost_store_is_reported_in_one_line(worker_pool: WorkerPool) -> None:
    def run(mesh: Mesh) -> list[str]:
        class Gone:
            def __getattr__(self, name: str) -> object:
                raise RuntimeError("Broken pipe. Exception raised from sendBytes\nmore")

        lines = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("megatron_parallel._compat.default_store", Gone)
            with pytest.raises(CollectiveError) as caught:
                mesh.agree("cakes", {})
            lines.append(str(caught.value))
            with (
                pytest.raises(CollectiveError) as caught,
                raise_collective_errors(mesh.axis("tp"), "all_reduce"),
            ):
                raise RuntimeError("Connection closed by peer")
            lines.append(str(caught.value))
        return lines

    for lines in worker_pool.run_mesh(TP, run, ranks=2):
        for line in lines:
            assert line.startswith("rank 0, which keeps the job's store, is gone: ")
            assert "on axis" in line and "\n" not in line


def test_a_frozen_store_is_reported_in_one_line(worker_pool: WorkerPool) -> None:
    def run(mesh: Mesh) -> str:
        class Frozen:
            def __getattr__(self, name: str) -> object:
                return lambda *arguments: threading.Event().wait()

        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(CollectiveError) as caught,
            raise_collective_errors(mesh.axis("tp"), "all_reduce"),
        ):
            patch.setattr("megatron_parallel._compat.default_store", Frozen)
            raise RuntimeError("Timed out")
        return str(caught.value)

    for line in worker_pool.run_mesh(TP, run, ranks=2, timeout=HANG):
        assert line.startswith("rank 0, which keeps the job's store, is frozen: all_reduce")
