"""Measure the validation loss at intervals and at the end, and the test loss once."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from megatron_train.callbacks.listener import Listener
from megatron_train.metrics.console import Console
from megatron_train.metrics.lines import evaluation_lines
from megatron_train.tasks.task import MicroBatch
from megatron_train.trainer import Callback

if TYPE_CHECKING:
    from megatron_train.trainer import StepReport, Trainer


class Evaluation(Callback):
    """Evaluate every ``interval`` steps and after the last step, always on the same samples.

    Args:
        console: where the result is printed.
        batches: gives the validation micro-batches anew, by global batch.
        interval: steps between evaluations.
        listeners: told every result.
    """

    def __init__(
        self,
        console: Console,
        batches: Callable[[], Iterable[Sequence[MicroBatch]]],
        interval: int,
        listeners: Iterable[Listener] = (),
    ) -> None:
        self._console = console
        self._batches = batches
        self._every = interval
        self._listeners = list(listeners)

    def on_step(self, trainer: "Trainer", report: "StepReport") -> None:
        """Evaluates where an interval ends, or the run."""
        last = report.iteration == trainer.train_iters
        if report.iteration % self._every and not last:
            return
        losses = trainer.evaluate(self._batches())
        label = f"iteration {report.iteration}"
        for line in evaluation_lines(label, losses, trainer.task.metrics):
            self._console.print_line(line)
        for listener in self._listeners:
            listener(report.iteration, losses)


class TestSetEvaluation(Callback):
    """Measure the loss on held-out text once, after the last step of the run.

    Args:
        console: where the result is printed.
        batches: gives the test micro-batches, by global batch.
        listeners: told the result.
    """

    def __init__(
        self,
        console: Console,
        batches: Callable[[], Iterable[Sequence[MicroBatch]]],
        listeners: Iterable[Listener] = (),
    ) -> None:
        self._console = console
        self._batches = batches
        self._listeners = list(listeners)

    def on_step(self, trainer: "Trainer", report: "StepReport") -> None:
        """Tests where the run ends."""
        if report.iteration < trainer.train_iters:
            return
        losses = trainer.evaluate(self._batches())
        label = f"iteration {report.iteration} on test set"
        for line in evaluation_lines(label, losses, trainer.task.metrics):
            self._console.print_line(line)
        for listener in self._listeners:
            listener(report.iteration, losses)
