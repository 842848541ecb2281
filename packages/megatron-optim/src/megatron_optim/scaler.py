"""The loss scale of a run in fp16, kept on the device.

An fp16 number cannot be smaller than 2^-24, so small gradients would be rounded to 0. The loss is
therefore multiplied by a scale before the backward pass, and the optimizer divides the gradients by
it (Micikevicius et al. 2018, "Mixed Precision Training"). A scale that is too high lets gradients
overflow. The step is then skipped. The dynamic scale follows Megatron-LM's rules:

- An overflow ends a sequence of good steps and takes 1 from the hysteresis. If nothing is left of
  the hysteresis, the scale is halved, but not below the minimum.
- After ``loss_scale_window`` good steps in sequence, the scale is doubled and the hysteresis is
  full again.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from megatron_optim.errors import OptimError
from megatron_optim.loss_scale_config import LossScaleConfig

GROWTH, BACKOFF = 2.0, 0.5


class LossScaler:
    """A constant or dynamic loss scale. No method but `scalars` waits for the device.

    Args:
        config: The settings.
        device: The device on which the scale is kept.

    Attributes:
        scale: The scale of the current step.
        lowest: The scale below which the scale cannot fall.
    """

    def __init__(self, config: LossScaleConfig, device: torch.device) -> None:
        self._config = config
        constant = config.loss_scale
        self.lowest = config.min_loss_scale if constant is None else constant
        first = config.initial_loss_scale if constant is None else constant
        self.scale: Float32[Tensor, ""] = torch.full((), first, device=device)
        # Good steps in sequence, and what is left of the hysteresis.
        self._good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._hysteresis = torch.full_like(self._good_steps, config.hysteresis)

    @torch.no_grad()
    def update(self, overflow: Bool[Tensor, ""]) -> None:
        """Adapts a dynamic scale after a step, equally on every rank.

        Args:
            overflow: Whether the step was skipped because a number was not finite.
        """
        config = self._config
        if config.loss_scale is not None:
            return
        hysteresis = (self._hysteresis - overflow.long()).clamp(min=0)
        good_steps = (self._good_steps + 1) * ~overflow
        grows = good_steps == config.loss_scale_window
        falls = overflow & (hysteresis == 0)
        lowered = (self.scale * BACKOFF).clamp(min=config.min_loss_scale)
        raised = torch.where(grows, self.scale * GROWTH, self.scale)
        self.scale = torch.where(falls, lowered, raised)
        self._good_steps = good_steps * ~grows
        self._hysteresis = torch.where(grows, config.hysteresis, hysteresis)

    def scalars(self) -> dict[str, Any]:
        """Returns the values to save; a constant scale has none. Waits for the device."""
        if self._config.loss_scale is not None:
            return {}
        state = torch.stack([self.scale.double(), self._good_steps, self._hysteresis])
        scale, good_steps, hysteresis = state.tolist()
        return {
            "loss_scale": scale,
            "loss_scale_good_steps": int(good_steps),
            "loss_scale_hysteresis": int(hysteresis),
        }

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Restores the values that `scalars` returned.

        Raises:
            OptimError: The saved scale is not a positive number.
        """
        if self._config.loss_scale is not None:
            return
        scale = float(scalars["loss_scale"])
        if not 0.0 < scale < math.inf:
            raise OptimError(f"the loss scale in the checkpoint is {scale}; it must be positive")
        self.scale.fill_(scale)
        self._good_steps.fill_(int(scalars["loss_scale_good_steps"]))
        self._hysteresis.fill_(int(scalars["loss_scale_hysteresis"]))
