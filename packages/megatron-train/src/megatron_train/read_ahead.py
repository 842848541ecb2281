"""Reading of samples in the background, while a device computes."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def read_ahead(items: Iterator[Item], count: int) -> Iterator[Item]:
    """Yields the items of an iterator, which a thread computes up to ``count`` items ahead.

    A thread needs no copies between processes, and none is left when a process is killed. The order
    is that of the iterator, and an error is raised where the item would have been. The thread ends
    with the iterator, or after its current item when the generator is closed.

    Args:
        items: Iterator that only this function uses from now on.
        count: Number of items. With 0, there is no thread.
    """
    if count == 0:
        yield from items
        return
    thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
    waiting: deque[Future[tuple[Item] | None]] = deque()
    try:
        while True:
            while len(waiting) <= count:
                waiting.append(thread.submit(_next, items))
            found = waiting.popleft().result()
            if found is None:
                return
            yield found[0]
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


def _next(items: Iterator[Item]) -> tuple[Item] | None:
    """Returns the next item; None after the last one."""
    for item in items:
        return (item,)
    return None
