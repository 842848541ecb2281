"""Skips steps whose gradient norm or loss is a spike, as the device decides.

    detector = SpikeDetector(SpikeConfig(skip_grad_norm_spike=4.0), mesh.device)
    result = optimizer.step(lr, veto=lambda norm: detector.spiked(norm, losses))
    detector.update(result.skipped)

A running mean covers about ``spike_window`` updates: the first ones with equal weights, and then
``mean += (value - mean) / spike_window``. Skipped steps do not change it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from megatron_optim.errors import OptimError
from megatron_optim.spike_config import SpikeConfig


class SpikeDetector:
    """Compares each step with running means. No method but `state` waits for the device.

    Args:
        config: The limits.
        device: The device on which the means are kept.
    """

    def __init__(self, config: SpikeConfig, device: torch.device) -> None:
        self._config = config
        self._updates = torch.zeros((), dtype=torch.int64, device=device)
        self._means: Float64[Tensor, " values"] | None = None
        self._values: Float64[Tensor, " values"] | None = None

    @torch.no_grad()
    def spiked(self, norm: Tensor, losses: Sequence[Tensor] = ()) -> Bool[Tensor, ""]:
        """Returns whether a step is to be skipped, equally on all ranks.

        Args:
            norm: The norm of the gradient before clipping, equal on all ranks.
            losses: The losses of the step, as many in every step.

        Raises:
            OptimError: The number of losses differs from that of the means.
        """
        config = self._config
        self._values = values = torch.stack([norm, *losses]).double()
        if self._means is None:
            self._means = torch.zeros_like(values)
        if len(values) != len(self._means):
            raise OptimError(
                f"{len(values) - 1} losses are compared with running means of "
                f"{len(self._means) - 1}; give as many losses in every step"
            )
        factors = torch.full_like(values, config.skip_loss_spike or math.inf)
        factors[0].fill_(config.skip_grad_norm_spike or math.inf)
        ready = self._updates >= config.spike_window
        limits = torch.where(ready, factors * self._means, math.inf)
        return (values > limits).any() | (norm > (config.skip_grad_norm or math.inf))

    @torch.no_grad()
    def update(self, skipped: Bool[Tensor, ""]) -> None:
        """Takes the last step into the means, unless it was skipped."""
        if self._values is None or self._means is None:
            return
        count = (self._updates + 1).clamp(max=self._config.spike_window)
        moved = self._means + (self._values - self._means) / count
        self._means = torch.where(skipped, self._means, moved)
        self._updates += ~skipped

    def state(self) -> dict[str, Any]:
        """Returns the values to save. Waits for the device."""
        means = [] if self._means is None else self._means.tolist()
        return {"updates": int(self._updates), "means": means}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the values that `state` returned."""
        means = [float(value) for value in state["means"]]
        device = self._updates.device
        self._means = torch.tensor(means, dtype=torch.float64, device=device) if means else None
        self._updates.fill_(int(state["updates"]))
