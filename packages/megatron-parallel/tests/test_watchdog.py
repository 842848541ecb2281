"""Lost ranks are named within the time-out on a backend whose `wait` never raises.

The backend is that of `queued_backend`: processes with collectives of Gloo, without its waits.
"""

import os
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from megatron_parallel import CollectiveError, Mesh, ParallelLayout, all_reduce, broadcast
from megatron_parallel.collectives import receive
from megatron_parallel.collectives.watchdog import MARGIN, Watchdog, backend_timeout
from megatron_parallel.data_parallel.reduction import AsyncCollectives
from megatron_parallel.pipeline import PipelineEngine, TensorSpec
from megatron_parallel.testing import Rank, WorkerError, WorkerPool
from queued_backend import QueueingDevice, queueing
from torch import nn
from waiting import HANG, Answers, wait_until

SECONDS = 3.0
TP = ParallelLayout(tp=2, dp=1)
Act = Callable[[Mesh], object]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.float64)


def started(mesh: Mesh) -> None:
    AsyncCollectives("gradients", "bucket 1").all_reduce(ones(2), mesh.axis("tp")).wait()


CASES: dict[str, tuple[Act, str]] = {
    "all_reduce": (
        lambda mesh: all_reduce(ones(4, 2), mesh.axis("tp"), purpose="token losses"),
        r"all_reduce of token losses \[4, 2\] float64 on axis 'tp'",
    ),
    "broadcast": (
        lambda mesh: broadcast(ones(3), mesh.axis("tp"), source=1),
        r"broadcast \[3\] float64 on axis 'tp'",
    ),
    "receive": (
        lambda mesh: receive(ones(2), mesh.axis("tp"), 1),
        r"receive from rank 1 \[2\] float64 on axis 'tp'",
    ),
    "started before": (started, r"all_reduce of bucket 1 on axis 'tp'"),
}


def attempt(device: QueueingDevice, mesh: Mesh, act: Act) -> None:
    """Acts like a step: enqueues a collective, reads a value, enqueues the next one."""
    all_reduce(ones(5), mesh.axis("tp"), purpose="greetings")
    device.read()
    act(mesh)
    device.read()
    all_reduce(ones(1), mesh.axis("tp"), purpose="what comes later")


def lose_rank_1(rank: Rank, name: str, how: str, answers: Answers) -> None:
    def act(mesh: Mesh) -> None:
        if rank.rank == 1:
            if how == "exits":
                os._exit(7)
            answers.wait_for([0])
        CASES[name][0](mesh)

    with queueing() as device:
        mesh = Mesh.bind(TP, timeout=timedelta(seconds=SECONDS))
        assert device.group_timeouts == [mesh.timeout + MARGIN]
        try:
            attempt(device, mesh, act)
        finally:
            answers.give(rank.rank)


def lines_of(pool: WorkerPool, *call: object, ranks: int = 2) -> dict[int, str]:
    """Returns the line of each rank of a failed call."""
    with pytest.raises(WorkerError) as failed:
        pool.run(*call, ranks=ranks, timeout=HANG)
    return {failure.rank: failure.summary for failure in failed.value.failures}


SAMPLE = {("started before", "exits")}
TRIALS = [
    pytest.param(name, how, marks=() if (name, how) in SAMPLE else pytest.mark.slow)
    for name in CASES
    for how in ("exits", "freezes")
]


@pytest.mark.parametrize(("name", "how"), TRIALS)
def test_a_lost_rank_is_named_by_axis_and_operation(
    patient: WorkerPool, name: str, how: str, tmp_path: Path
) -> None:
    said = lines_of(patient, lose_rank_1, name, how, Answers(tmp_path))
    line = said[0].partition("CollectiveError: ")[2]
    if how == "exits":
        assert said[1] == "exited with status 7"
    expected = (
        rf"rank 1 did not join {CASES[name][1]} \(ranks 0-1\): dead, suspended or late, see its "
        r"own output \(not completed after [\d.]+ s, the last completed was all_reduce of "
        r"greetings \[5\] float64\)"
    )
    assert re.fullmatch(expected, line), said


@pytest.mark.slow  # half a minute of waiting
def test_a_chain_of_waiting_ranks_names_the_lost_rank(patient: WorkerPool, tmp_path: Path) -> None:
    """Rank 1 is lost. Rank 0 waits for it on tp, rank 2 for rank 0 on dp, rank 3 for rank 1."""

    def run(rank: Rank, answers: Answers) -> None:
        with queueing() as device:
            mesh = Mesh.bind(ParallelLayout(tp=2, dp=2), timeout=timedelta(seconds=12))
            if rank.rank == 1:
                answers.wait_for([0, 2, 3])
            try:
                attempt(device, mesh, lambda mesh: all_reduce(ones(4), mesh.axis("dp")))
            finally:
                answers.give(rank.rank)

    said = lines_of(patient, run, Answers(tmp_path), ranks=4)
    lost = "rank 1 did not join all_reduce of greetings [5] float64 on axis 'tp' (ranks 0-1)"
    assert lost in said[0]
    assert "rank 1 did not join all_reduce [4] float64 on axis 'dp' (ranks 1, 3)" in said[3]
    where = "all_reduce [4] float64 on axis 'dp' (ranks 0, 2)"
    assert f"{where} failed because rank 0 gave up: {lost}" in said[2]


