"""Token and position embeddings: from token ids ``[b, s]`` to activations ``[s, b, h]``."""

import torch
from jaxtyping import Float, Int
from megatron_kernels import select_rows
from megatron_parallel import Sharding
from megatron_parallel.tensor_parallel import PLAIN
from torch import Tensor, nn

from megatron_models.components.embedding.spec import EmbeddingSpec
from megatron_models.components.norm.module import Norm
from megatron_models.errors import ConfigError
from megatron_models.placement import Placement


class Embedding(nn.Module):
    """Token embeddings, plus learned position embeddings unless positions are rotary.

    Sinusoidal positions have no parameters. Embeddings of token types may be added, and the sum
    normalized (BERT).

    With sequence parallelism the output is this rank's part of the sequence, ``[s/tp, b, h]``.
    """

    def __init__(self, spec: EmbeddingSpec, placement: Placement) -> None:
        super().__init__()
        self.sequence_axis = placement.mesh.axis("tp") if placement.sequence_parallel else None
        self.word = placement.vocab_parallel_embedding(spec.word)
        self.word.sharding["weight"] = spec.word_sharding()
        if spec.is_output_weight:  # an adapter would have parameters of its own
            product = placement.product("output_layer")
            self.word.product = PLAIN if product.is_adapter else product
        # Rounded, as in Gemma's own code: in bfloat16 the square root of 3072 is 55.5.
        self.multiplier = torch.tensor(spec.embedding_multiplier, dtype=placement.dtype).item()
        self.position: EmbeddingTable | None = None
        self.token_types: EmbeddingTable | None = None
        self.norm: Norm | None = None
        self.position_offset = spec.position_offset
        self.sinusoidal = spec.position_embedding_type == "sinusoidal"
        cut = placement.sequence_parallel
        if (position := spec.position(cut)) is not None:
            self.position = EmbeddingTable(position, placement)
        if (token_types := spec.token_types(cut)) is not None:
            self.token_types = EmbeddingTable(token_types, placement)
        if spec.norm is not None:
            self.norm = Norm(spec.norm, placement)

    def forward(
        self,
        tokens: Int[Tensor, "b s"],
        positions: Int[Tensor, "*axes b_or_1 s"] | None,
        offset: int,
        sequence_parallel: bool | None = None,
        token_types: Int[Tensor, "b s"] | None = None,
    ) -> Float[Tensor, "part b h"]:
        """Returns the embeddings of tokens.

        Args:
            tokens: Token ids.
            positions: Positions of the tokens. Defaults to ``offset`` and the following ones.
            offset: Position of the first token.
            sequence_parallel: Whether this pass cuts the sequence. Defaults to how the module was
                built.
            token_types: Type of each token, if the model has token types. Defaults to 0.

        Raises:
            ConfigError: There are token types, but the model has none.
        """
        x: Tensor = self.word(tokens.t(), sequence_parallel=sequence_parallel)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        length = len(x)
        axis = None if sequence_parallel is False else self.sequence_axis
        start = 0 if axis is None else axis.index * length
        own = slice(start, start + length)
        if self.position is not None:
            if positions is not None:
                positions = positions[:, own] + self.position_offset
            x = x + self.position(length, positions, offset + start + self.position_offset)
        if self.sinusoidal:
            if positions is None:
                own_positions = torch.arange(length, device=x.device)[None] + (offset + start)
            else:
                own_positions = positions[:, own]
            x = x + sinusoids(own_positions, x.shape[-1]).to(x.dtype)
        if self.token_types is not None:
            # A slice of one row instead of a lookup, if all tokens have type 0.
            types = None if token_types is None else token_types[:, own]
            x = x + self.token_types(1 if types is None else length, types, 0)
        elif token_types is not None:
            raise ConfigError("this model has no token types; leave token_types out")
        return x if self.norm is None else self.norm(x)


def sinusoids(positions: Int[Tensor, "b_or_1 s"], width: int) -> Float[Tensor, "s b_or_1 h"]:
    """Returns fixed position embeddings in float64 (Vaswani et al. 2017, section 3.5).

    Channel ``2i`` is ``sin(p / 10000^(2i / width))`` and channel ``2i + 1`` the cosine.

    Args:
        positions: Positions ``p`` of the tokens.
        width: Number of channels.
    """
    channels = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64)
    angles = positions.t()[..., None].double() * 10000.0 ** (-channels / width)
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)[..., :width]


class EmbeddingTable(nn.Module):
    """A learned vector for each position or token type, replicated on every rank."""

    weight: Tensor

    def __init__(self, sharding: Sharding, placement: Placement) -> None:
        super().__init__()
        placement.register_parameters(self, {"weight": sharding})

    def forward(
        self, length: int, rows: Int[Tensor, "b_or_1 s"] | None, offset: int
    ) -> Float[Tensor, "s b_or_1 h"]:
        """Returns the vectors of ``rows``. Defaults to ``offset`` and the following ones."""
        if rows is None:
            return self.weight[offset : offset + length, None]
        return select_rows(self.weight, rows.t())
