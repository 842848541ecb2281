"""Muon: momentum, orthogonalized by Newton-Schulz iterations (Jordan et al. 2024).

Each matrix is updated by an approximation of the orthogonal matrix that is nearest to the momentum.
Gate and up projections, queries, keys and values, and experts are separate matrices. A matrix that
ranks share is assembled before it is orthogonalized, so that the update is the same in every
layout. Another rule (AdamW) updates the parameters that are no matrices, token embeddings and
output matrices.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Self

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_optim.config import OptimizerConfig
from megatron_optim.errors import OptimError
from megatron_optim.matrices import Matrices
from megatron_optim.muon_settings import Coefficients, MuonSettings
from megatron_optim.update_rule import StateTensor, UnreadStep, UpdateRule
from megatron_optim.width import WidthRatio

EPS: Final = 1e-7
"""Smallest norm that a matrix is divided by, as in torch and Megatron-LM."""


class Muon(UpdateRule):
    """Muon: ``--optimizer muon``.

    With gradient ``g`` and momentum ``m``: ``mean = m * mean + (1 - m) * g``; the update is
    ``scale * orthogonal(mean)``, or with Nesterov's momentum that of ``m * mean + (1 - m) * g``.
    Weight decay is decoupled from the gradient. Settings are `MuonSettings`.
    """

    needs = "matrices"
    gathers = True
    decides_on = ("cuda",)
    state = (StateTensor("momentum_buffer"),)

    def __init__(self, config: OptimizerConfig) -> None:
        super().__init__(config)
        self.settings: MuonSettings = config.settings or MuonSettings()
        self.fallback = self.settings.scalar_optimizer

    def bind(self, matrices: Matrices) -> Self:
        """Returns the rule for a group of parameters.

        Raises:
            OptimError: The rule orthogonalizes shards, and a shard ends inside a fused weight.
        """
        if self.settings.tp_mode == "blockwise" and (name := matrices.shared_entry()):
            raise OptimError(
                f"--muon-tp-mode blockwise: tensor-parallel ranks cut a group of heads of {name!r} "
                "into shards of queries, key and value; use distributed"
            )
        return super().bind(matrices)

    def for_width(self, width: WidthRatio) -> tuple[Self, float]:
        """Returns the rule itself if its updates have the size that every width needs.

        That is ``sqrt(outputs / inputs)`` in the spectral norm (Yang et al. 2023, "A Spectral
        Condition for Feature Learning").

        Raises:
            OptimError: The scale mode is not ``unit_rms_norm``.
        """
        if self.settings.scale_mode != "unit_rms_norm":
            raise OptimError(
                f"--muon-scale-mode {self.settings.scale_mode} has no learning rates for "
                "other widths of a model, as --use-mup needs; use unit_rms_norm"
            )
        return self, 1.0

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
        """Updates the parameters and the momentum."""
        del step
        means = state["momentum_buffer"]
        for mean, gradient in zip(means, gradients, strict=True):
            mean.lerp_(gradient, 1 - self.settings.momentum)
        for parameter, update in zip(parameters, self._updates(means, gradients), strict=True):
            parameter.mul_(1 - lr * weight_decay).sub_(update, alpha=lr)

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
        """Updates the parameters and the momentum, unless the device skips the step."""
        means, momentum = state["momentum_buffer"], self.settings.momentum
        skip, used = step.skip.bool(), 1 - step.skip
        finite = [
            # NaN times 0 is NaN, so gradients of a skipped step are replaced.
            torch.where(skip, 0.0, g if step.divisor is None else g / step.divisor)
            for g in gradients
        ]
        for mean, gradient in zip(means, finite, strict=True):
            mean.lerp_(gradient, ((1 - momentum) * used).to(mean.dtype))
        for parameter, update in zip(parameters, self._updates(means, finite), strict=True):
            parameter.mul_(1 - lr * weight_decay * used).sub_(update * (lr * used))

    def _updates(self, means: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Returns the updates of this rank's shards."""
        matrices, settings = self.matrices, self.settings
        if matrices is None:
            raise RuntimeError("Muon updates the matrices that bind() names; call it first")
        directions: Sequence[Tensor] = means
        if settings.nesterov:
            directions = [
                gradient.lerp(mean, settings.momentum)
                for gradient, mean in zip(gradients, means, strict=True)
            ]
        low = matrices.model_dtype == torch.bfloat16
        if settings.fp32_matmul_prec is not None:
            low = settings.fp32_matmul_prec == "medium"

        def scaled(matrix: Tensor) -> Tensor:
            scale = settings.scale(*matrix.shape[-2:])
            coefficients = settings.coefficients()
            if low and matrix.dtype == torch.float32:
                return orthogonalized(matrix.bfloat16(), coefficients).to(matrix.dtype) * scale
            return orthogonalized(matrix, coefficients) * scale

        return matrices.map_local(
            directions,
            scaled,
            tensor_parallel=settings.tp_mode,
            split_fused_sizes=settings.split_qkv,
        )


def orthogonalized(
    matrices: Float[Tensor, "k rows columns"], coefficients: Sequence[Coefficients]
) -> Float[Tensor, "k rows columns"]:
    """Returns matrices with singular values near 1 and the singular vectors of ``matrices``.

    They are divided by their Frobenius norms. Each Newton-Schulz iteration then maps singular
    values by ``a x + b x^3 + c x^5``. The arithmetic is in the dtype of the argument.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPS)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
