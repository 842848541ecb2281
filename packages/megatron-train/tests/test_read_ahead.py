"""Samples that a thread reads before they are needed."""

import threading
from itertools import islice

import pytest
from megatron_train.read_ahead import read_ahead


def numbered(seen, end=10):
    for number in range(end):
        seen.append((number, threading.current_thread().name))
        yield number


def until(condition):
    """Waits until a thread has made the condition true."""
    for _ in range(60_000):
        if condition():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it did not happen")


@pytest.mark.parametrize("count", [0, 1, 2, 20])
def test_all_items_come_in_order(count):
    assert list(read_ahead(numbered([]), count)) == list(range(10))
    assert list(read_ahead(iter([None, 0, ()]), count)) == [None, 0, ()]
    assert list(read_ahead(iter(()), count)) == []


def test_as_many_items_as_asked_for_are_read_ahead_by_one_thread():
    seen = []
    items = read_ahead(numbered(seen), 3)
    assert not seen  # nothing is read before the first step
    assert next(items) == 0
    until(lambda: len(seen) == 4)
    assert [next(items), next(items)] == [1, 2]
    until(lambda: len(seen) == 6)
    names = {name for _, name in seen}
    assert len(names) == 1 and names != {threading.current_thread().name}
    items.close()
    until(lambda: not names & {thread.name for thread in threading.enumerate()})
    assert len(seen) == 6


def test_without_a_thread_items_are_read_when_they_are_needed():
    seen = []
    assert list(islice(read_ahead(numbered(seen), 0), 3)) == [0, 1, 2]
    assert seen == [(number, threading.current_thread().name) for number in range(3)]


def test_an_error_is_raised_at_its_item_and_ends_the_iteration():
    def failing():
        yield from (1, 2)
        raise OSError("the disk is gone")

    items = read_ahead(failing(), 5)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(items)
    assert list(items) == []


def test_after_its_current_item_a_thread_reads_no_more():
    seen, go_on = [], threading.Event()

    def waiting():
        for number, name in ((number, threading.current_thread().name) for number in range(9)):
            seen.append((number, name))
            assert number == 0 or go_on.wait(60)
            yield number

    items = read_ahead(waiting(), 5)
    assert next(items) == 0
    until(lambda: len(seen) == 2)
    items.close()  # does not wait for the item
    go_on.set()
    until(lambda: seen[0][1] not in {thread.name for thread in threading.enumerate()})
    assert [number for number, _ in seen] == [0, 1]
