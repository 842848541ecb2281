"""The interface of models for decoding, of any kind."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from megatron_kernels import Mask
from megatron_parallel import Mesh
from torch import Tensor, nn

from megatron_models.cache import KVCache
from megatron_models.components.rotary.module import RotaryTables
from megatron_models.models.model_config import ModelConfig


@dataclass(frozen=True, eq=False)
class DecodingPass:
    """One forward pass of decoding, the same for all stages of a pipeline.

    No sequence is cut: every tensor- and context-parallel rank gets all tokens.

    Attributes:
        tokens: New tokens of each sequence.
        cache: Keys and values of earlier tokens for this rank's layers, to which those of the new
            tokens are added.
        positions: Positions of the new tokens, ``[3, b, s]`` with three axes. Defaults to those
            after ``cache.length``.
        mask: Mask of cached and new tokens together. Defaults to causal.
        logits_at: Indices of the new tokens whose logits are computed. Defaults to all.
        padding: True for new tokens that are padding, which follows the tokens of a sequence. It
            does not enter the state of recurrent layers. Defaults to no padding.
        source: Tokens of the encoder, in the first pass of these sequences, if the model reads a
            source.
        source_padding: True for padding of the source; in every pass, if the model reads a source.
            Defaults to no padding.
    """

    tokens: Int[Tensor, "b s"]
    cache: KVCache
    positions: Int[Tensor, "*axes b s"] | None = None
    mask: Mask | None = None
    logits_at: Int[Tensor, "b k"] | None = None
    source: Int[Tensor, "b t"] | None = None
    source_padding: Bool[Tensor, "b t"] | None = None
    padding: Bool[Tensor, "b s"] | None = None


class DecodingModel(nn.Module, ABC):
    """A model, or a stage of one, that generates token by token with a `KVCache`.

    Attributes:
        config: The model's configuration.
        mesh: The mesh of its ranks.
        dtype: Dtype of its parameters.
        stage: Index of this stage in the pipeline; 0 for a whole model.
        last: Whether it returns logits.
        rotary: Tables of rotary positions, of all rotations of this stage.
        reads_source: Whether it generates from another text, which an encoder reads.
    """

    config: ModelConfig
    mesh: Mesh
    dtype: torch.dtype
    stage: int
    last: bool
    rotary: RotaryTables
    reads_source: ClassVar[bool] = False

    def first_active_stage(self, decoding_pass: DecodingPass) -> int:
        """Returns the index of the first stage that takes part in a pass; all later stages do too.

        Every stage returns the same value.
        """
        del decoding_pass
        return 0

    @abstractmethod
    def input_shapes(self, decoding_pass: DecodingPass) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of what this stage receives from the previous one in a pass."""

    @abstractmethod
    def decode(
        self, inputs: tuple[Float[Tensor, "..."], ...], decoding_pass: DecodingPass
    ) -> tuple[Float[Tensor, "..."], ...]:
        """Runs this stage.

        Args:
            inputs: Outputs of the previous stage, with the shapes of `input_shapes`.
            decoding_pass: The pass.

        Returns:
            The inputs of the next stage. From the last stage the logits alone,
            ``[s, b, padded vocabulary / tp]``, or ``[k, b, ...]`` with ``logits_at``.
        """
