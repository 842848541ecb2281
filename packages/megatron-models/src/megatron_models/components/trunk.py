"""Embedding, layers and final norm: a decoder-only model, or one side of an encoder-decoder."""

from jaxtyping import Float, Int
from torch import Tensor, nn

from megatron_models.components.block import Block
from megatron_models.components.context import Context
from megatron_models.components.dropout_sites import EMBEDDING_LAYER
from megatron_models.components.embedding.module import Embedding
from megatron_models.components.layer import TrunkSpec
from megatron_models.components.norm.module import Norm
from megatron_models.components.relative_bias.module import RelativeBias
from megatron_models.components.stack import run_layers
from megatron_models.placement import Placement


class Trunk(nn.Module):
    """Maps tokens to the residual stream after the last layer. It is whole or one pipeline stage.

    Args:
        spec: Description of this stage.
        placement: Mesh, dtype, device and options.

    Attributes:
        embeds: Whether this stage takes tokens.
        layers: The blocks, by global layer number.
    """

    def __init__(self, spec: TrunkSpec, placement: Placement) -> None:
        super().__init__()
        self.tp = placement.mesh.axis("tp")
        self.embedding_site = spec.embedding_site
        self.embeds = spec.embedding is not None and spec.takes_tokens
        self.embedding = None if spec.embedding is None else Embedding(spec.embedding, placement)
        self.relative_bias = (
            None if spec.relative_bias is None else RelativeBias(spec.relative_bias, placement)
        )
        # Keyed by the global layer number: a stage has the parameter names of the whole model.
        self.layers = nn.ModuleDict(
            {
                str(number): Block(layer, spec.layer_offset + number, placement)
                for number, layer in spec.layers.items()
            }
        )
        self.final_norm = None if spec.final_norm is None else Norm(spec.final_norm, placement)

    def forward(
        self,
        x: Int[Tensor, "b s"] | Float[Tensor, "part b h"],
        context: Context,
        positions: Int[Tensor, "*axes b_or_1 s"] | None = None,
        token_types: Int[Tensor, "b s"] | None = None,
        embedding: Embedding | None = None,
    ) -> Float[Tensor, "part b h"]:
        """Returns the residual stream after this stage.

        Args:
            x: Tokens ``[b, s]`` if this stage embeds, else the residual stream of the previous
                stage.
            context: State of the pass.
            positions: Positions of the tokens. Defaults to those after the cache's.
            token_types: Types of the tokens, if the model has token types. Defaults to 0.
            embedding: Embeds ``x`` if this stage takes tokens and trunks share an embedding.
                Defaults to the trunk's own.
        """
        embedding = self.embedding if self.embeds else embedding
        if embedding is not None:
            x = embedding(x, positions, context.offset, context.sequence_parallel, token_types)
            x = context.hidden_dropout(x, EMBEDDING_LAYER, self.embedding_site)
        x = run_layers(self.layers, x, context, self.tp)
        return x if self.final_norm is None else self.final_norm(x)
