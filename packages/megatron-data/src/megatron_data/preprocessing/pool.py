"""Mapping over processes: results in the order of the input, a bounded number in flight.

Each process has a pipe to this one and a thread that waits at it. The queues of the standard
library's pools would need semaphores with names in shared memory, which stay there when all
processes of a run are killed; nothing here has a name.
"""

import os
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from megatron_data.errors import DataError

T = TypeVar("T")
R = TypeVar("R")

_IN_FLIGHT_PER_WORKER = 3


def _serve(pipe: Connection, function: Callable[[Any], Any]) -> None:
    """Answers items with ``(True, result)`` or ``(False, exception)`` until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker, one thread
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            item = pipe.recv()
        except (EOFError, ConnectionError):  # closed, or reset by a parent that has ended
            return
        try:
            answer = True, function(item)
        except Exception as error:  # noqa: BLE001 - raised in the parent
            error.add_note(f"in a worker process:\n{traceback.format_exc()}")
            answer = False, error
        try:
            _send(pipe, answer)
        except ConnectionError:  # the parent has ended
            return


def _send(pipe: Connection, answer: tuple[bool, Any]) -> None:
    """Sends an answer, or why it cannot be sent.

    Raises:
        ConnectionError: nobody reads.
    """
    try:
        pipe.send(answer)
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001 - of any kind: what cannot be pickled says so
        pipe.send((False, DataError(f"a worker's answer cannot be sent: {error}")))


def _end_with_parent() -> None:
    """Returns a parent that is killed ends nobody: without this its workers would wait for ever."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


class _Worker:
    """A process that maps one item at a time."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        with theirs:
            self._process = context.Process(target=_serve, args=(theirs, function), daemon=True)
            self._process.start()

    def __call__(self, item: Any) -> Any:
        try:
            self._pipe.send(item)
            done, answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise DataError(
                "a worker process died (killed, or out of memory); use fewer workers"
            ) from None
        if not done:
            raise answer
        return answer

    def close(self) -> None:
        """Lets the process end, and waits until it has."""
        self._pipe.close()
        self._process.join()


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
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    def call(item: T) -> R:
        worker = idle.get()  # there are as many threads as workers
        try:
            result: R = worker(item)
        finally:
            idle.put(worker)
        return result

    # Started with the first process, it would unblock the signals that are held for that one.
    resource_tracker.ensure_running()
    with ExitStack() as stack:
        for _ in range(workers):
            with _interrupts_held():
                worker = _Worker(function)
            stack.callback(worker.close)
            idle.put(worker)
        threads = ThreadPoolExecutor(workers)
        stack.callback(threads.shutdown, cancel_futures=True)  # what is under way ends first
        waiting: deque[Future[R]] = deque()
        for item in items:
            waiting.append(threads.submit(call, item))
            if len(waiting) >= _IN_FLIGHT_PER_WORKER * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
