"""Whether steps were finite, which the host of a GPU reads after the following step has begun."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from megatron_optim import Optimizer
from torch import Tensor

from megatron_train.engine import StepEngine
from megatron_train.errors import TrainError
from megatron_train.step_report import StepValues
from megatron_train.tasks.task import MicroBatch, unusable_layers

MAX_NAN_STEPS: Final = 10
"""Maximum number of consecutive steps without a finite loss and gradient."""


@dataclass(frozen=True)
class UnreadStep:
    """A step of which the host does not know yet whether it was finite.

    The inputs are stored to repeat the step, to find what was not finite.

    Attributes:
        iteration: Number of the step, from 1.
        values: Its losses and norm, which may be on the device.
        batches: Its micro-batches.
        denominators: Denominators of its losses.
    """

    iteration: int
    values: StepValues
    batches: Sequence[MicroBatch]
    denominators: Mapping[str, Tensor]


class FinitenessCheck:
    """Ends a run after steps that are not finite.

    Args:
        engine: Engine of the steps.
        optimizer: Optimizer of the steps.
        ends_run: Whether one step that is not finite ends the run.

    Attributes:
        ends_run: Whether one step that is not finite ends the run.
        nan_steps: Number of steps up to the last one read that were all unusable.
    """

    def __init__(self, engine: StepEngine, optimizer: Optimizer, *, ends_run: bool) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self.ends_run = ends_run
        self._unread: deque[UnreadStep] = deque()
        self._halted: Tensor | None = None
        self.nan_steps = 0

    def halting_loss(self, behind: int) -> list[Tensor]:
        """Returns a loss that is NaN after a step that was not finite, if such a step ends the run.

        With it, the optimizer skips all steps until the host knows and ends the run.

        Args:
            behind: Number of steps that the host leaves unread. With 0 there is no such loss.
        """
        if not self.ends_run or behind == 0:
            return []
        if self._halted is None:
            device = self._engine.mesh.device
            self._halted = torch.zeros((), dtype=torch.float64, device=device)
        return [self._halted]

    def add(self, step: UnreadStep, faulty: Tensor) -> None:
        """Adds a step.

        Args:
            step: The step, after its update.
            faulty: Whether it was not finite, a scalar on the device.
        """
        self._unread.append(step)
        if self._halted is not None:
            self._halted = torch.where(faulty, math.nan, self._halted)

    def read(self, behind: int, *, has_gradients: bool = False) -> None:
        """Reads whether steps were finite, except for the last ``behind`` steps.

        Args:
            behind: Number of steps that are left unread.
            has_gradients: Whether the stages have the gradients of the last step.

        Raises:
            TrainError: The loss or gradient was not finite in `MAX_NAN_STEPS` consecutive steps, or
                in one step with ``ends_run``; or all these steps were skipped.
        """
        while len(self._unread) > behind:
            step = self._unread.popleft()
            read, scaler = step.values.read, self._optimizer.scaler
            if not read.finite and self.ends_run:
                raise TrainError(self._describe(step, has_gradients))
            skipped = read.finite and not read.updated
            spike = skipped and math.isfinite(read.grad_norm)  # otherwise the gradient overflowed
            stuck = spike or (skipped and scaler is not None and read.loss_scale <= scaler.lowest)
            self.nan_steps = 0 if read.finite and not stuck else self.nan_steps + 1
            if self.nan_steps < MAX_NAN_STEPS:
                continue
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

    def _describe(self, step: UnreadStep, has_gradients: bool) -> str:
        """Describes which losses or gradients of a step are not finite, equally on all ranks.

        If the stages do not have its gradients any more, the step is repeated. Its parameters have
        not changed.
        """
        engine, task = self._engine, self._engine.task
        sums, norm = step.values.read.sums, step.values.read.grad_norm
        losses = {name: sums[name] for name in sums if name not in task.metrics}
        wrong = [f"{name} is {value}" for name, value in losses.items() if not math.isfinite(value)]
        if not has_gradients:
            engine.stages.zero()
            scaler = self._optimizer.scaler
            scale = None if scaler is None else scaler.scale
            engine.run(step.batches, step.denominators, step.iteration, scale)
        if gradient := engine.stages.describe_nonfinite_gradients():
            wrong.append(gradient)
        if unusable := unusable_layers(task, step.values.read.counts):
            return f"step {step.iteration}: {'; '.join([*unusable, *wrong])}"
        if not wrong:
            wrong.append(f"the gradient is finite, but its norm is {norm}")
        return (
            f"step {step.iteration}: {'; '.join(wrong)}; lower --lr, lengthen the warm-up, "
            "inspect the data of this step, or skip such steps with "
            "--no-check-for-nan-in-loss-and-grad"
        )
