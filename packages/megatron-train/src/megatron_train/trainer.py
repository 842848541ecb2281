"""The training loop: steps, evaluation and where the run stands; everything else is a callback.

A step sees a whole global batch as micro-batches. The denominators of its losses are known before
the first forward pass, from labels and masks alone, so every gradient is that of ``sum over true
tokens / number of true tokens`` however the batch is divided.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron_optim import LearningRateSchedule, Optimizer, WeightDecaySchedule
from torch import Tensor

from megatron_train.errors import TrainError
from megatron_train.tasks.task import Batch, Task

if TYPE_CHECKING:
    from megatron_train.callbacks.callback import Callback

MAX_NAN_STEPS = 10
"""Consecutive steps without a finite loss and gradient after which a run gives up."""


@dataclass(frozen=True)
class StepReport:
    """What one step did.

    Attributes:
        iteration: number of the step, from 1.
        consumed_samples: samples the run has seen, this step included.
        sums: each loss summed over the true tokens of the global batch.
        denominators: what each sum is divided by.
        learning_rate: the rate the step was made with.
        grad_norm: norm of the gradient over all parameters, before clipping.
        updated: whether the parameters were updated; a step that is not finite is skipped.
        finite: whether loss and gradient norm were finite numbers.
        seconds: duration of the step, with loading of its samples.
        samples: samples in the step.
        tokens: tokens in the step, masked ones included.
        flops: operations of its forward and backward pass.
    """

    iteration: int
    consumed_samples: int
    sums: Mapping[str, float]
    denominators: Mapping[str, float]
    learning_rate: float
    grad_norm: float
    updated: bool
    finite: bool
    seconds: float
    samples: int
    tokens: int
    flops: float

    @property
    def losses(self) -> dict[str, float]:
        """Each loss per true token."""
        return {name: self.sums[name] / self.denominators[name] for name in self.sums}


@dataclass(frozen=True)
class Stop:
    """Why a run ended before its last step, and the exit status that says so."""

    reason: str
    status: int = 0


class Trainer:
    """Train a task; see the module's description.

    Args:
        task: what is trained.
        optimizer: steps the parameters of the task's stages.
        learning_rate: learning rate by consumed samples.
        weight_decay: weight decay by consumed samples.
        steps: gives, from a number of consumed samples, an iterator over the micro-batches of each
            following step.
        train_iters: steps of the whole run.
        callbacks: called in this order.
        device: where micro-batches are moved to.
        compile: whether to compile forward and loss (and so the backward pass) with torch.compile.
    """

    def __init__(
        self,
        *,
        task: Task,
        optimizer: Optimizer,
        learning_rate: LearningRateSchedule,
        weight_decay: WeightDecaySchedule,
        steps: Callable[[int], Iterator[Sequence[Batch]]],
        train_iters: int,
        callbacks: Sequence["Callback"] = (),
        device: torch.device | str = "cpu",
        compile: bool = False,  # noqa: A002
    ) -> None:
        self.task = task
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.steps = steps
        self.train_iters = train_iters
        self.callbacks = list(callbacks)
        self.device = torch.device(device)
        self.iteration = 0
        self.consumed_samples = 0
        self.stopped: Stop | None = None
        self._nan_steps = 0
        self._sums = torch.compile(self._forward, dynamic=False) if compile else self._forward

    # -- the loop ------------------------------------------------------------------------------

    def run(self) -> Stop | None:
        """Train until the last step, or until `stop` was called; returns why it stopped early.

        Raises:
            TrainError: no step out of ten in a row had a finite loss and gradient.
        """
        for callback in self.callbacks:
            callback.on_start(self)
        steps = self.steps(self.consumed_samples)
        while self.iteration < self.train_iters and self.stopped is None:
            report = self.step(steps)
            for callback in self.callbacks:
                callback.on_step(self, report)
        for callback in self.callbacks:
            callback.on_end(self)
        return self.stopped if self.iteration < self.train_iters else None

    def stop(self, stop: Stop) -> None:
        """End the run after the current step; the first reason given counts."""
        self.stopped = self.stopped or stop

    def step(self, steps: Iterator[Sequence[Batch]]) -> StepReport:
        """Take the next global batch from ``steps`` and make one step with it."""
        start = time.perf_counter()
        batches = next(steps)
        denominators = self.task.denominators(batches)
        sums = self._accumulate(batches, denominators)
        learning_rate = self.learning_rate.at(self.consumed_samples)
        finite, updated, grad_norm = all(map(math.isfinite, sums.values())), False, math.nan
        if finite:
            result = self.optimizer.step(learning_rate, self.weight_decay.at(self.consumed_samples))
            updated, grad_norm = not result.skipped, result.grad_norm
            finite = math.isfinite(grad_norm)
        self.optimizer.zero_grad()
        samples = sum(len(batch["tokens"]) for batch in batches)
        self.iteration += 1
        self.consumed_samples += samples
        self._count_nan(finite)
        return StepReport(
            iteration=self.iteration,
            consumed_samples=self.consumed_samples,
            sums=sums,
            denominators=denominators,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            updated=updated,
            finite=finite,
            seconds=time.perf_counter() - start,
            samples=samples,
            tokens=sum(batch["tokens"].numel() for batch in batches),
            flops=self.task.flops(batches),
        )

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Return each loss per true token over ``batches``; changes nothing."""
        totals: dict[str, float] = {}
        counts: dict[str, float] = {}
        for stage in self.task.stages:
            stage.eval()
        with torch.no_grad():
            for batch in batches:
                for name, count in self.task.denominators([batch]).items():
                    counts[name] = counts.get(name, 0.0) + count
                for name, value in self._sums(self._move(batch)).items():
                    totals[name] = totals.get(name, 0.0) + float(value)
        for stage in self.task.stages:
            stage.train()
        return {name: totals[name] / counts[name] for name in totals if counts[name]}

    # -- where the run stands ------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the run's position and the state of its callbacks as plain values."""
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "nan_steps": self._nan_steps,
            "callbacks": {c.name: c.state() for c in self.callbacks if c.name},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.iteration = state["iteration"]
        self.consumed_samples = state["consumed_samples"]
        self._nan_steps = state["nan_steps"]
        for callback in self.callbacks:
            if callback.name in state["callbacks"]:
                callback.load_state(state["callbacks"][callback.name])

    # -- parts of a step -----------------------------------------------------------------------

    def _forward(self, batch: Batch) -> dict[str, Tensor]:
        return self.task.loss(self.task.forward(batch), batch)

    def _accumulate(
        self, batches: Sequence[Batch], denominators: Mapping[str, float]
    ) -> dict[str, float]:
        """Add the gradients of all micro-batches; return the sum of each loss."""
        totals: dict[str, Tensor] = {}
        for batch in batches:
            sums = self._sums(self._move(batch))
            shares = [sums[name] / denominators[name] for name in sums]
            torch.stack(shares).sum().backward()  # type: ignore[no-untyped-call]
            for name, value in sums.items():
                value = value.detach().double()
                totals[name] = totals[name] + value if name in totals else value
        return {name: float(value) for name, value in totals.items()}

    def _move(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return batch
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}

    def _count_nan(self, finite: bool) -> None:
        self._nan_steps = 0 if finite else self._nan_steps + 1
        if self._nan_steps >= MAX_NAN_STEPS:
            raise TrainError(
                f"no finite loss and gradient in {MAX_NAN_STEPS} steps up to step "
                f"{self.iteration}; lower --lr, lengthen the warm-up, or look at their data"
            )
