"""The training loop: steps, evaluation and the position of the run. Callbacks do the rest.

A step processes a global batch; each data-parallel rank processes its micro-batches. The
denominators of losses are known before the first forward pass, from labels and masks alone. The
gradient is therefore that of ``sum over unmasked tokens / number of unmasked tokens``, independent
of how the batch is divided. Everything that determines how the run continues (losses, norms,
requests to stop) is equal on all ranks.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron_optim import LearningRateSchedule, Optimizer, WeightDecaySchedule
from megatron_parallel import all_reduce
from torch import Tensor

from megatron_train.engine import StepEngine
from megatron_train.errors import TrainError
from megatron_train.saved_values import read_value
from megatron_train.tasks.task import MicroBatch, Task, reported_values

MAX_NAN_STEPS = 10
"""Maximum number of consecutive steps without a finite loss and gradient."""


@dataclass(frozen=True)
class StepReport:
    """The results of one step.

    Attributes:
        iteration: Number of the step, from 1.
        consumed_samples: Samples consumed by the run, including this step.
        sums: Sum of each loss and metric over the unmasked tokens of the global batch.
        denominators: Denominator of each sum.
        learning_rate: Learning rate of the step.
        grad_norm: Norm of the gradient over all parameters, before clipping.
        updated: Whether the parameters were updated; a step that is not finite is skipped.
        finite: Whether losses and gradient norm were finite.
        seconds: Duration of the step, including loading of its samples.
        samples: Number of samples in the step.
        tokens: Number of tokens in the step, including masked ones.
        flops: FLOPs of the forward and backward pass.
        counts: What layers counted over the global batch, by name (`CountingTask`).
        task: Task of the step, which may summarize its sums (`SummarizingTask`).
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
    counts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    task: Task | None = None

    @property
    def losses(self) -> dict[str, float]:
        """What is reported of the step: means per unmasked token or sample, and summaries."""
        return reported_values(self.task, self.sums, self.denominators)


class Callback:
    """Base class of callbacks around the steps of a run. All hooks do nothing by default.

    A callback with a ``name`` has state, which is saved in checkpoints as plain values.
    """

    name = ""

    def on_start(self, trainer: "Trainer") -> None:
        """Runs before the first step of this process."""

    def on_step(self, trainer: "Trainer", report: StepReport) -> None:
        """Runs after each step."""

    def on_end(self, trainer: "Trainer") -> None:
        """Runs after the last step of this process."""

    def state(self) -> dict[str, Any]:
        """Returns the state to save in a checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state` returned."""


@dataclass(frozen=True)
class Stop:
    """The reason why a run ended before its last step, and the exit status."""

    reason: str
    status: int = 0


