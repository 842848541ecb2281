"""Token and position embeddings: from token ids ``[b, s]`` to activations ``[s, b, h]``."""

import torch
from jaxtyping import Float, Int
from megatron_parallel.tensor_parallel import PLAIN
from torch import Tensor, nn
from torch.nn import functional

from megatron_models.components.embedding.spec import EmbeddingSpec
from megatron_models.placement import Placement


class Embedding(nn.Module):
    """Token embeddings, plus learned position embeddings unless positions are rotary.

    With sequence parallelism the output is this rank's part of the sequence, ``[s/tp, b, h]``.
    """

    def __init__(self, spec: EmbeddingSpec, placement: Placement) -> None:
        super().__init__()
        self.sequence_axis = placement.mesh.axis("tp") if placement.sequence_parallel else None
        self.word = placement.vocab_parallel_embedding(spec.word)
        self.word.sharding["weight"] = spec.word_sharding()
        self.word.product = PLAIN if spec.is_output_weight else None
        # Rounded, as in Gemma's own code: in bfloat16 the square root of 3072 is 55.5.
        self.multiplier = torch.tensor(spec.embedding_multiplier, dtype=placement.dtype).item()
        self.position: PositionEmbedding | None = None
        if spec.position() is not None:
            self.position = PositionEmbedding(spec, placement)

    def forward(
        self,
        tokens: Int[Tensor, "b s"],
        positions: Int[Tensor, "b s"] | None,
        offset: int,
        sequence_parallel: bool | None = None,
    ) -> Float[Tensor, "part b h"]:
        """Returns the embeddings of tokens.

        Args:
            tokens: Token ids.
            positions: Positions of the tokens. Defaults to ``offset`` and the following ones.
            offset: Position of the first token.
            sequence_parallel: Whether this pass cuts the sequence. Defaults to how the module was
                built.
        """
        x: Tensor = self.word(tokens.t(), sequence_parallel=sequence_parallel)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        if self.position is None:
            return x
        length = len(x)
        axis = None if sequence_parallel is False else self.sequence_axis
        start = 0 if axis is None else axis.index * length
        if positions is not None:
            positions = positions[:, start : start + length]
        result: Tensor = x + self.position(length, positions, offset + start)
        return result


class PositionEmbedding(nn.Module):
    """A learned vector for each position, replicated on every rank."""

    weight: Tensor

    def __init__(self, spec: EmbeddingSpec, placement: Placement) -> None:
        super().__init__()
        sharding = spec.position(placement.sequence_parallel)
        placement.register_parameters(
            self, {} if sharding is None else {"weight": sharding}, "weight"
        )

    def forward(
        self, length: int, positions: Int[Tensor, "b s"] | None, offset: int
    ) -> Float[Tensor, "s b_or_1 h"]:
        """Returns the vectors of ``positions``. Defaults to ``offset`` and the following ones."""
        if positions is None:
            return self.weight[offset : offset + length, None]
        return functional.embedding(positions.t(), self.weight)
