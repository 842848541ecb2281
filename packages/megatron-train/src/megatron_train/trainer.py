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

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

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
from megatron_train.finiteness import FinitenessCheck, UnreadStep
from megatron_train.observation import NO_REPORTS, Observation
from megatron_train.saved_values import read_value, short_repr
from megatron_train.statistics import Statistics
from megatron_train.step_report import StepReport, StepValues
from megatron_train.tasks.task import MicroBatch, Task, reported_values
from megatron_train.transfer import pack

_SCHEDULES: Mapping[str, type[LearningRateSchedule] | type[WeightDecaySchedule]] = {
    "learning_rate": LearningRateSchedule,
    "decoupled_learning_rate": LearningRateSchedule,
    "weight_decay": WeightDecaySchedule,
}
"""Schedules of a trainer by attribute."""


Schedule = LearningRateSchedule | WeightDecaySchedule


def saved_schedules(state: Mapping[str, Any]) -> dict[str, Schedule]:
    """Returns the schedules in a state of `Trainer.state` by name; none if it has no record.

    Raises:
        TrainError: The record is damaged.
    """
    if "schedules" not in state:
        return {}
    saved = read_value(state, "schedules", Mapping)  # type: ignore[type-abstract]
    found: dict[str, Schedule] = {}
    for name, kind in _SCHEDULES.items():
        fields = read_value(saved, name, dict)
        try:
            found[name] = kind(**fields)
        except (TypeError, ValueError) as error:
            raise TrainError(
                f"the saved state is damaged: the schedule {name} is {short_repr(fields)}: {error}"
            ) from None
    return found


def _read_spikes(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the saved state of a `SpikeDetector`."""
    saved = read_value(state, "spikes", dict)
    means = read_value(saved, "means", list)
    if not all(isinstance(mean, float) for mean in means):
        raise TrainError(f"the saved state is damaged: 'means' is {short_repr(means)}")
    return {"means": means, "updates": read_value(saved, "updates", int)}


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
        self._iterations_to_skip = frozenset(iterations_to_skip)
        self.averages = averages
        self.spikes, self.statistics, self.observation = spikes, statistics, observation
        self.evaluates_averages = averages is not None and evaluates_averages
        self.callbacks = list(callbacks)
        self.iteration = 0
        self.consumed_samples = 0
        self.stopped: Stop | None = None
        self._all_agree_to_stop = False
        self._steps_behind = 0 if engine.mesh.device.type == "cpu" else 1
        self.finiteness = FinitenessCheck(engine, optimizer, ends_run=check_for_nan)
        self._requests: deque[HostCopy] = deque()

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
            TrainError: Steps were not finite; see `FinitenessCheck.read`.
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
        self.finiteness.read(0)

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
        halted = self.finiteness.halting_loss(self._steps_behind)
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
        self.finiteness.add(UnreadStep(number, values, batches, denominators), faulty)
        if self._steps_behind == 0:
            self.finiteness.read(0, has_gradients=True)
        self.engine.stages.update_states(unless=result.skipped)
        self.engine.stages.zero()
        totals = self.engine.batch_totals(batches)
        self.iteration += 1
        self.consumed_samples += totals.samples
        self.finiteness.read(self._steps_behind)
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
            "nan_steps": self.finiteness.nan_steps,
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
        self.finiteness.nan_steps = read_value(state, "nan_steps", int)
        kept = read_value(state, "callbacks", Mapping)  # type: ignore[type-abstract]
        if self.spikes is not None and "spikes" in state:
            self.spikes.load_state(_read_spikes(state))
        for callback in self.callbacks:
            if callback.name in kept:
                callback.load_state(kept[callback.name])

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The schedules of learning rates and weight decay by name."""
        return {name: getattr(self, name) for name in _SCHEDULES}

    def load_schedules(self, state: Mapping[str, Any]) -> None:
        """Replaces the schedules of learning rate and weight decay by those of a saved state.

        Raises:
            TrainError: The state has no schedules, or damaged ones.
        """
        if "schedules" not in state:
            raise TrainError("it has no record of its schedules; set them with flags")
        for name, schedule in saved_schedules(state).items():
            setattr(self, name, schedule)

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
        means = [sums[name] / denominators[name] for name in self.task.losses]  # none is 0
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
        request = pack([-1 if self.stopped is None else self.stopped.status], mesh.device)
        latest = all_reduce(request, world, op="max", purpose="requests to stop", keeps_nan=False)
        self._requests.append(HostCopy(latest))
        if len(self._requests) <= self._steps_behind:
            return False
        status = int(self._requests.popleft().read())
        if status < 0 or mesh.is_imagined:
            return False
        self.stop(Stop("another rank received a request to stop", status))
        return True
