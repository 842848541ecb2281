"""The update rule RMSProp (Tieleman and Hinton 2012)."""

from collections.abc import Mapping, Sequence

import torch
from megatron_optim import StateTensor, UpdateRule
from torch import Tensor


class RMSProp(UpdateRule):
    """Divides each gradient by the root of the running mean of its squares."""

    state = (StateTensor("square_avg"),)

    def update(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        state: Mapping[str, Sequence[Tensor]],
        *,
        lr: float,
        weight_decay: float,
        step: int,
    ) -> None:
        """Updates parameters and means of squares; weight decay is added to the gradient."""
        squares, decay = list(state["square_avg"]), self.config.settings.decay
        steps = torch._foreach_add(list(gradients), list(parameters), alpha=weight_decay)
        torch._foreach_mul_(squares, decay)
        torch._foreach_addcmul_(squares, steps, steps, value=1 - decay)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, self.config.adam_eps)
        torch._foreach_addcdiv_(list(parameters), steps, roots, value=-lr)
