"""Maps a function over items in several processes, in order and with bounded memory.

Each worker process has a pipe to this process, and a thread here that waits for it. The pools of
the standard library need named semaphores in shared memory, which remain if all processes of a run
are killed.
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
    """Replies to items with ``(True, result)`` or ``(False, exception)`` until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker, one thread
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            item = pipe.recv()
        except (EOFError, ConnectionError):  # the pipe was closed, or the parent has ended
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
    """Sends an answer, or an error if it cannot be pickled.

    Raises:
        ConnectionError: The parent has closed the pipe.
    """
    try:
        pipe.send(answer)
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001 - pickling raises errors of any type
        pipe.send((False, DataError(f"a worker's answer cannot be sent: {error}")))


def _end_with_parent() -> None:
    """Ends this process when its parent ends; otherwise a killed parent leaves it waiting."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


class _Worker:
    """A worker process, which processes one item at a time."""

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
                "a worker process died (it was killed, or out of memory); use fewer workers"
            ) from None
        if not done:
            raise answer
        return answer

    def close(self) -> None:
        """Ends the process and waits for it."""
        self._pipe.close()
        self._process.join()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Defers Ctrl-C until the block ends, and hides it from processes that start in the block.

    A process that is interrupted while it starts, or while its parent sends its work, would print
    a traceback. The signal is blocked, which child processes inherit, and also caught, because
    another thread may receive a signal that this thread blocks.
    """
    came: list[int] = []
    handler = signal.getsignal(signal.SIGINT)  # None: not set by Python, so do not replace it
    caught = handler is not None and threading.current_thread() is threading.main_thread()
    if caught:
        signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # a pending signal is delivered here
        if caught:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def ordered_map(function: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """Maps a function over items with `workers` processes; yields results in order.

    At most three items per worker are in flight.

    Args:
        function: A picklable function, sent to each process once.
        items: The items, read lazily.
        workers: Number of processes; with 1, the function runs in this process.

    Raises:
        DataError: `workers` is below 1, or a worker process died. Errors of `function` and `items`
            are raised unchanged.
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

    # If it started with the first process, it would unblock the signals that are deferred there.
    resource_tracker.ensure_running()
    with ExitStack() as stack:
        for _ in range(workers):
            with _interrupts_held():
                worker = _Worker(function)
            stack.callback(worker.close)
            idle.put(worker)
        threads = ThreadPoolExecutor(workers)
        stack.callback(threads.shutdown, cancel_futures=True)  # before the workers are closed
        waiting: deque[Future[R]] = deque()
        for item in items:
            waiting.append(threads.submit(call, item))
            if len(waiting) >= _IN_FLIGHT_PER_WORKER * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
