"""What a rank reports of the message that it waits for, and which rank it names as the cause."""

from collections.abc import Callable
from typing import Any

import pytest
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.collectives import failure as collective_failure
from megatron_parallel.mesh.store import BoundedStore
from megatron_parallel.pipeline import Action, failure
from megatron_parallel.pipeline.failure import PipelineMonitor
from torch.distributed import HashStore
from waiting import HANG

PP3 = ParallelLayout(pp=3, dp=1)
BROKEN = RuntimeError("[gloo/x.cc:1] Connection closed by peer. Maybe it died.")
END = "on axis 'pp' (Connection closed by peer)"


class Clock:
    """Time that passes only while a rank sleeps, a quarter of a second at least."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.25)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A store that ranks of this process share, and time that passes while they wait for it."""
    store, found = HashStore(), Clock()
    shared = BoundedStore(store, HANG)
    monkeypatch.setattr(failure, "default_store", lambda patience=HANG: shared)
    monkeypatch.setattr(failure, "time", found)
    return found


@pytest.fixture
def monitor(clock: Clock) -> Callable[..., PipelineMonitor]:
    """Makes monitors of ranks."""

    def make(rank: int, layout: ParallelLayout = PP3) -> PipelineMonitor:
        made = PipelineMonitor(Mesh(layout, rank), layout.pp * layout.vpp, lambda: None)
        made.begin(())
        return made

    return make


Make = Callable[..., PipelineMonitor]


def test_a_message_is_named_with_both_ranks(monitor: Make) -> None:
    rank = monitor(1)
    rank.expect_receive("activations", 2, 0)
    assert rank.diagnose(BROKEN) == (
        f"rank 0 (stage 0 of 3) did not send the activations of micro-batch 2 to rank 1 {END}"
    )
    rank = monitor(1)
    rank.expect_send("gradient", 4, 2)
    assert rank.diagnose(BROKEN) == (
        f"rank 2 (stage 2 of 3) did not receive the gradient of micro-batch 4 from rank 1 {END}"
    )
    rank.begin(())
    assert "did not respond: the stages could not connect" in rank.diagnose(BROKEN)


@pytest.mark.parametrize(
    ("rank", "action", "expected"),
    [
        (1, Action("F", 1, 3), "rank 2 (stage 2 of 3) did not receive the activations of .* 2 "),
        (1, Action("F", 1, 0), "rank 2 (stage 2 of 3) did not receive the activations of .* 0 "),
        (1, Action("B", 1, 3), "rank 0 (stage 0 of 3) did not receive the gradient of .* 2 "),
        (1, Action("I", 1, 1), "rank 0 (stage 0 of 3) did not receive the gradient of .* 0 "),
        (2, Action("F", 2, 3), "ranks 0, 1 did not respond: the stages could not connect"),
        (0, Action("B", 0, 3), "ranks 1, 2 did not respond: the stages could not connect"),
    ],
    ids=str,
)
def test_after_a_pass_a_rank_waits_for_the_send_of_the_pass_before(
    monitor: Make, rank: int, action: Action, expected: str
) -> None:
    made = monitor(rank)
    with made.running(action):
        assert made.in_user_code and made.trace == []
    assert not made.in_user_code and made.trace == [action]
    who, _, what = expected.partition(" .* ")
    line = made.diagnose(BROKEN)
    assert line.startswith(who) and what in line


