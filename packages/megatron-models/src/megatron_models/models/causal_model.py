"""Decoder-only models of any kind."""

from abc import abstractmethod

import megatron_parallel
from jaxtyping import Float
from torch import Tensor, nn

from megatron_models.models.causal_config import CausalConfig
from megatron_models.models.decoding import DecodingModel, DecodingPass


class CausalModel(DecodingModel):
    """A model, or a stage of one, that continues texts token by token.

    Decoding calls it with tokens ``[b, s]`` or the stream of the previous stage, and with these
    keywords: ``positions``, ``mask``, ``cache``, ``padding`` ``[b, s]``, and ``logits_at``
    ``[b, k]``, the indices of the tokens whose logits are computed: for a long prompt only the last
    one. With a cache the stream is ``[s, b, h]`` on every rank, since the sequence is not cut.

    Attributes:
        config: The model's configuration.
        sequence_parallel: Whether training cuts sequences over tensor-parallel ranks.
        first: Whether this stage takes tokens.
        layers: This stage's blocks, by global layer number.
    """

    config: CausalConfig
    sequence_parallel: bool
    first: bool
    layers: nn.ModuleDict

    @abstractmethod
    def stage_output_spec(
        self, batch_size: int, sequence_length: int
    ) -> "megatron_parallel.TensorSpec":
        """Returns shape and dtype of the output of a stage that is not the last, in training."""

    def units(self) -> list[nn.Module]:
        """Returns the modules that fully sharded training gathers one at a time."""
        return [*self.layers.values()]

    def input_shapes(self, decoding_pass: DecodingPass) -> tuple[tuple[int, ...], ...]:
        """Returns the shape of the residual stream; nothing on the first stage."""
        batch, length = decoding_pass.tokens.shape
        return () if self.first else ((length, batch, self.config.hidden_size),)

    def decode(
        self, inputs: tuple[Float[Tensor, "..."], ...], decoding_pass: DecodingPass
    ) -> tuple[Float[Tensor, "..."], ...]:
        """Runs this stage on the new tokens, or on their stream."""
        (x,) = inputs or (decoding_pass.tokens,)
        output: Tensor = self(
            x,
            positions=decoding_pass.positions,
            mask=decoding_pass.mask,
            cache=decoding_pass.cache,
            logits_at=decoding_pass.logits_at,
            padding=decoding_pass.padding,
        )
        return (output,)
