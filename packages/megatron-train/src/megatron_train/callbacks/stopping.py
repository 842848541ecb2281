"""Ends a run early after a complete step: at an interval, after a time, or on a signal."""

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from megatron_train.trainer import Callback, Stop

if TYPE_CHECKING:
    from megatron_train.step_report import StepReport
    from megatron_train.trainer import Trainer

_AFTER_THIS_STEP = "stopping after this step; send it again to stop at once"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopAt(Callback):
    """Stops the run at the next multiple of ``interval`` steps, or after ``minutes`` minutes."""

    def __init__(self, interval: int | None, minutes: float | None) -> None:
        self._every = interval
        self._minutes = minutes
        self._start = time.monotonic()

    def on_step(self, trainer: "Trainer", report: "StepReport") -> None:
        """Stops the run if a limit is reached."""
        if self._every is not None and report.iteration % self._every == 0:
            trainer.stop(Stop(f"--exit-interval {self._every}", agreed=True))
        minutes = (time.monotonic() - self._start) / 60
        if self._minutes is not None and minutes >= self._minutes:
            trainer.stop(Stop(f"--exit-duration-in-mins {self._minutes:g}"))


class StopOnSignal:
    """A context in which SIGTERM or SIGINT stops the trainer after the current step.

    A second signal raises KeyboardInterrupt.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._stop) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._trainer.stopped is not None:
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        self._trainer.stop(Stop(name, status=128 + number))
        if self._trainer.engine.mesh.rank == 0:
            # os.write avoids the buffers and locks of the code that the signal has interrupted.
            with contextlib.suppress(OSError, ValueError):
                os.write(sys.stderr.fileno(), f"{name}: {_AFTER_THIS_STEP}\n".encode())
