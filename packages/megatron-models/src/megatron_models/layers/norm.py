"""Normalisation of the residual stream: LayerNorm or RMSNorm."""

import torch
from jaxtyping import Float
from megatron_kernels import layer_norm, rms_norm
from megatron_parallel import ONES, ZEROS, Mesh, Sharding
from torch import Tensor, nn

from megatron_models.config import GPTConfig


class Norm(nn.Module):
    """LayerNorm, or RMSNorm without a bias, as the configuration says.

    Every rank holds all of it. Values are filled by `initialize_parameters`: gain 1, bias 0. With
    ``sequence_parallel`` a tensor-parallel rank normalises its part of the sequence only, so that
    its gradient is a part of the sum over those ranks.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        config: GPTConfig,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device | str | None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        shape, partial = (config.hidden_size,), "tp" if sequence_parallel else None
        self.sharding = {"weight": Sharding(shape, init=ONES, partial=partial)}
        if config.normalization == "LayerNorm":
            self.sharding["bias"] = Sharding(shape, init=ZEROS, partial=partial)
        place = mesh.device if device is None else device
        for name in self.sharding:
            empty = torch.empty(shape, dtype=dtype, device=place)
            self.register_parameter(name, nn.Parameter(empty))
        if config.normalization == "RMSNorm":
            self.register_parameter("bias", None)

    def forward(self, x: Float[Tensor, "*rows h"]) -> Float[Tensor, "*rows h"]:
        """Normalise the last dimension."""
        if self.bias is None:
            return rms_norm(x, self.weight, self.epsilon)
        return layer_norm(x, self.weight, self.bias, self.epsilon)
