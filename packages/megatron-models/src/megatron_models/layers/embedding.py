"""Token and position embeddings: from token numbers ``[b, s]`` to activations ``[s, b, h]``."""

import torch
from jaxtyping import Float, Int
from megatron_parallel import Init, Mesh, Sharding
from megatron_parallel.tensor_parallel import VocabParallelEmbedding
from torch import Tensor, nn
from torch.nn import functional

from megatron_models.config import GPTConfig


class Embedding(nn.Module):
    """Token embeddings, plus learned position embeddings unless positions are rotary."""

    def __init__(
        self, config: GPTConfig, mesh: Mesh, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            mesh,
            padded=config.padded_vocab_size,
            init=Init(scale=config.init_method_std),
            dtype=dtype,
            device=device,
        )
        self.position: PositionEmbedding | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position = PositionEmbedding(config, mesh, dtype, device)

    def forward(
        self, tokens: Int[Tensor, "b s"], positions: Int[Tensor, "b s"] | None, offset: int
    ) -> Float[Tensor, "s b h"]:
        """Embed ``tokens`` at ``positions``, by default those from ``offset`` on."""
        x: Tensor = self.word(tokens.t())
        if self.position is not None:
            x = x + self.position(tokens.shape[1], positions, offset)
        return x


class PositionEmbedding(nn.Module):
    """One learned vector for each position; every rank holds all of them."""

    def __init__(
        self, config: GPTConfig, mesh: Mesh, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        super().__init__()
        shape = (config.max_position_embeddings, config.hidden_size)
        place = mesh.device if device is None else device
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=place))
        self.sharding = {"weight": Sharding(shape, init=Init(scale=config.init_method_std))}

    def forward(
        self, length: int, positions: Int[Tensor, "b s"] | None, offset: int
    ) -> Float[Tensor, "s b_or_1 h"]:
        """Return the vectors of ``positions``, by default those from ``offset`` on."""
        if positions is None:
            return self.weight[offset : offset + length, None]
        return functional.embedding(positions.t(), self.weight)
