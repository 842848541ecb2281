"""What ranks report of a failed collective, and which rank they name, in one process."""

from collections.abc import Callable

import pytest
import torch
from megatron_parallel import CollectiveError, Mesh, ParallelLayout
from megatron_parallel.collectives import failure, raise_collective_errors
from megatron_parallel.mesh.axes import Axis
from megatron_parallel.mesh.store import BoundedStore, StoreError
from torch.distributed import HashStore
from waiting import HANG

LAYOUT = ParallelLayout(tp=2, dp=2)
END = "dead, suspended or late, see its own output (lost)"


class Clock:
    """Time that passes only while a rank sleeps, a quarter of a second at least."""

    def __init__(self) -> None:
        self.now = 0.0
        self.others: list[Callable[[], object]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Runs the next of the other ranks."""
        self.now += max(seconds, 0.25)
        if self.others:
            self.others.pop(0)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A store that ranks of this process share, and time that passes while they wait for it."""
    shared, found = BoundedStore(HashStore(), HANG), Clock()

    def store(patience: float) -> BoundedStore:
        assert patience == 2.0  # seconds, also for a store that is frozen
        return shared

    monkeypatch.setattr(failure, "default_store", store)
    monkeypatch.setattr(failure, "time", found)
    return found


def axis_of(rank: int, name: str, layout: ParallelLayout = LAYOUT) -> Axis:
    return Mesh(layout, rank).axis(name)


def diagnosed(rank: int, name: str, operation: str = "all_reduce", match: str = "") -> str:
    axis = axis_of(rank, name)
    return raise_collective_errors(axis, operation, torch.ones(2), match=match).diagnose("lost")


def test_ranks_without_a_report_are_named_after_two_seconds(clock: Clock) -> None:
    axis = axis_of(0, "tp", ParallelLayout(tp=4, dp=1))
    line = raise_collective_errors(axis, "sum", torch.ones(3, 2).bfloat16()).diagnose("lost")
    where = "sum [3, 2] bfloat16 on axis 'tp' (ranks 0-3)"
    assert line == f"ranks 1-3 did not join {where}: {END}"
    assert 2.0 < clock.now <= 2.5
    # Of a message between two ranks, only these are missed.
    line = raise_collective_errors(axis, "send to rank 2", ranks=(0, 2)).diagnose("lost")
    assert line == f"rank 2 did not join send to rank 2 on axis 'tp' (ranks 0-3): {END}"


def test_a_rank_quotes_the_verdict_of_one_that_gave_up_at_once(clock: Clock) -> None:
    lost = "rank 1 did not join all_reduce [2] float32 on axis 'tp' (ranks 0-1)"
    assert diagnosed(0, "tp") == f"{lost}: {END}"
    before = clock.now
    assert diagnosed(2, "dp", "broadcast") == (
        "broadcast [2] float32 on axis 'dp' (ranks 0, 2) failed because rank 0 gave up: "
        f"{lost} (lost)"
    )
    assert clock.now == before


@pytest.mark.parametrize(
    ("operations", "match", "line"),
    [
        (
            ("all_reduce", "broadcast"),
            "",
            "ranks run different operations: "
            "rank 0: all_reduce [2] float32 on axis 'tp' (ranks 0-1); "
            "rank 1: broadcast [2] float32 on axis 'tp' (ranks 0-1) (lost)",
        ),
        (
            ("all_reduce", "all_reduce"),
            "",
            "all_reduce [2] float32 on axis 'tp' (ranks 0-1) failed on all its ranks (lost)",
        ),
        (
            ("5 rows", "7 rows"),
            "rows",
            "5 rows [2] float32 on axis 'tp' (ranks 0-1) failed on all its ranks (lost)",
        ),
    ],
    ids=["different", "equal", "equal but for their sizes"],
)
def test_operations_of_ranks_that_all_report_are_compared(
    clock: Clock, operations: tuple[str, str], match: str, line: str
) -> None:
    clock.others.append(lambda: diagnosed(1, "tp", operations[1], match))
    assert diagnosed(0, "tp", operations[0], match) == line


class PausedError(Exception):
    """Interrupts a rank while it waits for the others."""


def test_a_rank_that_waits_on_another_axis_gets_more_time(clock: Clock) -> None:
    """Rank 1 waits for rank 3, whose absence it finds after two seconds of its own."""

    def pause() -> None:
        raise PausedError

    def begin() -> None:
        clock.others.insert(0, pause)
        with pytest.raises(PausedError):
            diagnosed(1, "dp")

    clock.others.append(begin)
    line = diagnosed(0, "tp")
    assert line.startswith("ranks run different operations: rank 0: all_reduce [2]")
    assert 4.5 < clock.now <= 5.0
    # Its verdict ends the wait.
    clock.others += [begin, lambda: diagnosed(1, "dp")]
    before, lost = clock.now, "all_reduce [2] float32 on axis 'dp' (ranks 1, 3)"
    end = f"failed because rank 1 gave up: rank 3 did not join {lost} (lost)"
    assert diagnosed(0, "tp").endswith(end)
    assert clock.now - before < 4.5


@pytest.mark.parametrize(
    ("error", "state"), [(RuntimeError("Broken pipe"), "gone"), (StoreError("late"), "frozen")]
)
def test_a_lost_store_is_named_and_counts_as_a_failure(
    monkeypatch: pytest.MonkeyPatch, error: Exception, state: str
) -> None:
    def lost(patience: float) -> BoundedStore:
        raise error

    monkeypatch.setattr(failure, "default_store", lost)
    assert diagnosed(0, "tp") == (
        f"rank 0, which keeps the job's store, is {state}: all_reduce [2] float32 on axis 'tp' "
        "(ranks 0-1) failed (lost)"
    )
    assert failure.failure_reported(axis_of(0, "tp"))


@pytest.mark.usefixtures("clock")
def test_a_failure_is_known_to_all_ranks_of_the_mesh() -> None:
    other = Axis("tp", (0, 1), 0, None, 2, mesh="7")
    assert not failure.failure_reported(axis_of(3, "dp"))
    diagnosed(0, "tp")
    assert failure.failure_reported(axis_of(3, "dp"))
    assert raise_collective_errors(axis_of(3, "dp"), "sum").failure_reported()
    assert not failure.failure_reported(other)  # of another mesh


@pytest.mark.usefixtures("clock")
def test_errors_of_a_backend_are_diagnosed_and_others_pass() -> None:
    context = raise_collective_errors(axis_of(0, "tp"), "sum", torch.ones(1), match="sum")
    for block in (context, context.for_launch()):
        with pytest.raises(CollectiveError) as caught, block:
            raise RuntimeError("[x.cc:3] Connection closed. And more\nlines")
        assert str(caught.value).startswith("rank 1 did not join sum [1] float32 on axis 'tp'")
        assert str(caught.value).endswith("(Connection closed)")
        assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(KeyError), context:
        raise KeyError
