"""A linear layer in place of a sublayer, as plain data.

Importing this module does not import torch.
"""

from dataclasses import dataclass
from typing import ClassVar

from megatron_parallel.sharding import Init
from megatron_parallel.tensor_parallel.specs import ReplicatedSpec

from megatron_models.components.mixer import (
    BytesByPart,
    LayerPass,
    Mixer,
    Parameters,
    parameters_of,
    prefixed,
)
from megatron_models.components.stream import StreamConfig


@dataclass(frozen=True, kw_only=True)
class LinearSpec(StreamConfig, Mixer):
    """One matrix ``[h, h]`` in place of attention or a feed-forward layer (Bercovich et al. 2024).

    Every tensor-parallel rank holds the matrix. Under sequence parallelism each multiplies its own
    tokens, which needs no communication; otherwise all ranks compute the same.
    """

    module: ClassVar[str] = "megatron_models.components.linear.module:Linear"

    @property
    def linear(self) -> ReplicatedSpec:
        """The matrix, with a bias if linear layers have biases."""
        init = Init(scale=self.output_std)
        width = self.hidden_size
        return ReplicatedSpec(width, width, self.add_bias_linear, init=init, role="linear")

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns the parameters of the linear layer."""
        return prefixed("linear", parameters_of(self.linear, sequence_parallel))

    def activations(self, layer_pass: LayerPass) -> BytesByPart:
        """Returns nothing: only the input is saved."""
        return {}

    def input_saved_by(self, layer_pass: LayerPass) -> str | None:
        """Returns the linear layer."""
        return "linear"

    @property
    def gathers_input(self) -> bool:
        """Whether the linear layer gathers its input: no."""
        return False
