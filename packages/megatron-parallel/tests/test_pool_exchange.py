"""What a pool makes of the answers of its workers, which are sockets of this process here."""

import pickle
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from megatron_parallel.testing import WorkerError, WorkerPool, pool, wire
from megatron_parallel.testing.worker import Outcome
from waiting import HANG


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, socket.socket]]]:
    """Three workers of a pool without processes, and the sockets at which they would answer."""

    def gone(pid: int, number: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(pool.os, "kill", gone)
    pairs = [socket.socketpair() for _ in range(3)]
    yield [
        (pool._Worker(rank, 5, ours, Path("no trace")), theirs)
        for rank, (ours, theirs) in enumerate(pairs)
    ]
    for pair in pairs:
        for each in pair:
            each.close()


def failures(workers: list[tuple[Any, socket.socket]], timeout: float) -> list[tuple[int, str]]:
    made = object.__new__(WorkerPool)  # without a server
    made._status = lambda worker: "exited with status 7"  # type: ignore[method-assign]
    with pytest.raises(WorkerError) as caught:
        made._exchange([worker for worker, _ in workers], [b"call"] * 3, timeout)
    return [(failure.rank, failure.summary) for failure in caught.value.failures]


def answer(theirs: socket.socket, summary: str = "") -> None:
    wire.send(theirs, wire.dumps(Outcome(None, summary)))


def test_a_rank_that_stops_within_its_answer_hangs(
    workers: list[tuple[Any, socket.socket]],
) -> None:
    for _, theirs in workers[1:]:
        answer(theirs)
    workers[0][1].sendall(b"\7")  # of eight bytes with the length
    assert failures(workers, 0.3) == [(0, "did not finish within 0.3 s")]


@pytest.mark.parametrize("summary", ["", "raised A"])
def test_a_death_is_reported_first_and_other_ranks_are_soon_stopped(
    workers: list[tuple[Any, socket.socket]], monkeypatch: pytest.MonkeyPatch, summary: str
) -> None:
    monkeypatch.setattr(pool, "_GRACE", 0.05)
    answer(workers[0][1], summary)
    workers[1][1].close()
    before = time.monotonic()
    *found, (rank, last) = failures(workers, 20.0)
    assert found == [(1, "exited with status 7"), *([(0, summary)] if summary else [])]
    assert rank == 2 and last.startswith("was stopped: rank ")
    assert time.monotonic() - before < 15  # not until the time-out


def test_other_ranks_have_time_to_report_after_a_failure(
    workers: list[tuple[Any, socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_GRACE", HANG)
    answer(workers[0][1], "raised A")
    answer(workers[1][1])
    late = threading.Timer(0.2, answer, (workers[2][1], "raised B"))
    late.start()
    assert failures(workers, HANG) == [(0, "raised A"), (2, "raised B")]
    late.join()


def test_a_connection_that_breaks_is_the_end_of_the_other_side() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(b"not read")
        theirs.close()
        with pytest.raises(EOFError, match="the other side closed the connection"):
            wire.receive(ours)


def test_a_function_of_a_module_without_a_file_is_sent_by_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = ModuleType("made_by_a_test")
    exec("def three():\n    return 3", vars(made))
    monkeypatch.setitem(pool.sys.modules, "made_by_a_test", made)
    text = wire.dumps(made.three, made.three)
    monkeypatch.delitem(pool.sys.modules, "made_by_a_test")
    assert pickle.loads(text)() == 3
