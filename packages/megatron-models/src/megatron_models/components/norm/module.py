"""Normalization of the residual stream: LayerNorm or RMSNorm."""

from typing import Any

from jaxtyping import Float
from megatron_kernels import Op, add_layer_norm, add_rms_norm, layer_norm, rms_norm
from torch import Tensor, nn

from megatron_models.components.norm.spec import NormSpec
from megatron_models.placement import Placement


class Norm(nn.Module):
    """LayerNorm, or RMSNorm without a bias.

    `initialize_parameters` sets the gain to 1 and the bias to 0. With ``apply_layernorm_1p`` the
    gain is ``1 + weight``.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, spec: NormSpec, placement: Placement) -> None:
        super().__init__()
        self.epsilon, self.zero_centered = spec.norm_epsilon, spec.apply_layernorm_1p
        self.rms = spec.normalization == "RMSNorm"
        self.backend = placement.backend("rms_norm" if self.rms else "layer_norm")
        placement.register_parameters(
            self, spec.shardings(placement.sequence_parallel), "weight", "bias"
        )

    def forward(self, x: Float[Tensor, "*rows h"]) -> Float[Tensor, "*rows h"]:
        """Normalizes the last dim."""
        if self.rms:
            return rms_norm(x, self.weight, self.epsilon, self.zero_centered, backend=self.backend)
        return layer_norm(
            x, self.weight, self.bias, self.epsilon, self.zero_centered, backend=self.backend
        )

    def after_addition(
        self, x: Float[Tensor, "s b h"], added: Float[Tensor, "s b h"] | None, backend: str
    ) -> tuple[Float[Tensor, "s b h"], Float[Tensor, "s b h"]]:
        """Returns the sum of two tensors and its norm, as one operation.

        Args:
            x: Residual stream.
            added: What is added to it, or None.
            backend: Backend of `addition_of` this norm.
        """
        options = self.epsilon, self.zero_centered
        if self.rms:
            return add_rms_norm(x, added, self.weight, *options, backend=backend)
        return add_layer_norm(x, added, self.weight, self.bias, *options, backend=backend)


def addition_of(spec: NormSpec) -> Op[..., Any]:
    """Returns the operation that adds to the stream and computes a norm of the sum."""
    return add_rms_norm if spec.normalization == "RMSNorm" else add_layer_norm
