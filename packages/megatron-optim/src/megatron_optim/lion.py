"""The update rule Lion, computed over all tensors of a group at once."""

from collections.abc import Mapping, Sequence
from typing import Self, cast

import torch
from torch import Tensor

from megatron_optim.config import OptimizerConfig
from megatron_optim.rule_settings import LionSettings
from megatron_optim.update_rule import StateTensor, UnreadStep, UpdateRule
from megatron_optim.width import WidthRatio

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


class Lion(UpdateRule):
    """Steps by the sign of a mean of gradients (Chen et al. 2023, algorithm 2): ``lion``.

    With gradient ``g``, running mean ``m`` and weight decay ``w``: ``parameter *= 1 - lr * w``,
    ``parameter -= lr * sign(beta1 * m + (1 - beta1) * g)``, ``m = beta2 * m + (1 - beta2) * g``.
    The settings are `LionSettings`. Every element changes by ``lr``, so that the best learning rate
    is 3 to 10 times smaller than that of AdamW, and the best weight decay as much larger.
    """

    decides_on = ("cuda", "cpu")

    def __init__(self, config: OptimizerConfig) -> None:
        super().__init__(config)
        self._betas = cast(LionSettings, config.settings)
        self.state = (StateTensor("exp_avg", decay=self._betas.beta2),)

    def for_width(self, width: WidthRatio) -> tuple[Self, float]:
        """Divides the learning rate by the ratio of the inputs, as for Adam."""
        return self, 1 / width.inputs

    @torch.no_grad()
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
        """Updates the parameters and the running mean."""
        del step
        beta1, beta2 = self._betas.beta1, self._betas.beta2
        weights, gradients, means = list(parameters), list(gradients), list(state["exp_avg"])
        directions = list(torch._foreach_mul(means, beta1))
        torch._foreach_add_(directions, gradients, alpha=1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
        torch._foreach_add_(weights, directions, alpha=-lr)
        torch._foreach_mul_(means, beta2)
        torch._foreach_add_(means, gradients, alpha=1 - beta2)

    @torch.no_grad()
    def update_unread(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        state: Mapping[str, Sequence[Tensor]],
        *,
        lr: float,
        weight_decay: float,
        step: UnreadStep,
    ) -> None:
        """Updates the parameters and the running mean, unless the device skips the step.

        A skipped step multiplies values by 1 and adds 0 to them.
        """
        weights, gradients, means = list(parameters), list(gradients), list(state["exp_avg"])
        if step.divisor is not None:
            torch._foreach_div_(gradients, step.divisor.to(gradients[0].dtype))
        kept = 1 - step.skip
        _clear_bits(gradients, kept)
        taken = kept.to(gradients[0].dtype)
        beta1, beta2 = self._betas.beta1, 1 - (1 - self._betas.beta2) * taken
        directions = list(torch._foreach_mul(means, beta1))
        torch._foreach_add_(directions, gradients, alpha=1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(directions, -lr * taken)
        torch._foreach_mul_(weights, 1 - lr * weight_decay * taken)
        torch._foreach_add_(weights, directions)
        torch._foreach_mul_(means, beta2)
        torch._foreach_mul_(gradients, 1 - beta2)
        torch._foreach_add_(means, gradients)


def _clear_bits(tensors: list[Tensor], kept: Tensor) -> None:
    """Sets all elements to 0 if ``kept`` is 0 and leaves them if it is 1, in one operation.

    NaN times 0 is NaN, but its bits times 0 are those of 0.
    """
    kind = _BITS[tensors[0].dtype]
    torch._foreach_mul_([tensor.view(kind) for tensor in tensors], kept.to(kind))
