"""A running mean that is subtracted from a stream: state that is not a parameter."""

import torch
from megatron_models import Placement
from torch import Tensor, nn

from bidirectional.config import BidirectionalSpec

RATE = 0.1


class Center(nn.Module):
    """Subtracts the mean that earlier steps had, over all tokens of their global batches."""

    mean: Tensor

    def __init__(self, spec: BidirectionalSpec, placement: Placement) -> None:
        super().__init__()
        shape = (spec.hidden_size + 1,)
        self.seen = placement.register_state(
            self, spec.state(), "center.mean", self.moved, observation_shape=shape
        )

    @staticmethod
    def moved(mean: Tensor, seen: Tensor) -> Tensor:
        """Return the mean ``[h]`` after a step that has seen a sum and a number of tokens."""
        count = seen[-1].clamp(min=1)  # nothing may have been seen
        return mean + RATE * ((seen[:-1] - seen[-1] * mean) / count).to(mean.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Center ``[s, b, h]``; a training step takes part in the next mean."""
        if self.seen is None:
            return x
        count = x.new_tensor([x.shape[0] * x.shape[1]])
        return self.seen.observe(x - self.mean, torch.cat([x.detach().sum((0, 1)), count]))
