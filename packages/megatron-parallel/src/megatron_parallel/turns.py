"""Two passes of one rank that take turns: one computes while messages of the other are under way.

    turns = Turns(device)
    turns.together(forward, backward)    # runs both, each in a thread
    ...
    message = start(...)                 # inside of either
    turns.hand_over()                    # the other pass computes meanwhile
    message.wait()

At any time one pass runs and the other waits for its turn. A turn ends where a pass is about to
wait for a message, and nowhere else, so that the order in which a rank computes and communicates
follows from its program alone: ranks that run the same two passes start the same collectives in the
same order, whatever their speed. Whoever calls `hand_over` is the pass whose turn it is, in
whatever thread: autograd has threads of its own on a GPU.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from typing import Any, TypeVar, cast

import torch

Result = TypeVar("Result")


class Turns:
    """Runs pairs of passes of one rank; nobody has to wait where no pair runs.

    Args:
        device: Where both compute.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._pair: _Pair | None = None

    def together(self, first: Callable[[], object], second: Callable[[], Result]) -> Result:
        """Runs both and returns what `second` does; `first` has the first turn.

        `second` runs in this thread. An error of either ends both: the other one is left where it
        waits for its turn, and the error is raised here.
        """
        if self._pair is not None:
            raise RuntimeError("two passes take turns already: a pair cannot run within another")
        self._pair = pair = _Pair()
        place = self._place()

        def aside() -> None:
            with place:
                pair.run(0, first)

        context = copy_context()
        # A daemon: whoever interrupts twice does not wait for a message that never comes.
        thread = threading.Thread(target=context.run, args=(aside,), name="first", daemon=True)
        thread.start()
        try:
            result = pair.run(1, second)
        finally:
            thread.join()
            self._pair = None
        if pair.error is not None:
            raise pair.error
        return cast(Result, result)

    def hand_over(self) -> None:
        """Lets the other pass of a pair run until it hands over in turn, or ends."""
        if self._pair is not None:
            self._pair.hand_over()

    def _place(self) -> AbstractContextManager[Any]:
        """Puts another thread where this one computes; a new one starts on the first GPU."""
        if self._device.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.current_stream(self._device))


class _Left(BaseException):
    """Ends a pass whose other one has failed; nobody may take it for an error of the pass."""


class _Pair:
    """Two passes, 0 and 1, and whose turn it is."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._turn = 0
        self._ended: set[int] = set()
        self._changed = threading.Condition()

    def run(self, own: int, work: Callable[[], Result]) -> Result | None:
        """Runs one of the two from its first turn on; its error is kept."""
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

    def hand_over(self) -> None:
        with self._changed:
            own = self._turn
            if self.error is None and 1 - own not in self._ended:
                self._turn = 1 - own
                self._changed.notify_all()
        self._wait_for(own)

    def _wait_for(self, own: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == own or self.error is not None)
            if self.error is not None:
                raise _Left

    def _end(self, own: int) -> None:
        with self._changed:
            self._ended.add(own)
            self._turn = 1 - own
            self._changed.notify_all()
