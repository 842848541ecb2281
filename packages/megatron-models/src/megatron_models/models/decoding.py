"""What decoding asks of a model, or of a stage of one, whatever its kind."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from megatron_kernels import Mask
from megatron_parallel import Mesh
from torch import Tensor, nn

from megatron_models.cache import KVCache
from megatron_models.components.attention.rotary import RotaryTable
from megatron_models.models.model_config import ModelConfig


@dataclass(frozen=True, eq=False)
class DecodingPass:
    """One forward pass of decoding; all stages of a pipeline are given the same one.

    No sequence is cut: every tensor- and context-parallel rank is given all of the tokens.

    Attributes:
        tokens: new tokens of each sequence.
        cache: state of the tokens before them, of this rank's layers; it takes theirs.
        positions: of the new tokens. Defaults to those after ``cache.length``.
        mask: who may attend to whom, of cached and new tokens together. Defaults to causal.
        logits_at: places among the new tokens for which logits are made. Defaults to all.
        source: the encoder's tokens, in the first pass of these sequences, where the model reads a
            source.
        source_padding: True where the encoder's text is padding; in every pass, where the model
            reads a source. Defaults to no padding.
    """

    tokens: Int[Tensor, "b s"]
    cache: KVCache
    positions: Int[Tensor, "b s"] | None = None
    mask: Mask | None = None
    logits_at: Int[Tensor, "b k"] | None = None
    source: Int[Tensor, "b t"] | None = None
    source_padding: Bool[Tensor, "b t"] | None = None


class DecodingModel(nn.Module, ABC):
    """A model, or a stage of one, that generates token by token with a `KVCache`.

    Attributes:
        config: its shape.
        mesh: where it lives.
        dtype: of its parameters.
        stage: number of this stage in the pipeline; 0 for a whole model.
        last: whether it gives logits.
        rotary: the table of rotary positions, if it has one.
        reads_source: whether it generates from another text, which an encoder reads.
    """

    config: ModelConfig
    mesh: Mesh
    dtype: torch.dtype
    stage: int
    last: bool
    rotary: RotaryTable | None
    reads_source: ClassVar[bool] = False

    def first_active_stage(self, decoding_pass: DecodingPass) -> int:
        """Returns the number of the first stage that has a part in a pass; all after it have one.

        It is known on every stage.
        """
        del decoding_pass
        return 0

    @abstractmethod
    def input_shapes(self, decoding_pass: DecodingPass) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of what this stage takes from the stage before in a pass."""

    @abstractmethod
    def decode(
        self, inputs: tuple[Float[Tensor, "..."], ...], decoding_pass: DecodingPass
    ) -> tuple[Float[Tensor, "..."], ...]:
        """Runs this stage.

        Args:
            inputs: what the stage before passed on, of the shapes of `input_shapes`.
            decoding_pass: The pass.

        Returns:
            What the next stage takes; from the last stage the logits alone,
            ``[s, b, padded vocabulary / tp]``, or ``[k, b, ...]`` with ``logits_at``.
        """
