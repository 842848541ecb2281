"""Asynchronous collectives and their errors without other ranks: what is counted and waited for."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_parallel import (
    CollectiveError,
    LayoutError,
    Mesh,
    ParallelLayout,
    Sharding,
    StepState,
)
from megatron_parallel.collectives import ExposedTime, exposed_time, raise_collective_errors
from megatron_parallel.collectives import watchdog as watchdog_module
from megatron_parallel.collectives.async_collective import (
    AsyncCollective,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron_parallel.collectives.traffic import Traffic
from megatron_parallel.collectives.watchdog import Watchdog, marker_factory
from megatron_parallel.imagined.functions import Queue, cuda_functions
from megatron_parallel.sharding import ZEROS, collect_states
from megatron_parallel.sharding.step_state import step_states
from torch import nn

CUDA = torch.device("cuda")


class Dog:
    """Records what a watchdog is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def check(self) -> None:
        self.calls.append("check")

    def watch(self, operation: Any) -> None:
        self.calls.append(f"watch {operation.description} on {operation.axis_name}")


def axis_of(dog: Dog | None = None) -> Any:
    mesh = Mesh(ParallelLayout(tp=2, dp=1), 1)
    mesh._watchdog = dog  # type: ignore[assignment]
    mesh._add_axis("tp", (0, 1))
    return mesh.axis("tp")


def counted(axis: Any) -> Traffic:
    """Returns a counter that is open from now on."""
    axis.ledger.open.append(Traffic())
    found: Traffic = axis.ledger.open[-1]
    return found


class Work:
    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1

    def is_completed(self) -> bool:
        return self.waits > 0


def test_a_collective_is_counted_when_it_starts_and_waited_for_once() -> None:
    dog, work = Dog(), Work()
    axis = axis_of(dog)
    payload, result = torch.ones(3, 2), torch.zeros(3)
    side = SimpleNamespace(join=lambda: dog.calls.append("join"))
    traffic = counted(axis)
    started = AsyncCollective(axis, "all_reduce", payload, result, lambda: work)
    assert traffic.records == [("tp", "all_reduce", 1, 24)]
    assert (started.nbytes, started.axis, started.operation) == (24, axis, "all_reduce")
    assert dog.calls == ["check"] and work.waits == 0 and not started.is_completed
    assert started.wait() is result and work.waits == 1 and started.is_completed
    seen = "watch all_reduce [3, 2] float32 on tp"
    assert dog.calls == ["check", "check", seen] and started.exposed_seconds >= 0
    started.wait_on_stream()
    assert work.waits == 2 and dog.calls[3:] == ["check", seen]
    assert started.wait(side) is result  # type: ignore[arg-type]
    assert work.waits == 2 and dog.calls[5:] == ["join"]
    named = AsyncCollective(axis, "sum", payload, result, lambda: work, description="a bucket")
    named.wait()
    assert dog.calls[-1] == "watch a bucket on tp"


def test_messages_that_were_not_sent_count_as_zero() -> None:
    traffic = Traffic()
    assert traffic.of("tp", "all_reduce") == ("tp", "all_reduce", 0, 0)
    traffic.add("tp", "all_reduce", 24)
    traffic.add("tp", "all_reduce", 8)
    assert traffic.of("tp", "all_reduce") == ("tp", "all_reduce", 2, 32)
    assert traffic.of("dp", "all_reduce").calls == 0 and len(traffic.records) == 1


def test_columns_of_a_table_of_traffic_are_as_wide_as_their_longest_text() -> None:
    traffic = Traffic()
    traffic.add("expert_tp", "send", 1_000_000)
    traffic.add("tp", "send", 5)
    assert str(traffic) == (
        "axis       operation  calls      bytes\n"
        "expert_tp  send           1  1,000,000\n"
        "tp         send           1          5"
    )


def test_a_failed_block_is_not_watched_and_errors_of_the_caller_stay() -> None:
    dog = Dog()
    axis = axis_of(dog)
    for error in (ValueError("mine"), CollectiveError("named already")):
        with pytest.raises(type(error), match=str(error)), raise_collective_errors(axis, "sum"):
            raise error
    assert dog.calls == ["check", "check"]

    class Aborted(Dog):
        def check(self) -> None:
            super().check()
            if len(self.calls) > 1:
                raise CollectiveError("rank 0 did not join")

    axis = axis_of(Aborted())
    with pytest.raises(CollectiveError, match="rank 0 did not"), raise_collective_errors(axis, "s"):
        raise RuntimeError("aborted")


def test_parts_that_are_not_equal_are_refused_before_anything_starts() -> None:
    axis = axis_of()
    message = r"dim 0 of shape \(3, 2\) cannot be cut into 2 equal parts over axis 'tp'"
    with pytest.raises(LayoutError, match=message):
        start_reduce_scatter(torch.ones(3, 2), axis)


