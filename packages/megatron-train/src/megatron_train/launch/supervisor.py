"""Supervises ranks until all of them have ended.

One loop watches the reports and the ends of the ranks, and signals. After a rank has failed, the
other ranks have `grace` seconds to notice it and to report which rank is missing; then they are
killed.
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
"""Seconds. A rank that notices a failure waits up to 4 s for the reports of other ranks."""
_TICK = 0.1
_FORWARDED = (signal.SIGINT, signal.SIGTERM)


class Supervisor:
    """Waits until all ranks have ended.

    The first SIGINT or SIGTERM is forwarded to every rank; a second one kills the ranks. Outside
    the main thread, signal handlers stay as they are.

    Args:
        ranks: Started ranks, in order.
        grace: Seconds between the failure of a rank and the kill of the remaining ranks.
        timeout: Seconds that a rank waits for another rank before it fails. After a rank has ended
            normally, the others have ``timeout + grace`` seconds. A rank that is suspended for
            ``timeout + grace / 2`` seconds is killed, because the others may be unable to notice
            it, for example if it serves the job's store. Defaults to None, which means no limit.
    """

    def __init__(
        self, ranks: Sequence[RankProcess], *, grace: float = GRACE, timeout: float | None = None
    ) -> None:
        self.signals: list[int] = []
        """Numbers of the signals that were received and forwarded to the ranks."""
        self._ranks = ranks
        self._grace = grace
        self._timeout = timeout
        self._suspended: dict[int, float] = {}
        self._exits: dict[int, RankExit] = {}
        self._deadline: float | None = None
        self._failed = False

    def run(self) -> list[RankExit]:
        """Waits for all ranks and returns how each ended, in the order of their ends."""
        try:
            with selectors.DefaultSelector() as selector, self._signals():
                for rank in self._ranks:
                    rank.register(selector)
                while len(self._exits) < len(self._ranks):
                    for key, _ in selector.select(_TICK):
                        if key.data() == b"":
                            selector.unregister(key.fileobj)
                    self._poll_ranks(selector)
                    if self._is_over():
                        self._kill_ranks(self._running, selector)
                    elif self._timeout is not None:
                        self._kill_ranks(
                            self._suspended_for(self._timeout + self._grace / 2), selector
                        )
        finally:
            for rank in self._ranks:
                rank.kill()
        return list(self._exits.values())

    @property
    def _running(self) -> list[RankProcess]:
        return [rank for rank in self._ranks if rank.rank not in self._exits]

    def _poll_ranks(self, selector: selectors.BaseSelector) -> None:
        """Records ranks that have ended or reported a failure, and sets the others' deadline."""
        for rank in self._running:
            status = rank.poll()
            if status is not None:
                self._record_exit(rank, selector)
            if status or rank.report is not None:
                rank_exit = self._exits.get(rank.rank)
                if rank_exit is None or not rank_exit.clean:
                    self._failed = True
                    self._set_deadline(self._grace)
            if status is not None and self._timeout is not None:
                self._set_deadline(self._timeout + self._grace)

    def _set_deadline(self, seconds: float) -> None:
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

    def _kill_ranks(self, ranks: Sequence[RankProcess], selector: selectors.BaseSelector) -> None:
        for rank in ranks:
            suspended = rank.suspended
            rank.kill()
            self._record_exit(rank, selector, killed=True, suspended=suspended)
            self._failed = True
            self._set_deadline(self._grace)

    def _record_exit(
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
