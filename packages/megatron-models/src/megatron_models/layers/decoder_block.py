"""One layer of a decoder behind an encoder, normalised before each of its three parts."""

import torch
from jaxtyping import Float
from megatron_parallel import Mesh
from torch import Tensor, nn

from megatron_models.config import GPTConfig
from megatron_models.errors import ConfigError
from megatron_models.layers.attention import Attention
from megatron_models.layers.context import Context
from megatron_models.layers.cross_attention import CrossAttention
from megatron_models.layers.dropout import ATTENTION_OUTPUT, CROSS_ATTENTION_OUTPUT, MLP_OUTPUT
from megatron_models.layers.mlp import MLP
from megatron_models.layers.norm import Norm


class DecoderBlock(nn.Module):
    """Self-attention, cross-attention, the feed-forward layer, each added to the residual stream.

    Args:
        config: the decoder's configuration.
        mesh: the mesh its weights are cut over.
        layer: number by which dropout knows this layer; decoder layers count on from the encoder's.
        dtype: of the parameters.
        device: of the parameters; by default the mesh's.
        sequence_parallel: whether the residual stream and the encoder's output are cut along their
            sequences, ``[s/tp, b, h]`` and ``[t/tp, b, h]``.
    """

    def __init__(
        self,
        config: GPTConfig,
        mesh: Mesh,
        layer: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.layer = layer
        place = (dtype, device, sequence_parallel)
        self.attention_norm = Norm(config, mesh, *place)
        self.attention = Attention(config, mesh, layer, *place)
        self.cross_attention_norm = Norm(config, mesh, *place)
        self.cross_attention = CrossAttention(config, mesh, layer, *place)
        self.mlp_norm = Norm(config, mesh, *place)
        self.mlp = MLP(config, mesh, *place)

    def forward(self, x: Float[Tensor, "s b h"], context: Context) -> Float[Tensor, "s b h"]:
        """Transform the residual stream.

        Raises:
            ConfigError: the context has no encoder's output, or nothing that says who may see it.
        """
        encoded, mask = context.encoded, context.cross_mask
        if encoded is None or mask is None:
            raise ConfigError(
                f"layer {self.layer} attends to an encoder's output, and the context has none: "
                "give `encoded` and `cross_mask`"
            )
        attended = context.normalised(self.attention_norm, x, lambda y: self.attention(y, context))
        x = x + context.drop(attended, self.layer, ATTENTION_OUTPUT)
        crossed = context.normalised(
            self.cross_attention_norm,
            x,
            lambda y: self.cross_attention(y, encoded, mask, context),
        )
        x = x + context.drop(crossed, self.layer, CROSS_ATTENTION_OUTPUT)
        fed = context.normalised(self.mlp_norm, x, lambda y: context.recomputed("mlp", self.mlp, y))
        result: Tensor = x + context.drop(fed, self.layer, MLP_OUTPUT)
        return result
