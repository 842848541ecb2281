"""One transformer layer, normalised before each half (pre-LN; Xiong et al., 2020)."""

import torch
from jaxtyping import Float
from megatron_kernels import Mask
from megatron_parallel import Mesh
from torch import Tensor, nn

from megatron_models.cache import KVCache
from megatron_models.config import GPTConfig
from megatron_models.layers.attention import Attention
from megatron_models.layers.mlp import MLP
from megatron_models.layers.norm import Norm
from megatron_models.layers.rope import Angles


class Block(nn.Module):
    """Attention, then the feed-forward layer, each added to the residual stream.

    Args:
        config: the model's configuration.
        mesh: the mesh its weights are cut over.
        layer: global number of this layer, by which a cache knows it.
        dtype: of the parameters.
        device: of the parameters; by default the mesh's.
    """

    def __init__(
        self,
        config: GPTConfig,
        mesh: Mesh,
        layer: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.attention_norm = Norm(config, mesh, dtype, device)
        self.attention = Attention(config, mesh, layer, dtype, device)
        self.mlp_norm = Norm(config, mesh, dtype, device)
        self.mlp = MLP(config, mesh, dtype, device)

    def forward(
        self,
        x: Float[Tensor, "s b h"],
        mask: Mask,
        angles: Angles | None,
        cache: KVCache | None,
        offset: int,
    ) -> Float[Tensor, "s b h"]:
        """Transform the residual stream; arguments as in `Attention`."""
        x = x + self.attention(self.attention_norm(x), mask, angles, cache, offset)
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result
