"""The result of a step, and how the host or the device decides to skip it."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float32, Float64
from megatron_parallel.imagined import read_numbers
from torch import Tensor

from megatron_optim.param_groups import ParameterGroup
from megatron_optim.update_rule import UnreadStep

Rates = tuple[float, float | None, float]
"""Learning rate, that of token embeddings and output matrices, and weight decay of a step."""


class StepResult(NamedTuple):
    """The result of one optimizer step. Tensors are scalars on the device of the mesh."""

    grad_norm: Float64[Tensor, ""]
    """The norm of the whole gradient before clipping."""
    clip_coefficient: Float64[Tensor, ""]
    """The factor that the gradient was multiplied by; 1 if it was not clipped."""
    skipped: Bool[Tensor, ""]
    """Whether the step was skipped, because a number was not finite or by a veto."""
    overflow: Bool[Tensor, ""] | None = None
    """Whether the step was skipped because scaled gradients overflowed, although the losses were
    finite. None without a loss scale."""
    loss_scale: Float32[Tensor, ""] | None = None
    """The loss scale of the step, by which the norm is divided already. None without one."""
    vetoed: Bool[Tensor, ""] | None = None
    """Whether the step was finite, but a veto skipped it. None without a veto."""


def host_decides(device: torch.device, groups: Iterable[ParameterGroup]) -> bool:
    """Returns whether the host reads if a step is finite, instead of the device skipping it.

    Reading is free on a CPU, and necessary if an update rule cannot skip a step by itself.
    """
    return device.type == "cpu" or any(device.type not in each.rule.decides_on for each in groups)


class Decision(NamedTuple):
    """What the host has read of a step.

    Attributes:
        factor: The factor that clips and unscales gradients.
        updates: Whether the step updates anything.
        number: The number of the update, from 1, if it does.
    """

    factor: float
    updates: bool
    number: int

    @classmethod
    def read(cls, factor: Tensor, updates: Tensor, count: Tensor) -> "Decision":
        """Reads the decision, for which the host waits once. ``count`` updates went before."""
        if factor.device.type == "cpu":  # no wait, so that no operation has to join them
            return cls(float(factor), bool(updates), int(count) + 1)
        numbers = read_numbers(torch.stack([factor, updates, count]), lambda: (1.0, 1.0, 0.0))
        return cls(numbers[0], bool(numbers[1]), int(numbers[2]) + 1)


def unread_step(
    gradients: Iterable[Tensor], factor: Tensor | None, updates: Tensor, number: Tensor
) -> UnreadStep:
    """Returns the numbers of a step for `UpdateRule.update_unread`.

    Gradients in float64 are multiplied in place, since divisors are in float32.

    Args:
        gradients: The gradients.
        factor: The factor that clips and unscales gradients; None if they are left as they are.
        updates: Whether the step updates anything.
        number: The number of the update, from 1.
    """
    tensors, divisor = list(gradients), None
    if factor is not None and any(each.dtype == torch.float64 for each in tensors):
        torch._foreach_mul_(tensors, factor)
    elif factor is not None:
        divisor = factor.reciprocal().float()
    return UnreadStep(number.float(), (~updates).float(), divisor)
