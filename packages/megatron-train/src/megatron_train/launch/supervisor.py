"""Watching over ranks: none outlives the others for long, and none is left behind.

One loop looks for what the ranks say, for their ends and for signals. Once a rank has failed, the
others have `grace` seconds to notice and to say what they missed; whoever is left then is killed.
"""

import selectors
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from megatron_train.launch.outcome import RankExit
from megatron_train.launch.process import RankProcess

GRACE = 10.0
"""Seconds. A rank that notices a failure itself looks for up to 4 s for others' reports of it."""
_TICK = 0.1
_FORWARDED = (signal.SIGINT, signal.SIGTERM)


class Supervisor:
    """Waits until all of ``ranks`` have ended.

    Args:
        ranks: Started ranks, in order.
        grace: Seconds that the others have after a rank has failed.
        timeout: Seconds that a rank waits for another before it fails. So long and `grace` the
            others have after a rank has ended as it should; so long and half of `grace` a rank may
            be suspended, and is killed then: the others may be unable to notice before, as when it
            keeps the job's store. None is no limit.

    The first SIGINT or SIGTERM is passed on to every rank; a second one kills them. Outside the
    main thread signals stay with whoever handles them.
    """

    def __init__(
        self, ranks: Sequence[RankProcess], *, grace: float = GRACE, timeout: float | None = None
    ) -> None:
        self.signals: list[int] = []
        """Numbers of the signals that were to end the ranks."""
        self._ranks = ranks
        self._grace = grace
        self._timeout = timeout
        self._suspended: dict[int, float] = {}
        self._exits: dict[int, RankExit] = {}
        self._deadline: float | None = None
        self._failed = False

    def run(self) -> list[RankExit]:
        """Returns how each rank ended, first the first that did; all of them are reaped."""
        try:
            with selectors.DefaultSelector() as selector, self._signals():
                for rank in self._ranks:
                    rank.register(selector)
                while len(self._exits) < len(self._ranks):
                    for key, _ in selector.select(_TICK):
                        if key.data() == b"":
                            selector.unregister(key.fileobj)
                    self._look(selector)
                    if self._is_over():
                        self._end(self._running, selector)
                    elif self._timeout is not None:
                        self._end(self._suspended_for(self._timeout + self._grace / 2), selector)
        finally:
            for rank in self._ranks:
                rank.kill()
        return list(self._exits.values())

    @property
    def _running(self) -> list[RankProcess]:
        return [rank for rank in self._ranks if rank.rank not in self._exits]

    def _look(self, selector: selectors.BaseSelector) -> None:
        """Notes which ranks have ended or said that they will, and how long the others have."""
        for rank in self._running:
            status = rank.poll()
            if status is not None:
                self._note(rank, selector)
            if status or rank.report is not None:
                rank_exit = self._exits.get(rank.rank)
                if rank_exit is None or not rank_exit.clean:
                    self._failed = True
                    self._limit(self._grace)
            if status is not None and self._timeout is not None:
                self._limit(self._timeout + self._grace)

    def _limit(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def _is_over(self) -> bool:
        if len(self.signals) > 1:
            return True
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return True
        return self._failed and all(rank.suspended for rank in self._running)

    def _suspended_for(self, seconds: float) -> list[RankProcess]:
        """Returns ranks that have been suspended for `seconds`; none if all ranks are suspended."""
        now = time.monotonic()
        suspended = [rank for rank in self._running if rank.suspended]
        if len(suspended) == len(self._running):
            suspended = []
        self._suspended = {rank.rank: self._suspended.get(rank.rank, now) for rank in suspended}
        return [rank for rank in suspended if now - self._suspended[rank.rank] >= seconds]

    def _end(self, ranks: Sequence[RankProcess], selector: selectors.BaseSelector) -> None:
        for rank in ranks:
            suspended = rank.suspended
            rank.kill()
            self._note(rank, selector, killed=True, suspended=suspended)
            self._failed = True
            self._limit(self._grace)

    def _note(
        self,
        rank: RankProcess,
        selector: selectors.BaseSelector,
        *,
        killed: bool = False,
        suspended: bool = False,
    ) -> None:
        rank.close(selector)
        self._exits[rank.rank] = RankExit(
            rank=rank.rank,
            status=rank.process.returncode,
            report=rank.report,
            errors=rank.errors.decode(errors="replace"),
            killed=killed,
            suspended=suspended,
        )

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in _FORWARDED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        if len(self.signals) == 1:
            for rank in self._running:
                rank.signal(number)