def test_a_rank_that_posts_receives_early_waits_for_the_next_pass_of_its_plan(
    monitor: Make,
) -> None:
    first, second, back = Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0)
    rank = monitor(1)
    rank.begin([first, second, back, Action("W", 1, 0)])
    expected = [
        "rank 0 (stage 0 of 3) did not send the activations of micro-batch 0 to rank 1",
        "rank 0 (stage 0 of 3) did not send the activations of micro-batch 1 to rank 1",
        "rank 2 (stage 2 of 3) did not send the gradient of micro-batch 0 to rank 1",
        # A weight half needs no message, so the rank waits for its last send.
        "rank 0 (stage 0 of 3) did not receive the gradient of micro-batch 7 from rank 1",
        "rank 0 (stage 0 of 3) did not receive the gradient of micro-batch 7 from rank 1",
    ]
    for line, action in zip(expected, (first, second, back, Action("W", 1, 0), None), strict=True):
        assert rank.diagnose(BROKEN) == f"{line} {END}"
        if action is not None:
            with rank.running(action):
                pass
            rank.expect_send("gradient", 7, 0)
    rank.begin([first])
    assert rank.trace == []
    with rank.awaiting(Action("B", 1, 5)):
        assert "did not send the gradient of micro-batch 5" in rank.diagnose(BROKEN)
    assert "did not send the activations of micro-batch 0" in rank.diagnose(BROKEN)


def test_a_message_within_a_rank_is_not_waited_for(monitor: Make) -> None:
    """At the bottom of a V the second rank of two holds stages 1 and 2."""
    layout = ParallelLayout(pp=2, vpp=2, dp=1, stage_mapping="v")
    rank = monitor(1, layout)
    for action, peer in ((Action("F", 1, 0), 0), (Action("B", 2, 0), 3)):
        rank.begin([action])
        assert rank.diagnose(BROKEN).startswith(f"rank 0 (stage {peer} of 4) did not send the ")
    for action in (Action("F", 2, 0), Action("B", 1, 0)):
        rank.begin([action])
        assert "could not connect" in rank.diagnose(BROKEN)
    last = monitor(0, layout)
    last.begin([Action("B", 3, 0)])
    assert "could not connect" in last.diagnose(BROKEN)


def test_ranks_quote_the_error_of_another_through_the_pipeline(monitor: Make) -> None:
    ranks = [monitor(rank) for rank in range(3)]
    ranks[2].report_error(ValueError("the layer\n  is broken"))
    error = "rank 2 raised ValueError: the layer is broken"
    ranks[1].expect_receive("gradient", 0, 2)
    assert ranks[1].diagnose(BROKEN) == f"{error}; rank 1 waited for rank 2"
    ranks[0].expect_receive("gradient", 1, 1)
    assert ranks[0].diagnose(BROKEN) == f"{error}; rank 0 waited for rank 1"


def test_the_rank_that_does_not_respond_is_at_fault(monitor: Make) -> None:
    ranks = [monitor(rank) for rank in range(3)]
    ranks[1].expect_receive("gradient", 0, 2)
    line = ranks[1].diagnose(BROKEN)
    ranks[0].expect_receive("gradient", 1, 1)
    assert ranks[0].diagnose(BROKEN) == f"{line}; rank 0 waited for rank 1"
    # A later engine of these ranks has reports of its own.
    again = [monitor(rank) for rank in range(3)]
    again[0].expect_receive("gradient", 1, 1)
    assert again[0].diagnose(BROKEN).startswith("rank 1 (stage 1 of 3) did not send the gradient")


def test_of_ranks_that_wait_for_one_another_the_first_report_is_right(monitor: Make) -> None:
    ranks = [monitor(rank) for rank in range(3)]
    ranks[1].expect_send("activations", 0, 2)
    first = ranks[1].diagnose(BROKEN)
    ranks[2].expect_send("gradient", 3, 1)
    assert ranks[2].diagnose(BROKEN) == f"{first}; rank 2 waited for rank 1"
    ranks[0].expect_receive("gradient", 0, 1)
    assert ranks[0].diagnose(BROKEN) == f"{first}; rank 0 waited for rank 1"
    ranks[1].expect_receive("gradient", 0, 2)
    later = ranks[1].diagnose(BROKEN)
    assert later.startswith("rank 1 (stage 1 of 3) did not receive the gradient of micro-batch 3")


def test_ranks_that_did_not_connect_are_counted(monitor: Make) -> None:
    ranks = [monitor(rank) for rank in range(3)]
    reason = "the stages could not connect on axis 'pp' (time-out)"
    error = RuntimeError("time-out")
    assert ranks[0].diagnose(error) == f"ranks 1, 2 did not respond: {reason}"
    assert ranks[2].diagnose(error) == f"rank 1 did not respond: {reason}"
    assert ranks[1].diagnose(error) == reason


