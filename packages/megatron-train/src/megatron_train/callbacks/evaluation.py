"""Callbacks that measure the validation loss at intervals and the test loss after the run."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from megatron_train.callbacks.listener import Listener
from megatron_train.metrics.console import Console
from megatron_train.metrics.lines import evaluation_lines
from megatron_train.tasks.task import MicroBatch
from megatron_train.trainer import Callback

if TYPE_CHECKING:
    from megatron_train.step_report import StepReport
    from megatron_train.trainer import Trainer


class Evaluation(Callback):
    """Evaluates every ``interval`` steps and after the last step, always on the same samples.

    Args:
        console: Console that prints the result.
        batches: Returns the validation micro-batches, one sequence for each global batch.
        interval: Number of steps between evaluations.
        listeners: Called with every result.
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
        """Evaluates if an interval or the run ends with this step."""
        last = report.iteration == trainer.train_iters
        if report.iteration % self._every and not last:
            return
        losses = trainer.evaluate(self._batches())
        label = f"iteration {report.iteration}" + _weights(trainer)
        for line in evaluation_lines(label, losses, trainer.task.losses):
            self._console.print_line(line)
        for listener in self._listeners:
            listener(report.iteration, losses)


class TestSetEvaluation(Callback):
    """Measures the loss on the test set once, after the last step of the run.

    Args:
        console: Console that prints the result.
        batches: Returns the test micro-batches, one sequence for each global batch.
        listeners: Called with the result.
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
        """Evaluates the test set if the run ends with this step."""
        if report.iteration < trainer.train_iters:
            return
        losses = trainer.evaluate(self._batches())
        label = f"iteration {report.iteration} on test set" + _weights(trainer)
        for line in evaluation_lines(label, losses, trainer.task.losses):
            self._console.print_line(line)
        for listener in self._listeners:
            listener(report.iteration, losses)


def _weights(trainer: "Trainer") -> str:
    """Returns words for weights that are not those of the training."""
    return " with averaged weights" if trainer.evaluates_averages else ""
