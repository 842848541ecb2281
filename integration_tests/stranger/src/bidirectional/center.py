"""A running mean that is subtracted from the input: state that is not a parameter."""

import torch
from megatron_models import Placement
from torch import Tensor, nn

from bidirectional.config import BidirectionalSpec

RATE = 0.1


class Center(nn.Module):
    """Subtracts the running mean over all tokens of the global batches of earlier steps."""

    mean: Tensor

    def __init__(self, spec: BidirectionalSpec, placement: Placement) -> None:
        super().__init__()
        shape = (spec.hidden_size + 1,)
        self.running_mean = placement.register_state(
            self, spec.state(), "center.mean", self.updated_mean, observation_shape=shape
        )

    @staticmethod
    def updated_mean(mean: Tensor, observed: Tensor) -> Tensor:
        """Returns the mean ``[h]`` after a step; ``observed`` is a sum and a number of tokens."""
        count = observed[-1].clamp(min=1)  # a step may observe nothing
        return mean + RATE * ((observed[:-1] - observed[-1] * mean) / count).to(mean.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Subtracts the mean from ``[s, b, h]``; a training step also observes ``x``."""
        if self.running_mean is None:
            return x
        count = x.new_tensor([x.shape[0] * x.shape[1]])
        return self.running_mean.observe(x - self.mean, torch.cat([x.detach().sum((0, 1)), count]))
