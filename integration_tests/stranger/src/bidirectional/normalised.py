"""An update rule that needs whole matrices: momentum divided by its Frobenius norm."""

from collections.abc import Mapping, Sequence

import torch
from megatron_optim import StateTensor, UpdateRule
from torch import Tensor

MOMENTUM = 0.9
SMALL = 1e-30
"""Added to the norm, which is zero for a matrix without a gradient."""


class Normalised(UpdateRule):
    """Updates every matrix by a step of equal norm; AdamW updates the other parameters."""

    needs = "matrices"
    state = (StateTensor("momentum"),)

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
        """Updates matrices ``[rows, columns]`` and their momentum."""
        for matrix, gradient, momentum in zip(
            parameters, gradients, state["momentum"], strict=True
        ):
            momentum.lerp_(gradient, 1 - MOMENTUM)
            norm = torch.linalg.matrix_norm(momentum, keepdim=True) + SMALL
            matrix.mul_(1 - lr * weight_decay).sub_(lr * momentum / norm)
