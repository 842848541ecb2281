"""The module of a feed-forward layer of low rank."""

from megatron_models import Placement
from megatron_models.components.context import Context
from torch import Tensor, nn

from bidirectional.low_rank import LowRankSpec


class LowRank(nn.Module):
    """Two projections; tensor parallelism cuts the rank."""

    def __init__(self, spec: LowRankSpec, layer: int, placement: Placement) -> None:
        super().__init__()
        self.down = placement.column_parallel_linear(spec.down)
        self.up = placement.row_parallel_linear(spec.up)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Transforms each token."""
        cut = context.sequence_parallel
        result: Tensor = self.up(self.down(x, sequence_parallel=cut), sequence_parallel=cut)
        return result
