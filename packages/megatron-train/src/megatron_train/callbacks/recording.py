"""Callbacks that record and show a run: metrics file, loss plot, TensorBoard, progress bar."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_train._command import one_line
from megatron_train.errors import TrainError
from megatron_train.metrics import plot, records
from megatron_train.metrics.console import Console
from megatron_train.metrics.event_file import EventFile
from megatron_train.step_report import UnreadReports
from megatron_train.tasks.task import layer_values
from megatron_train.trainer import Callback

if TYPE_CHECKING:
    from megatron_train.engine import BatchTotals
    from megatron_train.step_report import StepReport
    from megatron_train.trainer import Trainer


class Recorder(Callback):
    """Appends steps and evaluations to ``folder/metrics.jsonl`` and draws ``folder/loss.png``.

    A step is recorded when its values have arrived from the device, for which nothing waits.

    Args:
        folder: Folder of the run.
        facts: Values that the event ``start`` records in addition to the step.
        console: Console that prints a warning if the plot cannot be drawn.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], console: Console) -> None:
        self._console = console
        self._folder = folder
        self._facts = facts
        self._losses: list[str] = []
        self._unread = UnreadReports()
        self._writer: records.RecordWriter

    def on_start(self, trainer: "Trainer") -> None:
        """Opens the file and records the event ``start``."""
        self._writer = records.RecordWriter(self._folder / records.FILE_NAME)
        self._event("start", trainer, **self._facts)

    def on_step(self, trainer: "Trainer", report: "StepReport") -> None:
        """Records the step, and earlier ones that have arrived meanwhile."""
        self._unread.add(report)
        self._record_steps()

    def on_listed_step(self, trainer: "Trainer", totals: "BatchTotals") -> None:
        """Records the event ``skip``."""
        self._record_steps(wait=True)
        self._event("skip", trainer, samples=totals.samples)

    def _record_steps(self, *, wait: bool = False) -> None:
        """Records the steps whose values have arrived; with ``wait``, all of them."""
        for report in self._unread.take(wait=wait):
            self._losses = list(report.losses)
            self._writer.write(
                {
                    "kind": "train",
                    "iteration": report.iteration,
                    "consumed_samples": report.consumed_samples,
                    **_finite(report.losses),
                    "learning_rate": report.learning_rate,
                    "grad_norm": report.grad_norm if math.isfinite(report.grad_norm) else None,
                    "updated": report.updated,
                    **({} if report.loss_scale == 1.0 else {"loss_scale": report.loss_scale}),
                    "seconds": report.seconds,
                    "tokens": report.tokens,
                    **_finite(report.statistics),
                    **_finite(layer_values(report.task, report.counts)),
                }
            )

    def record_log_line(self, iteration: int, losses: dict[str, float]) -> None:
        """Records the losses of a log line, which cover all steps of its interval."""
        self._record_steps(wait=True)
        self._writer.write({"kind": "log", "iteration": iteration, **_finite(losses)})

    def record_validation(self, iteration: int, losses: dict[str, float]) -> None:
        """Records the losses of an evaluation."""
        self._record_steps(wait=True)
        self._writer.write({"kind": "validation", "iteration": iteration, **_finite(losses)})

    def record_test(self, iteration: int, losses: dict[str, float]) -> None:
        """Records the losses on the test set as the event ``test``."""
        self._record_steps(wait=True)
        record = {"kind": "event", "event": "test", "iteration": iteration, **_finite(losses)}
        self._writer.write(record)

    def on_end(self, trainer: "Trainer") -> None:
        """Records the event ``end`` and draws the loss plot."""
        self._record_steps(wait=True)
        reason = trainer.stopped.reason if trainer.stopped else "done"
        self._event("end", trainer, reason=reason)
        self._writer.close()
        if self._losses:
            try:
                done = records.read_records(self._folder / records.FILE_NAME)
                plot.plot_losses(done, self._losses[0], self._folder / plot.FILE_NAME)
            except (TrainError, OSError) as error:  # the other ranks continue to the last save
                self._console.warn(f"{plot.FILE_NAME} is not drawn: {one_line(error)}")

    def _event(self, name: str, trainer: "Trainer", **more: Any) -> None:
        record = {"kind": "event", "event": name, "iteration": trainer.iteration, **more}
        self._writer.write(record)


class TensorBoard(Callback):
    """Writes scalars of every ``interval``-th step and of evaluations with Megatron-LM's names."""

    def __init__(self, folder: Path, interval: int) -> None:
        self._folder = folder
        self._every = interval
        self._writer: EventFile | None = None

    def on_start(self, trainer: "Trainer") -> None:
        """Opens an event file; TensorBoard drops values of later steps in earlier files."""
        self._writer = EventFile(self._folder, purge_step=trainer.iteration + 1)

    def on_step(self, trainer: "Trainer", report: "StepReport") -> None:
        """Writes the scalars of the step."""
        if report.iteration % self._every:
            return
        scalars = {
            **report.losses,
            "learning-rate": report.learning_rate,
            "grad-norm": report.grad_norm,
            "batch-size": float(report.samples),
            "tokens-per-second": report.tokens / report.seconds,
            **layer_values(trainer.task, report.counts),
        }
        self._write(report.iteration, scalars)

    def write_validation(self, iteration: int, losses: dict[str, float]) -> None:
        """Writes losses and perplexities of an evaluation."""
        for name, value in losses.items():
            ppl = math.exp(min(20.0, value))
            self._write(iteration, {f"{name} validation": value, f"{name} validation ppl": ppl})

    def on_end(self, trainer: "Trainer") -> None:
        """Closes the event file."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, iteration: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            if self._writer is not None:
                self._writer.add_scalar(name, value, iteration)


class ProgressBar(Callback):
    """Shows a progress bar with tokens/s and the remaining time."""

    def __init__(self, console: Console, samples: int, tokens_per_sample: int) -> None:
        self._console = console
        self._samples, self._tokens = samples, tokens_per_sample
        self._unread = UnreadReports()
        self._newest = ""

    def on_start(self, trainer: "Trainer") -> None:
        """Shows the bar."""
        self._console.start_bar(
            self._samples * self._tokens, trainer.consumed_samples * self._tokens
        )

    def on_step(self, trainer: "Trainer", report: "StepReport") -> None:
        """Advances the bar, and shows the losses of the last step that has arrived."""
        self._unread.add(report)
        for ready in self._unread.take():
            loss = ", ".join(f"{name} {value:.3f}" for name, value in ready.losses.items())
            self._newest = f"step {ready.iteration}, {loss}"
        self._console.advance_bar(report.tokens, self._newest)

    def on_listed_step(self, trainer: "Trainer", totals: "BatchTotals") -> None:
        """Advances the bar."""
        self._console.advance_bar(totals.tokens, self._newest)

    def on_end(self, trainer: "Trainer") -> None:
        """Removes the bar."""
        self._console.stop_bar()


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Replaces NaN and infinities, which JSON cannot hold, by None."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
