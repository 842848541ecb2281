"""Parts of the worker pool in one process: messages, failures, and the meshes of a rank."""

import inspect
import os
import pickle
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.errors import rank_list
from megatron_parallel.testing import (
    Rank,
    WorkerError,
    WorkerPool,
    plugin,
    server,
    wire,
    worker,
)
from megatron_parallel.testing.failures import Failure
from megatron_parallel.testing.worker import MAX_MESHES


def raised(rank: int, what: str, traceback: str = "") -> Failure:
    return Failure(rank, "raised", f"raised {what}", traceback)


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        (
            [raised(0, "A", "trace\n"), Failure(1, "stopped", "was stopped")],
            "rank 0 of 3 raised A\n---- rank 0 raised A\ntrace\n---- rank 1 was stopped",
        ),
        (
            [raised(0, "A"), raised(2, "A")],
            "ranks 0, 2 of 3 raised A\n---- rank 0 raised A\n---- rank 2 raised A",
        ),
        (
            [raised(0, "A"), raised(2, "B")],
            "rank 0 of 3 raised A; rank 2 of 3 raised B\n"
            "---- rank 0 raised A\n---- rank 2 raised B",
        ),
        (
            [Failure(1, "stopped", "was stopped")],
            "rank 1 of 3 was stopped\n---- rank 1 was stopped",
        ),
    ],
)
def test_an_error_names_the_causes_and_shows_all(failures: list[Failure], expected: str) -> None:
    error = WorkerError(failures, 3)
    assert str(error) == expected and error.failures == tuple(failures)


def test_a_pool_needs_a_rank() -> None:
    with pytest.raises(ValueError, match="max_ranks is 0; a pool needs at least 1 rank"):
        WorkerPool(0)


@pytest.mark.parametrize(
    ("answers", "expected", "waits"),
    [
        ([(0, 0), (0, 0), (5, 7 << 8)], 7, 2),
        ([(5, 9)], -9, 0),
        ([(0, 0)] * 9, server.STILL_RUNNING, 5),
    ],
    ids=["exits", "killed", "still running"],
)
def test_the_fork_server_waits_for_a_worker_for_five_seconds(
    monkeypatch: pytest.MonkeyPatch, answers: list[tuple[int, int]], expected: int, waits: int
) -> None:
    """Each wait takes a second here."""
    now: list[float] = [100.0]

    def waitpid(pid: int, flags: int) -> tuple[int, int]:
        assert (pid, flags) == (5, os.WNOHANG)
        return answers.pop(0)

    def sleep(seconds: float) -> None:
        assert 0 < seconds < 0.01
        now[0] += 1.0

    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(server.os, "waitpid", waitpid)
    assert server._wait(5) == expected
    assert now[0] == 100.0 + waits


def test_the_end_of_a_worker_is_described() -> None:
    pool = object.__new__(WorkerPool)  # without a server
    for status, text in (
        (7, "exited with status 7"),
        (-9, "died of signal 9 (SIGKILL)"),
        (server.STILL_RUNNING, "closed its connection but did not exit"),
    ):
        asked: list[tuple[bytes, int]] = []
        worker = SimpleNamespace(pid=5)

        def ask(kind: bytes, number: int, status: int = status, asked: Any = asked) -> int:
            asked.append((kind, number))
            return status

        pool._ask = ask  # type: ignore[assignment, method-assign]
        assert pool._status(worker) == text  # type: ignore[arg-type]
        assert asked == [(b"W", 5)]
        assert worker.pid == (5 if "did not exit" in text else 0)  # which is ended later


@pytest.mark.parametrize("ended", [True, False])
def test_a_lost_fork_server_is_reported(ended: bool) -> None:
    def wait(seconds: float) -> int:
        if ended:
            return 3
        raise subprocess.TimeoutExpired("python", seconds)

    pool, closed = object.__new__(WorkerPool), list[bool]()
    ours, theirs = socket.socketpair()
    theirs.close()
    pool._connection, pool._server = ours, SimpleNamespace(wait=wait)  # type: ignore[assignment]
    pool.close = lambda: closed.append(True)  # type: ignore[method-assign]
    how = "exited with status 3" if ended else "did not answer within 120 s"
    with ours, pytest.raises(RuntimeError) as caught:
        pool._ask(b"F", 0)
    assert str(caught.value) == f"the pool's fork server {how}; its own message is on stderr"
    assert closed == [True]