def test_results_have_the_shapes_of_parts_or_wholes_along_dim_0() -> None:
    with Mesh.imagined(ParallelLayout(tp=3, dp=1)) as mesh:
        axis, x = mesh.axis("tp"), torch.ones(6, 2, 5)
        assert start_all_gather(x, axis).wait().shape == (18, 2, 5)
        assert start_reduce_scatter(x, axis).wait().shape == (2, 2, 5)
        assert start_all_reduce(x, axis).wait() is x


def test_exposed_time_is_the_sum_of_blocks_that_do_not_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([1.0, 1.5, 7.0, 10.0, 11.25])
    monkeypatch.setattr(exposed_time, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    spent = ExposedTime(torch.device("cpu"))
    with spent.measure():
        pass
    with pytest.raises(KeyError), spent.measure():
        raise KeyError
    with spent.measure():
        pass
    assert spent.seconds == 0.5 + 1.25 == spent.seconds


def test_exposed_time_of_a_device_is_that_between_its_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.number = 0

        def record(self) -> None:
            self.number = len(order)
            order.append("record")

        def synchronize(self) -> None:
            order.append(f"reach {self.number}")

        def elapsed_time(self, end: "Event") -> float:
            return 250.0 * (end.number - self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    spent = ExposedTime(CUDA)
    with spent.measure():
        order.append("wait")
    assert order == ["record", "wait", "record"]
    assert spent.seconds == 0.5 and order[3:] == ["reach 2"]
    assert spent.seconds == 0.5  # each block counts once
    with spent.measure():
        pass
    assert spent.seconds == 0.75


def test_markers_are_recorded_in_the_stream_unless_it_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert marker_factory(torch.device("cpu")) is None
    mark, queue = marker_factory(CUDA), Queue()
    assert mark is not None
    with cuda_functions("a device", 1 << 30, lambda what: None, queue):
        queue.queued = 500
        marker = mark()
        assert marker is not None and not marker.query()
        queue.drain()
        assert marker.query()
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            assert mark() is None
    dog = Watchdog(lambda: None, lambda: None, 60.0)
    before = threading.active_count()
    dog.watch(Operation())
    assert dog._overdue() is None and threading.active_count() == before


class Operation:
    axis_name, description, reported = "tp", "all_reduce", False

    def failure_reported(self) -> bool:
        return self.reported

    def diagnose(self, cause: str) -> str:
        return cause


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [100.0]
    fake = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(watchdog_module, "time", fake)
    yield now


@pytest.mark.parametrize(
    ("timeout", "limit"),
    [(60.0, 55.0), (10.0, 5.0), (4.0, 2.0)],  # five seconds before it, or half of it
)
def test_a_collective_is_overdue_before_the_time_out(
    clock: list[float], timeout: float, limit: float
) -> None:
    dog, operation = Watchdog(lambda: Never(), lambda: None, timeout), Operation()
    dog.close()  # its thread ends at once
    dog.watch(operation)
    for age, reported, late in (
        (limit, False, False),
        (limit + 0.01, False, True),
        (limit / 2, True, False),
        (limit / 2 + 0.01, True, True),
        (limit / 2 + 0.01, False, False),
    ):
        clock[0], operation.reported = 100.0 + age, reported
        assert (dog._overdue() is not None) == late, (age, reported)


class Never:
    def query(self) -> bool:
        return False


# -- states, whose messages an imagined job counts ----------------------------------------------


class Owner(nn.Module):
    """Two states that are combined alike."""

    def __init__(self, mesh: Mesh, **more: Any) -> None:
        super().__init__()
        shape = (4, 2) if "experts" in more else (2,)
        row = Sharding(shape, init=ZEROS, reduce="sum", **more)
        self.sharding = {"a": row, "b": row}
        for name in self.sharding:
            StepState(self, name, mesh, torch.add)


@pytest.mark.parametrize(
    ("layout", "sharding", "axes"),
    [
        (ParallelLayout(dp=2), {}, ["dp"]),
        (ParallelLayout(dp=2, cp=2), {}, ["dp_cp"]),
        (ParallelLayout(dp=2, hybrid_cp=True), {}, ["dp_cp"]),
        (ParallelLayout(dp=4, ep=2), {"experts": True}, ["expert_dp"]),
        (ParallelLayout(dp=2, tp=2), {"partial": "tp"}, ["dp", "tp"]),
    ],
    ids=str,
)
def test_states_are_combined_over_the_axes_of_gradients(
    layout: ParallelLayout, sharding: dict[str, Any], axes: list[str]
) -> None:
    with Mesh.imagined(layout) as mesh:
        owner = Owner(mesh, **sharding)
        states = collect_states([owner])
        traffic = counted(mesh.axis("world"))
        step_states(states, mesh)
        numbers = 2 * states["a"].value.numel()
        what = "all_reduce of state 'a' and 1 more"
        assert traffic.records == [(axis, what, 1, 8 * numbers) for axis in axes]
        traffic = counted(mesh.axis("world"))
        states["b"].step()
        assert [record.operation for record in traffic.records] == [
            "all_reduce of state 'b'" for _ in axes
        ]
