"""The result of a step, and whether the host or the device decides to skip it."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float32, Float64
from torch import Tensor

from megatron_optim.param_groups import ParameterGroup

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
