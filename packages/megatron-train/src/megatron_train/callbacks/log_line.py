"""The callback that prints the training log line."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from megatron_train.callbacks.listener import Listener
from megatron_train.errors import TrainError
from megatron_train.metrics.console import Console
from megatron_train.metrics.lines import TrainingLine
from megatron_train.metrics.peak import Peak
from megatron_train.saved_values import read_value, short_repr
from megatron_train.statistics import NUM_ZEROS, PARAMS_NORM
from megatron_train.step_report import UnreadReports
from megatron_train.tasks.task import Task, reported_values, worst_layers
from megatron_train.trainer import Callback

if TYPE_CHECKING:
    from megatron_train.engine import BatchTotals
    from megatron_train.step_report import StepReport
    from megatron_train.trainer import Trainer


@dataclass
class IntervalSums:
    """Sums over the steps since the last line whose values have arrived."""

    steps: int = 0
    skipped: int = 0
    nan: int = 0
    seconds: float = 0.0
    tokens: int = 0
    flops: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    denominators: dict[str, float] = field(default_factory=dict)
    counts: dict[str, list[float]] = field(default_factory=dict)

    def add(self, report: "StepReport") -> None:
        """Adds one step; the losses of a step that is not finite are left out of the sums."""
        self.steps += 1
        self.skipped += not report.updated
        self.nan += not report.finite
        self.seconds += report.seconds
        self.tokens += report.tokens
        self.flops += report.flops
        for name in report.sums:
            self.sums.setdefault(name, 0.0)
            self.denominators.setdefault(name, 0.0)
            if report.finite:
                self.sums[name] += report.sums[name]
                self.denominators[name] += report.denominators[name]
        for name, values in report.counts.items() if report.finite else ():
            before = self.counts.get(name, [0.0] * len(values))
            self.counts[name] = [one + other for one, other in zip(before, values, strict=True)]

    def losses(self, task: Task | None) -> dict[str, float]:
        """Returns what is reported of the interval; a mean is NaN if no step was finite."""
        return reported_values(task, self.sums, self.denominators)


class LogLine(Callback):
    """Prints Megatron-LM's training line, followed by tokens/s and MFU.

    Checkpoints store the sums of an unfinished interval, so that the first line after a resume has
    the same losses as in an uninterrupted run. They do not store times: rates cover this process.
    """

    name = "log_line"

    def __init__(
        self,
        console: Console,
        interval: int,
        *,
        peak: Peak | None,
        throughput: bool = False,
        listeners: Iterable[Listener] = (),
    ) -> None:
        self._console = console
        self._every = interval
        self._peak = peak
        self._throughput = throughput
        self._listeners = list(listeners)
        self._interval = IntervalSums()
        self._unread = UnreadReports()

    def on_start(self, trainer: "Trainer") -> None:
        """Prints the peak that MFU is measured against."""
        if self._peak is not None:
            self._console.print_line(
                f"MFU is measured against {self._peak.flops_per_second:.4g} FLOP/s: "
                f"{self._peak.source}"
            )

    def on_step(self, trainer: "Trainer", report: "StepReport") -> None:
        """Adds the step, and prints a line if an interval ends with it."""
        self._unread.add(report)
        due = report.iteration % self._every == 0
        self._read(wait=due)
        if due:
            line = self._line(trainer, report)
            self._console.print_line(line.render(datetime.now()))
            for listener in self._listeners:
                listener(report.iteration, dict(line.losses))
            self._interval = IntervalSums()

    def on_listed_step(self, trainer: "Trainer", totals: "BatchTotals") -> None:
        """Prints that the step was skipped."""
        self._console.print_line(
            f"step {trainer.iteration} is in --iterations-to-skip: {totals.samples} samples are "
            "not trained on"
        )

    def _read(self, *, wait: bool) -> None:
        """Adds the steps whose values have arrived; with ``wait``, all of them.

        The time for which it waits belongs to the steps: the host has run ahead of the device.
        """
        for report in self._unread.take():
            self._interval.add(report)
        start = time.perf_counter()
        if wait and (late := self._unread.take(wait=True)):
            for report in late:
                self._interval.add(report)
            self._interval.seconds += time.perf_counter() - start

    def _line(self, trainer: "Trainer", report: "StepReport") -> TrainingLine:
        done = self._interval
        rate = done.flops / done.seconds / trainer.engine.mesh.world_size
        return TrainingLine(
            iteration=report.iteration,
            train_iters=trainer.train_iters,
            consumed_samples=report.consumed_samples,
            milliseconds=1000 * done.seconds / done.steps,
            learning_rate=report.learning_rate,
            global_batch_size=report.samples,
            losses=done.losses(trainer.task),
            grad_norm=report.grad_norm,
            skipped=done.skipped,
            nan=done.nan,
            tokens_per_second=done.tokens / done.seconds,
            teraflops=rate / 1e12 if self._throughput else None,
            mfu=rate / self._peak.flops_per_second if self._peak else None,
            loss_scale=report.loss_scale,
            num_zeros=report.statistics.get(NUM_ZEROS),
            params_norm=report.statistics.get(PARAMS_NORM),
            worst_layers=worst_layers(trainer.task, done.counts),
        )

    def state(self) -> dict[str, Any]:
        """Returns the sums of the unfinished interval, without its times."""
        self._read(wait=True)
        whole = asdict(self._interval)
        counted = ("counts",) if self._interval.counts else ()
        return {name: whole[name] for name in ("skipped", "nan", "sums", "denominators", *counted)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the sums of an unfinished interval.

        Raises:
            TrainError: The state is damaged.
        """
        sums, denominators = (
            {name: read_value(kept, name, float) for name in kept}
            for kept in (read_value(state, "sums", dict), read_value(state, "denominators", dict))
        )
        if sums.keys() != denominators.keys():
            raise TrainError(
                f"the saved state is damaged: sums of {sorted(sums)}, but denominators of "
                f"{sorted(denominators)}"
            )
        self._interval = IntervalSums(
            skipped=read_value(state, "skipped", int),
            nan=read_value(state, "nan", int),
            sums=sums,
            denominators=denominators,
            counts=_read_counts(state),
        )


def _read_counts(state: Mapping[str, Any]) -> dict[str, list[float]]:
    """Returns the saved counts of layers; the state has none if no layer counted."""
    saved = read_value(state, "counts", dict) if "counts" in state else {}
    for name, values in saved.items():
        if not isinstance(values, list) or not all(isinstance(each, float) for each in values):
            raise TrainError(
                f"the saved state is damaged: the counts of {short_repr(name)} are "
                f"{short_repr(values)}"
            )
    return saved
