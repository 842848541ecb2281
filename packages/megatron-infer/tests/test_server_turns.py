"""Shares of clients: places to run, places to wait, and passes through the model."""

import queue

import pytest
from megatron_infer.server.fields import GenerateRequest
from megatron_infer.server.guard import client_of
from megatron_infer.server.job import Job
from megatron_infer.server.turns import Turns


def make(client: str, *, ready: bool = True) -> Job:
    job = Job(GenerateRequest(("a",)), client)
    job.tokens = [[1]] if ready else []
    return job


def fill(turns: Turns, clients: str) -> list[Job]:
    jobs = [make(client) for client in clients]
    for job in jobs:
        assert turns.add(job) is None
    return jobs


def clients(jobs: list[Job]) -> str:
    return "".join(job.client for job in jobs)


def test_passes_alternate_between_clients_and_then_between_their_requests() -> None:
    turns = Turns(max_running=4, max_waiting=8)
    a1, a2, a3, b = fill(turns, "aaab")
    turns.start()
    taken = [turns.take_turn() for _ in range(12)]
    assert taken[::2] == [a1, a2, a3, a1, a2, a3]
    assert taken[1::2] == [b] * 6
    turns.remove(b)
    assert [turns.take_turn() for _ in range(4)] == [a1, a2, a3, a1]


def test_a_newcomer_is_next_and_gains_nothing_by_coming_again() -> None:
    turns = Turns(max_running=4, max_waiting=8)
    fill(turns, "aa")
    turns.start()
    seen = []
    for _ in range(4):
        turns.take_turn()
        fill(turns, "b")
        turns.start()
        seen.append(turns.take_turn())
        turns.remove(seen[-1])
    assert clients(seen) == "bbbb"
    assert len(turns) == 2


def test_no_client_has_every_place_to_run() -> None:
    turns = Turns(max_running=4, max_waiting=8)
    fill(turns, "aaaaa")
    turns.start()
    assert clients(turns.running) == "aaa"
    fill(turns, "b")
    turns.start()
    assert clients(turns.running) == "aaab"
    turns.remove(turns.running[0])
    turns.start()
    assert clients(turns.running) == "aaba"


@pytest.mark.parametrize(("places", "alone"), [(1, 1), (2, 1), (3, 2)])
def test_a_client_alone_leaves_one_place_if_there_is_more_than_one(places: int, alone: int) -> None:
    turns = Turns(max_running=places, max_waiting=8)
    fill(turns, "aaaa")
    turns.start()
    assert len(turns.running) == alone


def test_who_runs_least_is_next_and_among_equals_who_came_first() -> None:
    turns = Turns(max_running=4, max_waiting=20)
    first = fill(turns, "aaab")
    turns.start()
    waiting = fill(turns, "aabccd")
    for job in first:
        turns.remove(job)
        turns.start()
    assert clients(turns.running) == "cdab"
    assert len(turns) == len(waiting)


def test_what_is_not_encoded_yet_keeps_its_place_and_does_not_run() -> None:
    turns = Turns(max_running=1, max_waiting=2)
    slow, quick = make("a", ready=False), make("b")
    turns.add(slow)
    turns.start()
    assert turns.take_turn() is None
    turns.add(quick)
    turns.start()
    assert turns.running == [quick]
    slow.tokens = [[1]]
    third = make("c")
    turns.add(third)
    turns.remove(quick)
    turns.start()
    assert turns.running == [slow]


def test_the_queue_is_as_long_as_it_says() -> None:
    turns = Turns(max_running=2, max_waiting=3)
    fill(turns, "aaaaa")
    with pytest.raises(queue.Full, match="5 requests came before"):
        turns.add(make("a"))
    assert len(turns) == 5
    turns.remove(turns.waiting[0])
    assert turns.add(make("a")) is None


def test_a_newcomer_takes_the_newest_place_of_the_largest_share() -> None:
    turns = Turns(max_running=2, max_waiting=4)
    a1, a2, a3, a4, b1, _ = fill(turns, "aaaabb")
    turns.start()
    assert turns.running == [a1, b1]
    assert turns.add(make("c")) is a4
    assert turns.add(make("c")) is a3  # a has 3, c has 1
    with pytest.raises(queue.Full):  # 2 each
        turns.add(make("c"))
    newest = turns.waiting[-1]
    assert turns.add(make("d")) is newest
    assert a2 in turns.waiting
    assert b1 in turns.running


def test_no_place_changes_hands_where_that_only_turns_shares_around() -> None:
    turns = Turns(max_running=2, max_waiting=1)
    fill(turns, "aab")
    turns.start()
    with pytest.raises(queue.Full):  # b would have 2, and a the 1 that b has now
        turns.add(make("b"))
    (loser,) = turns.waiting
    assert turns.add(make("c")) is loser


def test_what_runs_is_never_taken_away() -> None:
    turns = Turns(max_running=3, max_waiting=0)
    fill(turns, "aab")
    turns.start()
    with pytest.raises(queue.Full):
        turns.add(make("c"))
    assert clients(turns.running) == "aba"


def test_requests_ahead_are_counted_if_there_is_no_place() -> None:
    turns = Turns(max_running=3, max_waiting=9)
    assert turns.ahead("a") == 0
    fill(turns, "aa")
    assert turns.ahead("b") == 2  # those that came before have not begun
    turns.start()
    assert turns.ahead("a") == 2
    assert turns.ahead("b") == 0
    fill(turns, "bc")
    turns.start()
    assert turns.ahead("d") == 4


def test_nothing_is_kept_of_clients_that_have_gone() -> None:
    turns = Turns(max_running=4, max_waiting=4)
    for number in range(100):
        (job,) = fill(turns, chr(1000 + number))
        turns.start()
        turns.take_turn()
        turns.remove(job)
        turns.remove(job)
    assert not turns._last
    assert not list(turns)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::1", "127.0.0.1", False),
        (None, "", True),
        ("localhost", "", True),
    ],
)
def test_a_network_of_ipv6_is_one_client(one: str | None, other: str | None, same: bool) -> None:
    assert (client_of(one) == client_of(other)) == same