def test_pools_of_a_test_run_are_shared_by_equal_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []

    class Pool:
        def __init__(self, ranks: int, **settings: Any) -> None:
            made.append((ranks, *settings.values()))

    monkeypatch.setattr("megatron_parallel.testing.pool.WorkerPool", Pool)
    pools = plugin._Pools()
    first = pools.get("cpu", 8)
    assert pools.get("cpu", 8) is first and len(pools.pools) == 1
    others = [
        pools.get("cpu", 8, ("checked",)),
        pools.get("cpu", 8, (), ("module",)),
        pools.get("cuda", 2),
    ]
    assert len({id(pool) for pool in (first, *others)}) == 4
    usual = ["pytest", "torch.distributed.tensor", "torch.distributed.pipelining"]
    assert made == [
        (8, "cpu", (), usual),
        (8, "cpu", ("checked",), usual),
        (8, "cpu", (), [*usual, "module"]),
        (2, "cuda", (), usual),
    ]


def test_fixtures_are_pools_of_the_test_run_that_end_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []
    pools: Any = SimpleNamespace(get=lambda *given: asked.append(given))
    inspect.unwrap(plugin.worker_pool)(pools, ["checked"], ("module",))
    defaults = plugin.worker_pool_typecheck, plugin.worker_pool_preload
    inspect.unwrap(plugin.worker_pool)(pools, *(inspect.unwrap(each)() for each in defaults))
    for count in (1, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        if count == 1:
            with pytest.raises(pytest.skip.Exception, match=r"this machine has 1$"):
                inspect.unwrap(plugin.device_pool)(pools)
        else:
            inspect.unwrap(plugin.device_pool)(pools)
    assert asked == [("cpu", 8, ("checked",), ("module",)), ("cpu", 8, (), ()), ("cuda", 2)]
    closed: list[int] = []
    run = inspect.unwrap(plugin._worker_pools)()
    found = next(run)
    found.pools |= {i: SimpleNamespace(close=lambda i=i: closed.append(i)) for i in range(2)}
    assert next(run, "ended") == "ended" and closed == [0, 1]


def served(monkeypatch: pytest.MonkeyPatch, join: Any, *functions: Any) -> list[worker.Outcome]:
    """Returns the answers of a worker to a setup and to calls, in this process."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    for name in ("signal", "faulthandler"):
        monkeypatch.setattr(worker, name, mock.MagicMock())
    monkeypatch.setattr(worker, "_join", join)
    setup = worker.Setup(0, 1, "gloo", "cpu", "", os.devnull, 20.0)
    wire.send(ours, wire.dumps(setup))
    for function in functions:
        payload = wire.dumps((function, (3,)), function)
        call = worker.Call(list(sys.path), os.fspath(Path.cwd()), 7.0, payload)
        wire.send(ours, wire.dumps(call))
    ours.shutdown(socket.SHUT_WR)
    with theirs:
        worker.serve(theirs)
    found = []
    with ours:
        while True:
            try:
                found.append(pickle.loads(wire.receive(ours)))
            except EOFError:
                return found


def in_rank(rank: Rank, number: int) -> tuple[float, int, float]:
    return rank.collective_timeout.total_seconds(), number, torch.rand(1).item()


def failing(rank: Rank, number: int) -> None:
    raise ValueError(f"of {number}\nin two lines")


def test_a_worker_answers_each_call_from_the_same_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(setup: worker.Setup) -> Rank:
        return Rank(setup.rank, setup.size, torch.device(setup.device), timedelta(seconds=20))

    started, one, other, failed = served(monkeypatch, join, in_rank, in_rank, failing)
    assert started == worker.Outcome(None)
    torch.manual_seed(0)
    assert pickle.loads(one.result) == (7.0, 3, torch.rand(1).item()) and one == other
    assert failed.result is None and failed.summary == "raised ValueError: of 3"
    assert "in two lines" in failed.traceback and "in failing" in failed.traceback
    assert "in _answer" not in failed.traceback


def test_a_worker_reports_why_it_could_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(setup: worker.Setup) -> Rank:
        raise RuntimeError("no network")

    (answer,) = served(monkeypatch, join, in_rank)
    assert answer.summary == "could not join its group: RuntimeError: no network"


def test_ranks_of_a_call_end_it_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("a rank is lost")

    monkeypatch.setattr(worker.dist, "barrier", broken)
    for size, summary in (
        (1, ""),
        (2, "returned, but the barrier behind it failed: RuntimeError: a rank is lost"),
    ):

        def join(setup: worker.Setup, size: int = size) -> Rank:
            return Rank(0, size, torch.device("cpu"), timedelta(seconds=20))

        _, answer = served(monkeypatch, join, in_rank)
        assert answer.summary == summary and (answer.result is None) == (size == 2)


def test_a_message_is_read_whole_though_it_arrives_in_parts() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    with ours, theirs:
        payload = bytes(range(256)) * 2000

        def deliver() -> None:
            theirs.sendall((len(payload)).to_bytes(8, "little")[:3])
            theirs.sendall((len(payload)).to_bytes(8, "little")[3:] + payload[:1000])
            theirs.sendall(payload[1000:])
            wire.send(theirs, b"")
            theirs.close()

        sender = threading.Thread(target=deliver)
        sender.start()
        assert wire.receive(ours) == payload
        assert wire.receive(ours) == b""
        sender.join()
        with pytest.raises(EOFError, match="the other side closed the connection"):
            wire.receive(ours)


@pytest.mark.parametrize(
    "t",
    [
        torch.ones(2, 3).to_sparse(),
        torch.empty(3, device="meta"),
        torch.tensor([1.5, -2.0]).bfloat16(),
        torch.empty(0, 3, dtype=torch.int16),
        torch.arange(6.0).view(2, 3).t()[1:],
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
    ],
    ids=["sparse", "meta", "bf16", "empty", "strided", "parameter"],
)
def test_tensors_of_every_kind_are_sent(t: torch.Tensor) -> None:
    sent: torch.Tensor = pickle.loads(wire.dumps(t))
    assert (type(sent), sent.dtype, sent.shape) == (type(t), t.dtype, t.shape)
    assert (sent.layout, sent.device, sent.requires_grad) == (t.layout, t.device, t.requires_grad)
    if t.device.type == "cpu":
        assert torch.equal(sent.to_dense(), t.to_dense())


def test_modules_of_tests_are_sent_by_value_for_one_message_only() -> None:
    registered = wire.cloudpickle.list_registry_pickle_by_value
    before = set(registered())
    text = wire.dumps(raised, raised)
    assert set(registered()) == before
    assert b"traceback" in text and pickle.loads(text)(1, "A") == raised(1, "A")
    # A function of a package is sent by its name.
    named = wire.dumps(rank_list, rank_list)
    assert len(named) < 200 and pickle.loads(named) is rank_list
    with pytest.raises(TypeError, match="cannot pickle"):
        wire.dumps(threading.Lock(), raised)
    assert set(registered()) == before


def test_a_rank_reuses_its_last_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[ParallelLayout] = []
    closed: list[ParallelLayout] = []

    class Bound:
        def __init__(self, layout: ParallelLayout) -> None:
            self.layout = layout

        def close(self) -> None:
            closed.append(self.layout)

    def bind(layout: ParallelLayout, *, device: Any, timeout: timedelta) -> Bound:
        assert (device, timeout) == (torch.device("cpu"), rank.collective_timeout)
        bound.append(layout)
        return Bound(layout)

    monkeypatch.setattr(Mesh, "bind", bind)
    assert MAX_MESHES == 3
    rank = Rank(0, 24, torch.device("cpu"), timedelta(seconds=5))
    layouts = [ParallelLayout(tp=tp).resolve(24) for tp in (1, 2, 3, 4, 6)]
    one, two, three, four, six = layouts
    rank.mesh(one)
    rank.mesh(two)
    rank.mesh(three)
    first = rank.mesh(ParallelLayout(tp=1))  # the data-parallel size follows
    assert first.layout == one and bound == layouts[:3] and closed == []
    rank.mesh(four)
    assert closed == [two]  # the one that was not used for longest
    assert rank.mesh(one) is first
    rank.mesh(six)
    assert closed == [two, three] and bound == layouts
    rank.collective_timeout = timedelta(seconds=50)  # of a call with more time
    assert rank.mesh(one) is not first
    rank.collective_timeout = timedelta(seconds=5)
    assert rank.mesh(six).layout == six and bound == [*layouts, one]
