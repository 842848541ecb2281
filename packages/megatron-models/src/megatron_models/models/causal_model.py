"""Decoder-only models, whatever their kind."""

from abc import abstractmethod

import megatron_parallel
from jaxtyping import Float
from torch import Tensor, nn

from megatron_models.models.causal_config import CausalConfig
from megatron_models.models.decoding import DecodingModel, DecodingPass


class CausalModel(DecodingModel):
    """A model, or a stage of one, that continues texts token by token.

    Decoding calls it with tokens ``[b, s]`` or the stream of the stage before, and with these
    keywords: ``positions``, ``mask``, ``cache``, and ``logits_at`` ``[b, k]``, the places for which
    logits are made. Of a long prompt only those of its last token are wanted. With a cache streams
    are ``[s, b, h]`` on every rank: nothing cuts the sequence.

    Attributes:
        config: its shape.
        sequence_parallel: whether it cuts sequences over tensor-parallel ranks when training.
        first: whether this stage takes tokens.
        layers: this stage's blocks, by global layer number.
    """

    config: CausalConfig
    sequence_parallel: bool
    first: bool
    layers: nn.ModuleDict

    @abstractmethod
    def stage_output_spec(
        self, batch_size: int, sequence_length: int
    ) -> "megatron_parallel.TensorSpec":
        """Returns shape and dtype of what a stage that is not the last passes on in training."""

    def input_shapes(self, decoding_pass: DecodingPass) -> tuple[tuple[int, ...], ...]:
        """Returns the shape of the residual stream; nothing on the first stage."""
        batch, length = decoding_pass.tokens.shape
        return () if self.first else ((length, batch, self.config.hidden_size),)

    def decode(
        self, inputs: tuple[Float[Tensor, "..."], ...], decoding_pass: DecodingPass
    ) -> tuple[Float[Tensor, "..."], ...]:
        """Runs this stage on the new tokens, or on their stream."""
        (x,) = inputs or (decoding_pass.tokens,)
        outcome: Tensor = self(
            x,
            positions=decoding_pass.positions,
            mask=decoding_pass.mask,
            cache=decoding_pass.cache,
            logits_at=decoding_pass.logits_at,
        )
        return (outcome,)
