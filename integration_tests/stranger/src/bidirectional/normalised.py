"""Momentum over its Frobenius norm: an update rule that needs matrices whole."""

from collections.abc import Mapping, Sequence

import torch
from megatron_optim import StateTensor, UpdateRule
from torch import Tensor

MOMENTUM = 0.9
SMALL = 1e-30
"""Of a matrix that no gradient has reached."""


class Normalised(UpdateRule):
    """Every matrix moves by a step of one length; AdamW updates the other parameters."""

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
        """Update matrices ``[rows, columns]`` and their momentum."""
        for matrix, gradient, momentum in zip(
            parameters, gradients, state["momentum"], strict=True
        ):
            momentum.lerp_(gradient, 1 - MOMENTUM)
            norm = torch.linalg.matrix_norm(momentum, keepdim=True) + SMALL
            matrix.mul_(1 - lr * weight_decay).sub_(lr * momentum / norm)
