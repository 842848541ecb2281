"""Mapping over processes: results in the order of the input, a bounded number in flight."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from typing import Any, Generic, TypeVar

from ..errors import DataError

T = TypeVar("T")
R = TypeVar("R")

_IN_FLIGHT_PER_WORKER = 3


class _Task(Generic[T, R]):
    """The mapped function of a worker process; sent once, not with every item."""

    function: Callable[[Any], Any]


def _start(function: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker, one thread
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Task.function = function


def _end_with_parent() -> None:
    """A parent that is killed ends nobody: without this its workers would wait for ever."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _call(item: Any) -> Any:
    return _Task.function(item)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until the block ends, and does not reach the processes that start in it.

    A process that is interrupted while it starts, or whose parent is while it hands it its work,
    ends in a traceback. Blocked signals are inherited, so `_start` comes before them. They are
    also caught, because another thread may receive what this one blocks.
    """
    came: list[int] = []
    handler = signal.getsignal(signal.SIGINT)  # None: not of Python, and not ours to replace
    caught = handler is not None and threading.current_thread() is threading.main_thread()
    if caught:
        signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # what is pending comes now
        if caught:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def ordered_map(function: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """`map(function, items)`, in this process for one worker, else in `workers` processes.

    Whatever the number of workers, results come in the order of the items, and at most three
    items per worker are in flight.

    Args:
        function: can be pickled; sent to each process once.
        items: read lazily.
        workers: number of processes; with 1 the function runs here, in whatever threads it uses.

    Raises:
        DataError: a worker process died. Errors of `function` and `items` pass through.
    """
    if workers < 1:
        raise DataError(f"{workers} workers; give at least 1")
    if workers == 1:
        yield from map(function, items)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, (function,))
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            with _interrupts_held():  # a submission may start a worker
                waiting.append(pool.submit(_call, item))
            if len(waiting) >= _IN_FLIGHT_PER_WORKER * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            "a worker process died (killed, or out of memory); use fewer workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