def test_a_lost_store_is_reported_with_the_message(
    monitor: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = monitor(1)
    rank.expect_receive("activations", 0, 0)

    def lost(patience: float) -> BoundedStore:
        raise RuntimeError("gone")

    monkeypatch.setattr(failure, "default_store", lost)
    assert rank.diagnose(BROKEN).endswith(
        f"{END}; rank 0, which keeps the job's store, does not respond either"
    )
    rank.report_error(ValueError("this matters more"))


def test_two_passes_that_alternate_complete_together_forward_first(monitor: Make) -> None:
    rank = monitor(1)
    forward, backward = Action("F", 1, 2), Action("B", 1, 1)
    with rank.overlapping():
        with rank.running(backward), rank.running(forward):
            assert rank.in_user_code
        assert rank.trace == []
    assert rank.trace == [forward, backward] and not rank.in_user_code
    with rank.running(Action("B", 1, 2)):
        pass
    assert rank.trace == [forward, backward, Action("B", 1, 2)]
    with rank.running():  # the loss
        assert rank.in_user_code
    assert len(rank.trace) == 3


def test_an_error_within_a_pass_is_known_as_the_rank_s_own(monitor: Make) -> None:
    rank = monitor(1)
    with pytest.raises(KeyError), rank.running(Action("F", 1, 0)):
        raise KeyError
    assert rank.in_user_code and rank.trace == []
    rank.begin(())
    assert not rank.in_user_code


@pytest.mark.usefixtures("clock")
def test_each_pass_is_announced_before_it_runs() -> None:
    calls: list[int] = []
    rank = PipelineMonitor(Mesh(PP3, 1), 3, lambda: calls.append(len(rank.trace)))
    for number in range(2):
        with rank.running(Action("F", 1, number)):
            assert len(calls) == number + 1
    assert calls == [0, 1]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("Connection reset by peer", 0.2),
        ("Timed out waiting 1800 s", 2.0),
        ("recv: timeout of 2000 ms", 2.0),
        ("Operation time-out", 2.0),
    ],
)
def test_other_reports_are_awaited_longer_after_a_time_out(
    monitor: Make, clock: Clock, text: str, seconds: float
) -> None:
    rank = monitor(1)
    rank.expect_receive("activations", 0, 0)
    assert text in rank.diagnose(RuntimeError(text))
    assert seconds <= clock.now < seconds + 0.5


class Dog:
    """Records what a watchdog is asked for."""

    def __init__(self) -> None:
        self.checks, self.watched = 0, list[Any]()

    def check(self) -> None:
        self.checks += 1

    def watch(self, operation: Any) -> None:
        self.watched.append(operation)


def test_passes_on_a_stream_are_watched_by_the_message_that_they_start_with(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, dog = Mesh(PP3, 1), Dog()
    mesh._watchdog = dog  # type: ignore[assignment]
    mesh._add_axis("pp", (0, 1, 2))
    rank = PipelineMonitor(mesh, 3, lambda: None)
    for number, action in enumerate((Action("F", 1, 4), Action("B", 1, 3), Action("W", 1, 3))):
        with rank.running(action):
            assert dog.checks == number + 1
    forward, backward = dog.watched
    assert (forward.axis_name, forward.description, backward.description) == (
        "pp",
        "receive of the activations of micro-batch 4 from rank 0",
        "receive of the gradient of micro-batch 3 from rank 2",
    )
    # What one operation reports, the others know.
    monkeypatch.setattr(collective_failure, "default_store", failure.default_store)
    assert not backward.failure_reported()
    assert forward.diagnose("late") == (
        "rank 0 (stage 0 of 3) did not send the activations of micro-batch 4 to rank 1 on axis "
        "'pp' (late)"
    )
    assert backward.failure_reported() and clock.now > 2