class Trainer:
    """Trains a model with the steps of an engine; see the module's description.

    Args:
        engine: Engine that runs the task's micro-batches on this rank.
        optimizer: Optimizer of the engine's parameters.
        learning_rate: Learning rate by consumed samples.
        weight_decay: Weight decay by consumed samples.
        decoupled_learning_rate: Learning rate of token embeddings and output matrices by consumed
            samples. Defaults to ``learning_rate``.
        micro_batches: Returns, for a number of consumed samples, an iterator over this rank's
            micro-batches of each following step.
        train_iters: Number of steps of the whole run.
        check_for_nan: Whether a loss or gradient that is not finite ends the run. Otherwise the
            step is skipped.
        callbacks: Callbacks, called in this order.
    """

    def __init__(
        self,
        *,
        engine: StepEngine,
        optimizer: Optimizer,
        learning_rate: LearningRateSchedule,
        weight_decay: WeightDecaySchedule,
        decoupled_learning_rate: LearningRateSchedule | None = None,
        micro_batches: Callable[[int], Iterator[Sequence[MicroBatch]]],
        train_iters: int,
        check_for_nan: bool = False,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.engine = engine
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.decoupled_learning_rate = decoupled_learning_rate or learning_rate
        self.micro_batches = micro_batches
        self.train_iters = train_iters
        self.check_for_nan = check_for_nan
        self.callbacks = list(callbacks)
        self.iteration = 0
        self.consumed_samples = 0
        self.stopped: Stop | None = None
        self._nan_steps = 0

    @property
    def task(self) -> Task:
        """The task of the engine."""
        return self.engine.task

    # -- the loop ------------------------------------------------------------------------------

    def run(self) -> Stop | None:
        """Trains until the last step, or until `stop` is called.

        Returns:
            The reason why the run stopped early; None if it did not.

        Raises:
            TrainError: The loss or gradient was not finite in `MAX_NAN_STEPS` consecutive steps, or
                in one step with ``check_for_nan``.
        """
        for callback in self.callbacks:
            callback.on_start(self)
        steps = self.micro_batches(self.consumed_samples)
        while self.iteration < self.train_iters:
            report = self.step(steps)
            for callback in self.callbacks:
                callback.on_step(self, report)
            if self._all_stop():
                break
        self.engine.stages.wait_for_parameters()
        for callback in self.callbacks:
            callback.on_end(self)
        return self.stopped if self.iteration < self.train_iters else None

    def stop(self, stop: Stop) -> None:
        """Ends the run after the current step on all ranks. Only the first reason is recorded."""
        self.stopped = self.stopped or stop

    def step(self, steps: Iterator[Sequence[MicroBatch]]) -> StepReport:
        """Performs one step with the next global batch of ``steps``."""
        start = time.perf_counter()
        batches = self.engine.prepare(next(steps), self.iteration + 1)
        # 1 if all tokens are masked, so that the loss is 0.
        denominators = {n: c or 1.0 for n, c in self.engine.denominators(batches).items()}
        sums = self.engine.run(batches, denominators, self.iteration + 1)
        consumed = self.consumed_samples
        learning_rate = self.learning_rate.at(consumed)
        decoupled = self.decoupled_learning_rate.at(consumed)
        decay = self.weight_decay.at(consumed)
        losses = [sums[name] for name in sums if name not in self.task.metrics]
        result = self.optimizer.step(learning_rate, decay, decoupled, losses=losses)
        if result.skipped and self.check_for_nan:
            raise TrainError(self._not_finite(sums, float(result.grad_norm)))
        if not result.skipped:
            self.engine.stages.update_states()
        self.engine.stages.zero()
        totals = self.engine.batch_totals(batches)
        self.iteration += 1
        self.consumed_samples += totals.samples
        self._count_nan(finite=not result.skipped)
        grad_norm, *values = torch.stack([result.grad_norm, *sums.values()]).tolist()
        return StepReport(
            iteration=self.iteration,
            consumed_samples=self.consumed_samples,
            sums=dict(zip(sums, values, strict=True)),
            denominators=denominators,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            updated=not result.skipped,
            finite=not result.skipped,
            seconds=time.perf_counter() - start,
            samples=totals.samples,
            tokens=totals.tokens,
            flops=totals.flops,
            counts={name: values.tolist() for name, values in self.engine.counts.items()},
            task=self.task,
        )

    def evaluate(self, steps: Iterable[Sequence[MicroBatch]]) -> dict[str, float]:
        """Returns what is reported of all micro-batches together; changes no state.

        Means whose denominator is 0 are left out.
        """
        totals: dict[str, float] = {}
        counts: dict[str, float] = {}
        for stage in self.task.stages:
            stage.eval()
        for read in steps:
            batches = self.engine.prepare(read, None)
            for name, value in self.engine.evaluate(batches).items():
                totals[name] = totals.get(name, 0.0) + float(value)
            for name, count in self.engine.evaluation_denominators(batches).items():
                counts[name] = counts.get(name, 0.0) + count
        for stage in self.task.stages:
            stage.train()
        found = reported_values(self.task, totals, counts)
        return {name: value for name, value in found.items() if counts.get(name, 1.0)}

    # -- position of the run -------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns the run's position and the state of its callbacks as plain values."""
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "nan_steps": self._nan_steps,
            "callbacks": {c.name: c.state() for c in self.callbacks if c.name},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the position and the states of callbacks that `state` returned.

        Raises:
            TrainError: A value is missing or has another type.
        """
        self.iteration = read_value(state, "iteration", int)
        self.consumed_samples = read_value(state, "consumed_samples", int)
        self._nan_steps = read_value(state, "nan_steps", int)
        kept = read_value(state, "callbacks", Mapping)  # type: ignore[type-abstract]
        for callback in self.callbacks:
            if callback.name in kept:
                callback.load_state(kept[callback.name])

    # -- parts of a step -----------------------------------------------------------------------

    def _all_stop(self) -> bool:
        """Returns whether any rank requests to stop, since a signal may reach only one of them.

        A request that arrives during this exchange counts after the next step, on this rank too,
        because the other ranks continue.
        """
        world = self.engine.mesh.axis("world")
        if world.size == 1:
            return self.stopped is not None
        wish = -1 if self.stopped is None else self.stopped.status
        worst = torch.tensor([wish], dtype=torch.int64, device=self.engine.mesh.device)
        status = int(all_reduce(worst, world, op="max", purpose="requests to stop"))
        if status < 0:
            return False
        self.stop(Stop("another rank received a request to stop", status))
        return True

    def _not_finite(self, sums: Mapping[str, Tensor], grad_norm: float) -> str:
        """Describes which losses or gradients of the step are not finite, equally on all ranks."""
        losses = {name: float(sums[name]) for name in sums if name not in self.task.metrics}
        wrong = [f"{name} is {value}" for name, value in losses.items() if not math.isfinite(value)]
        if gradient := self.engine.stages.describe_nonfinite_gradients():
            wrong.append(gradient)
        if not wrong:
            wrong.append(f"the gradient is finite, but its norm is {grad_norm}")
        return (
            f"step {self.iteration + 1}: {'; '.join(wrong)}; lower --lr, lengthen the warm-up, "
            "inspect the data of this step, or skip such steps with "
            "--no-check-for-nan-in-loss-and-grad"
        )

    def _count_nan(self, finite: bool) -> None:
        self._nan_steps = 0 if finite else self._nan_steps + 1
        if self._nan_steps >= MAX_NAN_STEPS:
            raise TrainError(
                f"no finite loss and gradient in {MAX_NAN_STEPS} steps up to step "
                f"{self.iteration}; lower --lr, lengthen the warm-up or inspect their data"
            )
