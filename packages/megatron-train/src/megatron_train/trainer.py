"""The training loop: steps, evaluation and the position of the run. Callbacks do the rest.

A step processes a global batch; each data-parallel rank processes its micro-batches. The
denominators of losses are known before the first forward pass, from labels and masks alone. The
gradient is therefore that of ``sum over unmasked tokens / number of unmasked tokens``, independent
of how the batch is divided. Everything that determines how the run continues (losses, norms,
requests to stop) is equal on all ranks.

The host does not wait for a GPU. The device skips a step that is not finite, and what the host has
to know of a step (whether it was finite, whether a rank requests to stop) it reads one step later,
when it has arrived. On a CPU it is read at once.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from megatron_optim import (
    LearningRateSchedule,
    Optimizer,
    ParameterAverages,
    SpikeDetector,
    WeightDecaySchedule,
)
from megatron_parallel import HostCopy, all_reduce
from torch import Tensor

from megatron_train.engine import BatchTotals, StepEngine
from megatron_train.errors import TrainError
from megatron_train.observation import NO_REPORTS, Observation
from megatron_train.saved_values import read_value, short_repr
from megatron_train.statistics import Statistics
from megatron_train.step_report import StepReport, StepValues
from megatron_train.tasks.task import MicroBatch, Task, reported_values, unusable_layers
from megatron_train.transfer import pack

MAX_NAN_STEPS = 10
"""Maximum number of consecutive steps without a finite loss and gradient."""

_SCHEDULES: Mapping[str, type[LearningRateSchedule] | type[WeightDecaySchedule]] = {
    "learning_rate": LearningRateSchedule,
    "decoupled_learning_rate": LearningRateSchedule,
    "weight_decay": WeightDecaySchedule,
}
"""Schedules of a trainer by attribute."""


class Callback:
    """Base class of callbacks around the steps of a run. All hooks do nothing by default.

    A callback with a ``name`` has state, which is saved in checkpoints as plain values.
    """

    name = ""

    def on_start(self, trainer: "Trainer") -> None:
        """Runs before the first step of this process."""

    def on_step(self, trainer: "Trainer", report: StepReport) -> None:
        """Runs after each step."""

    def on_listed_step(self, trainer: "Trainer", totals: BatchTotals) -> None:
        """Runs instead of `on_step` after a step that only reads its samples.

        Args:
            trainer: The trainer, after the step.
            totals: Size of the global batch that was read.
        """

    def on_end(self, trainer: "Trainer") -> None:
        """Runs after the last step of this process."""

    def state(self) -> dict[str, Any]:
        """Returns the state to save in a checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state` returned."""


@dataclass(frozen=True)
class Stop:
    """The reason why a run ended before its last step.

    Attributes:
        reason: Words for the user.
        status: Exit status of the process.
        agreed: Whether all ranks request it after the same step, so that no rank has to ask others.
    """

    reason: str
    status: int = 0
    agreed: bool = False


@dataclass(frozen=True)
class _UnreadStep:
    """A step of which the host does not know yet whether it was finite.

    The inputs are kept to repeat the step, to find what was not finite.
    """

    iteration: int
    values: StepValues
    batches: Sequence[MicroBatch]
    denominators: Mapping[str, Tensor]


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
            step is skipped. On a GPU the run ends after the following step, which is skipped too.
        iterations_to_skip: Numbers of steps, from 1, that only read their samples.
        averages: Averages of the parameters, which every update moves.
        evaluates_averages: Whether evaluations use the averages.
        spikes: Decides on the device which finite steps are skipped.
        statistics: Measures gradients and parameters of some steps.
        observation: Chooses what layers report, and scales weights to bound attention scores.
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
        iterations_to_skip: Collection[int] = (),
        averages: ParameterAverages | None = None,
        evaluates_averages: bool = True,
        spikes: SpikeDetector | None = None,
        statistics: Statistics | None = None,
        observation: Observation | None = None,
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
        self._iterations_to_skip = frozenset(iterations_to_skip)
        self.averages = averages
        self.spikes, self.statistics, self.observation = spikes, statistics, observation
        self.evaluates_averages = averages is not None and evaluates_averages
        self.callbacks = list(callbacks)
        self.iteration = 0
        self.consumed_samples = 0
        self.stopped: Stop | None = None
        self._all_agree_to_stop = False
        self._nan_steps = 0
        self._steps_behind = 0 if engine.mesh.device.type == "cpu" else 1
        self._unread: deque[_UnreadStep] = deque()
        self._wishes: deque[HostCopy] = deque()
        self._halted: Tensor | None = None

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
            if self.iteration + 1 in self._iterations_to_skip:
                self._only_read(next(steps))
                continue
            report = self.step(steps)
            for callback in self.callbacks:
                callback.on_step(self, report)
            if self._all_stop():
                break
        self.settle()
        self.engine.stages.wait_for_parameters()
        for callback in self.callbacks:
            callback.on_end(self)
        return self.stopped if self.iteration < self.train_iters else None

    def stop(self, stop: Stop) -> None:
        """Ends the run after the current step on all ranks. Only the first reason is recorded.

        On several ranks with GPUs, the run ends one step later, unless the ranks agree already.
        """
        self.stopped = self.stopped or stop
        self._all_agree_to_stop |= stop.agreed

    def settle(self) -> None:
        """Waits until it is known whether all steps so far were finite. Call it on all ranks.

        Raises:
            TrainError: As `run` does.
        """
        self._read_steps(0)

    def step(self, steps: Iterator[Sequence[MicroBatch]]) -> StepReport:
        """Performs one step with the next global batch of ``steps``."""
        start = time.perf_counter()
        batches = self.engine.prepare(next(steps), self.iteration + 1)
        denominators = self.engine.denominators(batches)
        scaler = self.optimizer.scaler
        scale = None if scaler is None else scaler.scale
        observed, number = self.observation, self.iteration + 1
        reports = NO_REPORTS if observed is None else observed.reports(number)
        sums = self.engine.run(batches, denominators, number, scale, reports)
        consumed = self.consumed_samples
        learning_rate = self.learning_rate.at(consumed)
        decoupled = self.decoupled_learning_rate.at(consumed)
        decay = self.weight_decay.at(consumed)
        losses = [sums[name] for name in sums if name not in self.task.metrics]
        halted = self._halting_loss()
        measured, factors = dict[str, Tensor](), dict[str, Tensor]()
        if observed is not None:
            maxima = self.engine.maxima
            measured |= observed.measured(self.engine.counts, maxima, number)
            factors = observed.factors(maxima)
        if self.statistics is not None:
            measured |= self.statistics.before(self.optimizer, number)
        result = self.optimizer.step(
            learning_rate,
            decay,
            decoupled,
            losses=[*losses, *halted],
            veto=self._veto(sums, denominators),
            squares=None if self.statistics is None else self.statistics.squares(number),
            factors=factors,
        )
        if self.statistics is not None:
            measured |= self.statistics.after(self.optimizer, number)
        if self.spikes is not None:
            self.spikes.update(result.skipped)
        if self.averages is not None:
            self.averages.update(result.skipped)
        # An overflow under a loss scale is no fault of the run, nor is a spike.
        faulty = result.skipped
        for excused in (result.overflow, result.vetoed):
            faulty = faulty if excused is None else faulty & ~excused
        values = StepValues(
            sums,
            denominators,
            result.grad_norm,
            updated=~result.skipped,
            finite=~faulty,
            counts=self.engine.counts,
            device=self.engine.mesh.device,
            loss_scale=result.loss_scale,
            statistics=measured,
        )
        self._unread.append(_UnreadStep(self.iteration + 1, values, batches, denominators))
        if halted:
            self._halted = torch.where(faulty, math.nan, halted[0])
        if self._steps_behind == 0:
            self._read_steps(0, has_gradients=True)
        self.engine.stages.update_states(unless=result.skipped)
        self.engine.stages.zero()
        totals = self.engine.batch_totals(batches)
        self.iteration += 1
        self.consumed_samples += totals.samples
        self._read_steps(self._steps_behind)
        return StepReport(
            iteration=self.iteration,
            consumed_samples=self.consumed_samples,
            learning_rate=learning_rate,
            seconds=time.perf_counter() - start,
            samples=totals.samples,
            tokens=totals.tokens,
            flops=totals.flops,
            values=values,
            task=self.task,
        )

    def evaluate(self, steps: Iterable[Sequence[MicroBatch]]) -> dict[str, float]:
        """Returns what is reported of all micro-batches together; changes no state.

        Means whose denominator is 0 are left out.
        """
        if self.averages is None or not self.evaluates_averages:
            return self._evaluate(steps)
        with self.averages.in_model():
            return self._evaluate(steps)

    def _evaluate(self, steps: Iterable[Sequence[MicroBatch]]) -> dict[str, float]:
        """Evaluates with the weights that are in the model."""
        totals: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        for stage in self.task.stages:
            stage.eval()
        for read in steps:
            batches = self.engine.prepare(read, None)
            for name, value in self.engine.evaluate(batches).items():
                totals[name] = totals[name] + value if name in totals else value
            for name, count in self.engine.evaluation_denominators(batches).items():
                counts[name] = counts[name] + count if name in counts else count
        for stage in self.task.stages:
            stage.train()
        numbers = iter(pack([*totals.values(), *counts.values()], self.engine.mesh.device).tolist())
        sums, denominators = (dict(zip(n, numbers, strict=False)) for n in (totals, counts))
        found = reported_values(self.task, sums, denominators)
        return {name: value for name, value in found.items() if denominators.get(name, 1.0)}

    # -- position of the run -------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns the run's position and the state of its callbacks as plain values."""
        self.settle()
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "nan_steps": self._nan_steps,
            **({} if self.spikes is None else {"spikes": self.spikes.state()}),
            "schedules": {name: asdict(each) for name, each in self.schedules.items()},
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
        if self.spikes is not None and "spikes" in state:
            self.spikes.load_state(read_value(state, "spikes", dict))
        for callback in self.callbacks:
            if callback.name in kept:
                callback.load_state(kept[callback.name])

    @property
    def schedules(self) -> dict[str, LearningRateSchedule | WeightDecaySchedule]:
        """The schedules of learning rates and weight decay by name."""
        return {name: getattr(self, name) for name in _SCHEDULES}

    def load_schedules(self, state: Mapping[str, Any]) -> None:
        """Replaces the schedules of learning rate and weight decay by those of a saved state.

        Raises:
            TrainError: The state has no schedules, or damaged ones.
        """
        if "schedules" not in state:
            raise TrainError("it has no record of its schedules; set them with flags")
        saved = read_value(state, "schedules", Mapping)  # type: ignore[type-abstract]
        for name, kind in _SCHEDULES.items():
            fields = read_value(saved, name, dict)
            try:
                setattr(self, name, kind(**fields))
            except (TypeError, ValueError) as error:
                raise TrainError(
                    f"the saved state is damaged: the schedule {name} is {short_repr(fields)}: "
                    f"{error}"
                ) from None

    # -- parts of a step -----------------------------------------------------------------------

    def _only_read(self, batches: Sequence[MicroBatch]) -> None:
        """Counts a step whose samples were read, without computing anything."""
        totals = self.engine.batch_totals(batches)
        self.iteration += 1
        self.consumed_samples += totals.samples
        for callback in self.callbacks:
            callback.on_listed_step(self, totals)

    def _veto(
        self, sums: Mapping[str, Tensor], denominators: Mapping[str, Tensor]
    ) -> Callable[[Tensor], Tensor] | None:
        """Returns a function of the norm that decides whether the step is a spike."""
        spikes = self.spikes
        if spikes is None:
            return None
        means = [sums[name] / denominators[name].clamp(min=1e-30) for name in self.task.losses]
        return lambda norm: spikes.spiked(norm, means)

    def _all_stop(self) -> bool:
        """Returns whether any rank requests to stop, since a signal may reach only one of them.

        A request that arrives during this exchange counts after the next step, on this rank too,
        because the other ranks continue.
        """
        mesh = self.engine.mesh
        world = mesh.axis("world")
        if world.size == 1:
            return self.stopped is not None
        if self._all_agree_to_stop:
            return True
        wish = pack([-1 if self.stopped is None else self.stopped.status], mesh.device)
        self._wishes.append(HostCopy(all_reduce(wish, world, op="max", purpose="requests to stop")))
        if len(self._wishes) <= self._steps_behind:
            return False
        status = int(self._wishes.popleft().read())
        if status < 0 or mesh.is_imagined:
            return False
        self.stop(Stop("another rank received a request to stop", status))
        return True

    def _halting_loss(self) -> list[Tensor]:
        """Returns a loss that is NaN after a step that was not finite, if such a step ends the run.

        With it, the optimizer skips all steps until the host knows and ends the run.
        """
        if not self.check_for_nan or self._steps_behind == 0:
            return []
        if self._halted is None:
            self._halted = torch.zeros((), dtype=torch.float64, device=self.engine.mesh.device)
        return [self._halted]

    def _read_steps(self, behind: int, *, has_gradients: bool = False) -> None:
        """Reads whether steps were finite, except for the last ``behind`` steps.

        Args:
            behind: Number of steps that are left unread.
            has_gradients: Whether the stages have the gradients of the last step.
        """
        while len(self._unread) > behind:
            step = self._unread.popleft()
            read, scaler = step.values.read, self.optimizer.scaler
            if not read.finite and self.check_for_nan:
                raise TrainError(self._not_finite(step, has_gradients))
            skipped = read.finite and not read.updated
            spike = skipped and math.isfinite(read.grad_norm)  # otherwise the gradient overflowed
            stuck = spike or (skipped and scaler is not None and read.loss_scale <= scaler.lowest)
            self._nan_steps = 0 if read.finite and not stuck else self._nan_steps + 1
            if self._nan_steps >= MAX_NAN_STEPS:
                if spike:
                    raise TrainError(
                        f"{MAX_NAN_STEPS} steps up to step {step.iteration} were skipped as "
                        f"spikes, the last with the gradient norm {read.grad_norm:.4g}; raise "
                        "--skip-grad-norm, --skip-grad-norm-spike or --skip-loss-spike, or lower "
                        "--lr"
                    )
                if stuck:
                    raise TrainError(
                        f"the gradient overflowed in {MAX_NAN_STEPS} steps up to step "
                        f"{step.iteration}, although the loss scale was {read.loss_scale:g}, the "
                        "lowest that is allowed; lower --loss-scale or --min-loss-scale, or --lr"
                    )
                raise TrainError(
                    f"no finite loss and gradient in {MAX_NAN_STEPS} steps up to step "
                    f"{step.iteration}; lower --lr, lengthen the warm-up or inspect their data"
                )

    def _not_finite(self, step: _UnreadStep, has_gradients: bool) -> str:
        """Describes which losses or gradients of a step are not finite, equally on all ranks.

        If the stages do not have its gradients any more, the step is repeated. Its parameters have
        not changed.
        """
        sums, norm = step.values.read.sums, step.values.read.grad_norm
        losses = {name: sums[name] for name in sums if name not in self.task.metrics}
        wrong = [f"{name} is {value}" for name, value in losses.items() if not math.isfinite(value)]
        if not has_gradients:
            self.engine.stages.zero()
            scaler = self.optimizer.scaler
            scale = None if scaler is None else scaler.scale
            self.engine.run(step.batches, step.denominators, step.iteration, scale)
        if gradient := self.engine.stages.describe_nonfinite_gradients():
            wrong.append(gradient)
        if unusable := unusable_layers(self.task, step.values.read.counts):
            return f"step {step.iteration}: {'; '.join([*unusable, *wrong])}"
        if not wrong:
            wrong.append(f"the gradient is finite, but its norm is {norm}")
        return (
            f"step {step.iteration}: {'; '.join(wrong)}; lower --lr, lengthen the warm-up, "
            "inspect the data of this step, or skip such steps with "
            "--no-check-for-nan-in-loss-and-grad"
        )
