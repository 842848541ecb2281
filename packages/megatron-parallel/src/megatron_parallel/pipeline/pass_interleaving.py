"""Two passes of one rank that alternate: one computes while the other waits for messages.

    interleaver = PassInterleaver(device)
    interleaver.run_pair(forward, backward)    # runs both, each in a thread
    ...
    message = start(...)                       # inside either pass
    interleaver.switch()                       # the other pass computes meanwhile
    message.wait()

One pass runs at a time, and the other is suspended. A pass switches only where it is about to wait
for a message. The order in which a rank computes and communicates therefore follows from its
program alone: ranks that run the same two passes start the same collectives in the same order, at
any speed. The pass that calls `switch` is the one that runs at the time, whatever its thread:
autograd has threads of its own on a GPU.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from typing import Any, TypeVar, cast

import torch

Result = TypeVar("Result")


class PassInterleaver:
    """Runs pairs of passes of one rank. Without a pair, `switch` does nothing.

    Args:
        device: Device on which both passes compute.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._pair: _Pair | None = None

    def run_pair(self, first: Callable[[], object], second: Callable[[], Result]) -> Result:
        """Runs both passes and returns the result of `second`. `first` runs first.

        `second` runs in the calling thread. An error in either pass ends both: the other pass is
        abandoned where it is suspended, and the error is raised here.

        Raises:
            RuntimeError: A pair is running already.
        """
        if self._pair is not None:
            raise RuntimeError("a pair of passes is running already: pairs cannot be nested")
        self._pair = pair = _Pair()
        stream = self._current_stream()

        def run_first() -> None:
            with stream:
                pair.run(0, first)

        context = copy_context()
        # A daemon thread, so that a second Ctrl-C does not wait for a message that never arrives.
        thread = threading.Thread(target=context.run, args=(run_first,), name="first", daemon=True)
        thread.start()
        try:
            result = pair.run(1, second)
        finally:
            thread.join()
            self._pair = None
        if pair.error is not None:
            raise pair.error
        return cast(Result, result)

    def switch(self) -> None:
        """Suspends this pass and runs the other one until it calls `switch` or ends."""
        if self._pair is not None:
            self._pair.switch()

    def _current_stream(self) -> AbstractContextManager[Any]:
        """Returns a context that gives another thread this thread's CUDA device and stream.

        A new thread would start on the first GPU.
        """
        if self._device.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.current_stream(self._device))


class _Abandoned(BaseException):
    """Ends a pass after the other pass of its pair failed. Not an `Exception`, so not caught."""


class _Pair:
    """Two passes, 0 and 1, of which one runs at a time."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._running = 0
        self._ended: set[int] = set()
        self._changed = threading.Condition()

    def run(self, own: int, work: Callable[[], Result]) -> Result | None:
        """Runs pass `own` once it is scheduled; stores its error in `error`."""
        try:
            self._wait_for(own)
            return work()
        except BaseException as error:  # noqa: BLE001 - raised where the pair was started
            with self._changed:
                if self.error is None:
                    self.error = error
            return None
        finally:
            self._end(own)

    def switch(self) -> None:
        with self._changed:
            own = self._running
            if self.error is None and 1 - own not in self._ended:
                self._running = 1 - own
                self._changed.notify_all()
        self._wait_for(own)

    def _wait_for(self, own: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._running == own or self.error is not None)
            if self.error is not None:
                raise _Abandoned

    def _end(self, own: int) -> None:
        with self._changed:
            self._ended.add(own)
            self._running = 1 - own
            self._changed.notify_all()