@pytest.mark.slow
def test_ranks_that_run_different_operations_are_reported(patient: WorkerPool) -> None:
    def run(rank: Rank) -> None:
        with queueing() as device:
            mesh = Mesh.bind(TP, timeout=timedelta(seconds=SECONDS))
            own = "all_reduce" if rank.rank == 0 else "broadcast"
            attempt(device, mesh, CASES[own][0])

    for line in lines_of(patient, run).values():
        assert (
            "ranks run different operations: "
            "rank 0: all_reduce of token losses [4, 2] float64 on axis 'tp' (ranks 0-1); "
            "rank 1: broadcast [3] float64 on axis 'tp' (ranks 0-1)"
        ) in line


def test_a_stage_lost_in_the_middle_of_a_step_is_named(patient: WorkerPool, tmp_path: Path) -> None:
    """Stage 1 is lost after its first forward pass, and stages 0 and 2 wait for its messages."""

    def run(rank: Rank, answers: Answers) -> None:
        class Chunk(nn.Linear):
            passes = 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.passes += 1
                if rank.rank == 1 and self.passes == 2:
                    answers.wait_for([0, 2])
                    os._exit(7)
                return super().forward(x)

        with queueing() as device:
            mesh = Mesh.bind(ParallelLayout(pp=3, dp=1), timeout=timedelta(seconds=8))
            engine = PipelineEngine(
                mesh,
                Chunk(4, 4),
                lambda output, batch: {"loss": output.sum()},
                inputs=lambda batch, stage: {"x": batch} if stage == 0 else {},
                stage_output_spec=lambda batch, stage: TensorSpec((2, 4), torch.float32),
            )
            try:
                engine.run([torch.ones(2, 4)] * 4, {"loss": 8.0})
                device.read()
                mesh.axis("pp").watchdog.check()
            finally:
                answers.give(rank.rank)

    said = lines_of(patient, run, Answers(tmp_path), ranks=3)
    assert "rank 1 (stage 1 of 3) did not send the gradient of micro-batch 0 to rank 0" in said[0]
    assert "rank 1 (stage 1 of 3) did not send the activations of micro-batch 1" in said[2]
    for rank in (0, 2):
        assert "on axis 'pp' (not completed after" in said[rank]


class Operation:
    """A collective that is diagnosed without a store."""

    axis_name = "tp"

    def __init__(self, described: str) -> None:
        self.description = described

    def failure_reported(self) -> bool:
        return False

    def diagnose(self, cause: str) -> str:
        return f"rank 1 did not join {self.description} ({cause})"


class Reached:
    """A marker that is reached when the test sets it."""

    def __init__(self, reached: bool = False) -> None:
        self.reached = reached

    def query(self) -> bool:
        return self.reached


def test_complete_operations_raise_nothing_and_the_last_one_is_named() -> None:
    markers = iter([Reached(True), Reached(True), Reached()])
    aborted = threading.Event()
    dog = Watchdog(lambda: next(markers), aborted.set, 0.2)
    for name in ("first", "second"):
        dog.watch(Operation(name))
    wait_until(lambda: dog.last_completed("tp") == "second")
    dog.check()
    assert not aborted.is_set() and dog.last_completed("dp") is None
    dog.watch(Operation("third"))
    wait_until(aborted.is_set)
    with pytest.raises(CollectiveError, match=r"join third \(.* the last completed was second\)"):
        dog.check()


def test_a_host_that_an_abort_does_not_release_is_ended_with_the_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends: list[int] = []
    monkeypatch.setattr("megatron_parallel.collectives.watchdog.MARGIN", timedelta(seconds=0.01))
    monkeypatch.setattr(os, "_exit", ends.append)
    dog = Watchdog(Reached, lambda: None, 0.02)
    dog.watch(Operation("all_reduce"))
    wait_until(lambda: ends)
    assert ends == [1]
    assert capsys.readouterr().err.startswith("rank 1 did not join all_reduce (not completed")


@pytest.fixture
def watching() -> Callable[[], list[threading.Thread]]:
    """Returns the threads of the watchdogs of this test."""
    before = set(threading.enumerate())
    return lambda: [t for t in threading.enumerate() if t.name == "collectives" and t not in before]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses with which watchdogs would have ended the process."""
    found: list[int] = []
    monkeypatch.setattr(os, "_exit", found.append)
    return found


def test_a_closed_watchdog_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
    ends: list[int],
    watching: Callable[[], list[threading.Thread]],
) -> None:
    monkeypatch.setattr("megatron_parallel.collectives.watchdog.MARGIN", timedelta(seconds=0.01))
    dog = Watchdog(Reached, lambda: None, 0.02)
    dog.close()
    dog.watch(Operation("all_reduce"))
    wait_until(lambda: not watching())
    dog.check()
    late = Watchdog(Reached, lambda: late.close(), 0.02)  # is closed while it aborts
    late.watch(Operation("all_reduce"))
    assert all(thread.daemon for thread in watching())
    wait_until(lambda: not watching())
    assert ends == []


def test_a_host_that_has_raised_the_error_is_not_ended(
    monkeypatch: pytest.MonkeyPatch,
    ends: list[int],
    watching: Callable[[], list[threading.Thread]],
) -> None:
    monkeypatch.setattr("megatron_parallel.collectives.watchdog.MARGIN", timedelta(seconds=10))
    aborted = threading.Event()
    dog = Watchdog(Reached, aborted.set, 0.02)
    dog.watch(Operation("all_reduce"))
    assert aborted.wait(HANG)
    with pytest.raises(CollectiveError, match="rank 1 did not join all_reduce"):
        dog.check()
    wait_until(lambda: not watching())
    assert ends == []


def test_the_time_out_of_groups_exceeds_that_of_the_mesh_if_the_backend_enqueues() -> None:
    minute = timedelta(minutes=1)
    assert backend_timeout(torch.device("cpu"), minute) == minute
    assert backend_timeout(torch.device("cuda:1"), minute) == minute + MARGIN
