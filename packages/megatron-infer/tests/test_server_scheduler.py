"""Shares of clients: running slots, waiting slots, and passes through the model."""

import queue

import pytest
from megatron_infer.server.fields import GenerateRequest
from megatron_infer.server.guard import client_id
from megatron_infer.server.job import Job
from megatron_infer.server.scheduler import Scheduler


def make(client: str, *, ready: bool = True) -> Job:
    job = Job(GenerateRequest(("a",)), client)
    job.tokens = [[1]] if ready else []
    return job


def fill(scheduler: Scheduler, clients: str) -> list[Job]:
    jobs = [make(client) for client in clients]
    for job in jobs:
        assert scheduler.add(job) is None
    return jobs


def clients(jobs: list[Job]) -> str:
    return "".join(job.client for job in jobs)


def test_passes_alternate_between_clients_and_then_between_their_requests() -> None:
    scheduler = Scheduler(max_running=4, max_waiting=8)
    a1, a2, a3, b = fill(scheduler, "aaab")
    scheduler.start()
    served = [scheduler.next_job() for _ in range(12)]
    assert served[::2] == [a1, a2, a3, a1, a2, a3]
    assert served[1::2] == [b] * 6
    scheduler.remove(b)
    assert [scheduler.next_job() for _ in range(4)] == [a1, a2, a3, a1]


def test_a_new_client_is_next_and_gains_nothing_by_more_requests() -> None:
    scheduler = Scheduler(max_running=4, max_waiting=8)
    fill(scheduler, "aa")
    scheduler.start()
    seen = []
    for _ in range(4):
        scheduler.next_job()
        fill(scheduler, "b")
        scheduler.start()
        seen.append(scheduler.next_job())
        scheduler.remove(seen[-1])
    assert clients(seen) == "bbbb"
    assert len(scheduler) == 2


def test_no_client_gets_all_running_slots() -> None:
    scheduler = Scheduler(max_running=4, max_waiting=8)
    fill(scheduler, "aaaaa")
    scheduler.start()
    assert clients(scheduler.running) == "aaa"
    fill(scheduler, "b")
    scheduler.start()
    assert clients(scheduler.running) == "aaab"
    scheduler.remove(scheduler.running[0])
    scheduler.start()
    assert clients(scheduler.running) == "aaba"


@pytest.mark.parametrize(("places", "alone"), [(1, 1), (2, 1), (3, 2)])
def test_a_single_client_leaves_one_running_slot(places: int, alone: int) -> None:
    scheduler = Scheduler(max_running=places, max_waiting=8)
    fill(scheduler, "aaaa")
    scheduler.start()
    assert len(scheduler.running) == alone


def test_the_client_with_the_fewest_running_requests_is_next() -> None:
    scheduler = Scheduler(max_running=4, max_waiting=20)
    first = fill(scheduler, "aaab")
    scheduler.start()
    waiting = fill(scheduler, "aabccd")
    for job in first:
        scheduler.remove(job)
        scheduler.start()
    assert clients(scheduler.running) == "cdab"
    assert len(scheduler) == len(waiting)


def test_unencoded_requests_keep_their_slot_and_do_not_run() -> None:
    scheduler = Scheduler(max_running=1, max_waiting=2)
    slow, quick = make("a", ready=False), make("b")
    scheduler.add(slow)
    scheduler.start()
    assert scheduler.next_job() is None
    scheduler.add(quick)
    scheduler.start()
    assert scheduler.running == [quick]
    slow.tokens = [[1]]
    third = make("c")
    scheduler.add(third)
    scheduler.remove(quick)
    scheduler.start()
    assert scheduler.running == [slow]


def test_the_queue_has_its_configured_length() -> None:
    scheduler = Scheduler(max_running=2, max_waiting=3)
    fill(scheduler, "aaaaa")
    with pytest.raises(queue.Full, match="5 requests are running or waiting"):
        scheduler.add(make("a"))
    assert len(scheduler) == 5
    scheduler.remove(scheduler.waiting[0])
    assert scheduler.add(make("a")) is None


def test_a_new_request_replaces_the_newest_of_the_largest_share() -> None:
    scheduler = Scheduler(max_running=2, max_waiting=4)
    a1, a2, a3, a4, b1, _ = fill(scheduler, "aaaabb")
    scheduler.start()
    assert scheduler.running == [a1, b1]
    assert scheduler.add(make("c")) is a4
    assert scheduler.add(make("c")) is a3  # a has 3, c has 1
    with pytest.raises(queue.Full):  # 2 each
        scheduler.add(make("c"))
    newest = scheduler.waiting[-1]
    assert scheduler.add(make("d")) is newest
    assert a2 in scheduler.waiting
    assert b1 in scheduler.running


def test_a_replacement_must_not_reverse_the_shares() -> None:
    scheduler = Scheduler(max_running=2, max_waiting=1)
    fill(scheduler, "aab")
    scheduler.start()
    with pytest.raises(queue.Full):  # b would have 2, and a the 1 that b has now
        scheduler.add(make("b"))
    (loser,) = scheduler.waiting
    assert scheduler.add(make("c")) is loser


def test_running_requests_are_never_replaced() -> None:
    scheduler = Scheduler(max_running=3, max_waiting=0)
    fill(scheduler, "aab")
    scheduler.start()
    with pytest.raises(queue.Full):
        scheduler.add(make("c"))
    assert clients(scheduler.running) == "aba"


def test_requests_ahead_are_counted_if_no_slot_is_free() -> None:
    scheduler = Scheduler(max_running=3, max_waiting=9)
    assert scheduler.requests_ahead("a") == 0
    fill(scheduler, "aa")
    assert scheduler.requests_ahead("b") == 2  # earlier requests have not started
    scheduler.start()
    assert scheduler.requests_ahead("a") == 2
    assert scheduler.requests_ahead("b") == 0
    fill(scheduler, "bc")
    scheduler.start()
    assert scheduler.requests_ahead("d") == 4


def test_nothing_is_stored_for_clients_without_requests() -> None:
    scheduler = Scheduler(max_running=4, max_waiting=4)
    for number in range(100):
        (job,) = fill(scheduler, chr(1000 + number))
        scheduler.start()
        scheduler.next_job()
        scheduler.remove(job)
        scheduler.remove(job)
    assert not scheduler._last
    assert not list(scheduler)


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
    assert (client_id(one) == client_id(other)) == same
