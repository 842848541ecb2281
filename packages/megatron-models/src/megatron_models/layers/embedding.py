"""Token and position embeddings: from token numbers ``[b, s]`` to activations ``[s, b, h]``."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from megatron_parallel import Init, Mesh, Sharding
from megatron_parallel.tensor_parallel import VocabParallelEmbedding
from torch import Tensor, nn
from torch.nn import functional

from megatron_models.config import GPTConfig


class Embedding(nn.Module):
    """Token embeddings, plus learned position embeddings unless positions are rotary.

    Args:
        config: the model's configuration.
        mesh: the mesh the vocabulary is cut over.
        dtype: of the parameters.
        device: of the parameters; by default the mesh's.
        sequence_parallel: give this rank's part of the sequence, ``[s/tp, b, h]``.
        tied_over_stages: the token embeddings are also held by another pipeline stage.
        output_only: on the last stage, whose output layer needs the token embeddings and no more.
    """

    def __init__(
        self,
        config: GPTConfig,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device | str | None,
        sequence_parallel: bool = False,
        *,
        tied_over_stages: bool = False,
        output_only: bool = False,
    ) -> None:
        super().__init__()
        self.sequence_axis = mesh.axis("tp") if sequence_parallel else None
        self.word = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            mesh,
            padded=config.padded_vocab_size,
            sequence_parallel=sequence_parallel,
            init=Init(scale=config.init_method_std),
            dtype=dtype,
            device=device,
        )
        if tied_over_stages:
            self.word.sharding["weight"] = replace(self.word.sharding["weight"], tied=True)
        self.position: PositionEmbedding | None = None
        if config.position_embedding_type == "learned_absolute" and not output_only:
            self.position = PositionEmbedding(config, mesh, dtype, device, sequence_parallel)

    def forward(
        self, tokens: Int[Tensor, "b s"], positions: Int[Tensor, "b s"] | None, offset: int
    ) -> Float[Tensor, "part b h"]:
        """Embed ``tokens`` at ``positions``, by default those from ``offset`` on."""
        x: Tensor = self.word(tokens.t())
        if self.position is None:
            return x
        length = len(x)
        start = 0 if self.sequence_axis is None else self.sequence_axis.index * length
        if positions is not None:
            positions = positions[:, start : start + length]
        result: Tensor = x + self.position(length, positions, offset + start)
        return result


class PositionEmbedding(nn.Module):
    """One learned vector for each position; every rank holds all of them."""

    def __init__(
        self,
        config: GPTConfig,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device | str | None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        shape = (config.max_position_embeddings, config.hidden_size)
        place = mesh.device if device is None else device
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=place))
        init, partial = Init(scale=config.init_method_std), "tp" if sequence_parallel else None
        self.sharding = {"weight": Sharding(shape, init=init, partial=partial)}

    def forward(
        self, length: int, positions: Int[Tensor, "b s"] | None, offset: int
    ) -> Float[Tensor, "s b_or_1 h"]:
        """Return the vectors of ``positions``, by default those from ``offset`` on."""
        if positions is None:
            return self.weight[offset : offset + length, None]
        return functional.embedding(positions.t(), self.weight)
