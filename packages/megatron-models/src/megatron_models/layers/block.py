"""One transformer layer, normalised before each half (pre-LN; Xiong et al., 2020)."""

from functools import partial

import torch
from jaxtyping import Float
from megatron_parallel import Mesh
from torch import Tensor, nn

from megatron_models.config import GPTConfig
from megatron_models.layers.attention import Attention
from megatron_models.layers.context import Context
from megatron_models.layers.dropout import ATTENTION_OUTPUT, MLP_OUTPUT
from megatron_models.layers.mlp import MLP
from megatron_models.layers.moe import MoE
from megatron_models.layers.norm import Norm


class Block(nn.Module):
    """Attention, then the feed-forward layer, each added to the residual stream.

    Args:
        config: the model's configuration.
        mesh: the mesh its weights are cut over.
        layer: global number of this layer, by which a cache and dropout know it.
        dtype: of the parameters.
        device: of the parameters; by default the mesh's.
        sequence_parallel: whether the residual stream is cut along the sequence, ``[s/tp, b, h]``.
        dispatcher: how tokens get to their experts, in a layer that has some.
    """

    def __init__(
        self,
        config: GPTConfig,
        mesh: Mesh,
        layer: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
        sequence_parallel: bool = False,
        dispatcher: str = "allgather",
    ) -> None:
        super().__init__()
        self.layer = layer
        self.attention_norm = Norm(config, mesh, dtype, device, sequence_parallel)
        self.attention = Attention(config, mesh, layer, dtype, device, sequence_parallel)
        self.mlp_norm = Norm(config, mesh, dtype, device, sequence_parallel)
        self.mlp: MLP | MoE
        if config.moe_layers[layer]:
            self.mlp = MoE(config, mesh, dtype, device, sequence_parallel, dispatcher)
        else:
            self.mlp = MLP(config, mesh, dtype, device, sequence_parallel)

    def forward(self, x: Float[Tensor, "s b h"], context: Context) -> Float[Tensor, "s b h"]:
        """Transform the residual stream."""
        attended = context.normalised(self.attention_norm, x, lambda y: self.attention(y, context))
        x = x + context.drop(attended, self.layer, ATTENTION_OUTPUT)
        fed = context.normalised(self.mlp_norm, x, lambda y: self._feed(y, context))
        result: Tensor = x + context.drop(fed, self.layer, MLP_OUTPUT)
        return result

    def _feed(self, y: Tensor, context: Context) -> Tensor:
        if isinstance(self.mlp, MoE):
            return context.recomputed("moe", partial(self.mlp, context=context), y)
        return context.recomputed("mlp", self.mlp, y)
