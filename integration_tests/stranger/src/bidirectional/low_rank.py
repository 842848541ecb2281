"""A feed-forward layer of low rank, which replaces that of GPT models. Does not import torch."""

from dataclasses import dataclass, field
from typing import ClassVar

from megatron_models.components.fields import check_divisible, flag
from megatron_models.components.mixer import (
    BytesByPart,
    LayerPass,
    Mixer,
    Parameters,
    parameters_of,
    prefixed,
)
from megatron_models.components.stream import StreamConfig
from megatron_parallel import ParallelLayout
from megatron_parallel.sharding import Init
from megatron_parallel.tensor_parallel.specs import ColumnSpec, RowSpec


@dataclass(frozen=True, kw_only=True)
class LowRankSpec(StreamConfig, Mixer):
    """A matrix of low rank: ``up(down(x))``."""

    module: ClassVar[str] = "bidirectional.low_rank_module:LowRank"

    rank: int = field(default=8, metadata=flag("--rank", "rank of the matrix", positive=True))

    @property
    def down(self) -> ColumnSpec:
        """The projection to the rank."""
        init = Init(scale=self.init_method_std)
        return ColumnSpec(self.hidden_size, (self.rank,), bias=False, init=init)

    @property
    def up(self) -> RowSpec:
        """The projection back to the residual stream."""
        return RowSpec(self.rank, self.hidden_size, init=Init(scale=self.output_std))

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns the parameters of both projections."""
        return {
            **prefixed("down", parameters_of(self.down, sequence_parallel)),
            **prefixed("up", parameters_of(self.up, sequence_parallel)),
        }

    def activations(self, layer_pass: LayerPass) -> BytesByPart:
        """Returns the input of the second projection."""
        width = self.rank // layer_pass.tp * layer_pass.saved_bytes.activation
        return {"up": layer_pass.tokens * width}

    def input_saved_by(self, layer_pass: LayerPass) -> str | None:
        """Returns the first projection."""
        return "down"

    def check_layout(self, layout: ParallelLayout) -> None:
        """Refuses a tensor-parallel size that does not divide the rank."""
        check_divisible(self, "rank", "tp", layout.tp)
