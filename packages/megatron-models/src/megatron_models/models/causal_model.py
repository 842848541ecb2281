"""What decoding asks of a model, whatever its kind."""

from abc import ABC, abstractmethod

import megatron_parallel
import torch
from megatron_parallel import Mesh
from torch import nn

from megatron_models.components.attention.rotary import RotaryTable
from megatron_models.models.causal_config import CausalConfig


class CausalModel(nn.Module, ABC):
    """A model, or a stage of one, that continues texts token by token with a `KVCache`.

    Decoding calls it with tokens ``[b, s]`` or the stream of the stage before, and with these
    keywords: ``positions``, ``mask``, ``cache``, and ``logits_at`` ``[b, k]``, the places for which
    logits are made. Of a long prompt only those of its last token are wanted.

    Attributes:
        config: its shape.
        mesh: where it lives.
        dtype: of its parameters.
        sequence_parallel: whether it cuts sequences over tensor-parallel ranks.
        stage: number of this stage in the pipeline; 0 for a whole model.
        first: whether this stage takes tokens.
        last: whether it gives logits.
        layers: this stage's blocks, by global layer number.
        rotary: the table of rotary positions, if it has one.
    """

    config: CausalConfig
    mesh: Mesh
    dtype: torch.dtype
    sequence_parallel: bool
    stage: int
    first: bool
    last: bool
    layers: nn.ModuleDict
    rotary: RotaryTable | None

    @abstractmethod
    def passed(self, batch_size: int, sequence_length: int) -> "megatron_parallel.Passed":
        """Return shape and dtype of what a stage that is not the last passes on."""
