"""Comparison of values between ranks, which are threads with one store here."""

import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from megatron_parallel import CollectiveError, LayoutError
from megatron_parallel.mesh.agreement import agree
from megatron_parallel.mesh.store import BoundedStore, StoreError
from waiting import HANG

Given = tuple[Mapping[str, str], Mapping[str, str | None] | None]


def answers(*given: Given, ranks: tuple[int, ...] | None = None, turns: int = 1) -> list[str]:
    """Returns the error of each rank after its last comparison; empty without one."""
    store, found = dist.HashStore(), [""] * len(given)
    numbers = ranks or tuple(range(len(given)))

    def run(index: int) -> None:
        values, own = given[index]
        rest: dict[str, Any] = {"ranks": numbers, "timeout": timedelta(seconds=60), "axis": "pp"}
        try:
            for turn in range(turns):
                last = turn == turns - 1
                agree(
                    store,  # type: ignore[arg-type]
                    "sizes",
                    values if last else {},
                    rank=numbers[index],
                    own=own if last else None,
                    **rest,
                )
        except LayoutError as error:
            found[index] = str(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


EQUAL: Given = ({"size": "3"}, {"device": "a"})
CASES: dict[str, tuple[list[Given], str]] = {
    "equal": ([({"size": "3"}, None)] * 3, ""),
    "own values": ([EQUAL, ({"size": "3"}, {"device": "b"})], ""),
    "nothing of their own": ([({}, {"device": None}), ({}, {"device": None})], ""),
    "one differs": (
        [EQUAL, ({"size": "4"}, {"device": "b"})],
        "ranks disagree on size: rank 0: 3; rank 1: 4",
    ),
    "one is not given": (
        [({"size": "3"}, None), ({}, None), ({"size": "3"}, None)],
        "ranks disagree on size: ranks 0, 2: 3; rank 1: not given",
    ),
    "only others give it": (
        [({}, None), ({"size": "3"}, None)],
        "ranks disagree on size: rank 0: not given; rank 1: 3",
    ),
    "a shared device": (
        [EQUAL, EQUAL, ({"size": "3"}, {"device": None})],
        "every rank needs a device of its own: ranks 0-1 share a",
    ),
    "two shared devices": (
        [({}, {"device": name}) for name in "abba"],
        "every rank needs a device of its own: ranks 0, 3 share a; ranks 1-2 share b",
    ),
    "both": (
        [({"size": "3"}, {"device": "a"}), ({"size": "4"}, {"device": "a"})],
        "ranks disagree on size: rank 0: 3; rank 1: 4 | "
        "every rank needs a device of its own: ranks 0-1 share a",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_return_or_raise_the_same(name: str) -> None:
    given, expected = CASES[name]
    assert answers(*given) == [expected] * len(given)


def test_a_topic_is_compared_anew_each_time_and_by_the_ranks_of_its_axis() -> None:
    line = "ranks disagree on size: rank 4: 3; rank 7: 4"
    given: list[Given] = [({"size": "3"}, None), ({"size": "4"}, None)]
    assert answers(*given, ranks=(4, 7), turns=3) == [line] * 2


class Late(dist.HashStore):
    """A store whose first rank, once it has written its values, waits for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.released = threading.Event(), threading.Event()

    def wait(self, *arguments: Any) -> None:
        if "verdict" not in arguments[0][0]:
            self.written.set()
            assert self.released.wait(HANG)
        super().wait(*arguments)


@pytest.mark.parametrize("first_writes", [False, True])
def test_a_first_rank_without_a_verdict_is_named(first_writes: bool) -> None:
    store = Late()

    def compare(rank: int, seconds: float) -> None:
        agree(
            store,  # type: ignore[arg-type]
            "sizes",
            {},
            rank=rank,
            ranks=(0, 1),
            timeout=timedelta(seconds=seconds),
        )

    first = threading.Thread(target=compare, args=(0, HANG))
    if first_writes:
        first.start()
        assert store.written.wait(HANG)
    with pytest.raises(CollectiveError) as caught:
        compare(1, 0.1)
    assert str(caught.value) == (
        "rank 0 did not join the comparison of sizes on axis 'world' (ranks 0-1) within 0.1 s: "
        "dead, suspended or late, see its own output"
    )
    store.released.set()
    if first_writes:
        first.join()


def test_the_first_rank_names_the_missing_ones() -> None:
    with pytest.raises(CollectiveError, match=r"^ranks 1-2 did not join .* within 0\.02 s: dead"):
        agree(
            dist.HashStore(),  # type: ignore[arg-type]
            "sizes",
            {"size": "3"},
            rank=0,
            ranks=range(3),
            timeout=timedelta(seconds=0.02),
        )


@pytest.mark.parametrize(
    ("method", "error", "state"),
    [("wait", StoreError("late"), "frozen"), ("set", RuntimeError("Broken pipe"), "gone")],
)
def test_a_lost_store_is_named(
    monkeypatch: pytest.MonkeyPatch, method: str, error: Exception, state: str
) -> None:
    def lost(*_: Any) -> None:
        raise error

    store = BoundedStore(dist.HashStore())
    monkeypatch.setattr(store, method, lost)
    with pytest.raises(CollectiveError) as caught:
        agree(store, "sizes", {}, rank=1, ranks=range(2), timeout=timedelta(seconds=60))
    assert str(caught.value) == (
        f"rank 0, which keeps the job's store, is {state}: the comparison of sizes on axis 'world' "
        f"(ranks 0-1) failed ({error})"
    )


def test_requests_have_a_deadline_of_their_own_and_errors_are_raised() -> None:
    answered, abandonable = threading.Event(), list[bool]()

    class Store:
        """Answers once it may; fails for a key that does not exist."""

        def __getattr__(self, name: str) -> Callable[..., Any]:
            def answer(*arguments: Any) -> Any:
                abandonable.append(threading.current_thread().daemon)
                answered.wait(HANG)
                if arguments[0] == "absent":
                    raise KeyError("absent")
                return {"add": 3.0, "get": bytearray(b"x"), "check": 1}.get(name)

            return answer

    hasty = BoundedStore(Store(), patience=0.05)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match=r"^the job's store did not answer within 0\.05 s$"):
        hasty.set("a", "b")
    answered.set()
    # Patience begins after the time-out of the request.
    BoundedStore(Store(), patience=0.0).wait(["a"], timedelta(seconds=HANG))  # type: ignore[arg-type]
    patient = BoundedStore(Store(), patience=HANG)  # type: ignore[arg-type]
    assert (patient.add("a", 1), patient.get("a"), patient.check(["a"])) == (3, b"x", True)
    with pytest.raises(KeyError, match="absent"):
        patient.get("absent")
    assert all(abandonable)  # a process ends without them
