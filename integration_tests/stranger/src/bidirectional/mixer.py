"""Bidirectional self-attention."""

from megatron_kernels import attention
from megatron_models import Placement
from megatron_models.components.context import Context
from torch import Tensor, nn

from bidirectional.center import Center
from bidirectional.config import BidirectionalSpec


class Bidirectional(nn.Module):
    """Self-attention of one layer; tensor parallelism splits it by heads."""

    def __init__(self, spec: BidirectionalSpec, layer: int, placement: Placement) -> None:
        super().__init__()
        self.q, self.k, self.v = (
            placement.column_parallel_linear(spec.input_projection) for _ in range(3)
        )
        self.out = placement.row_parallel_linear(spec.output_projection)
        self.center = Center(spec, placement)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Returns the output of attention ``[s, b, h]`` under the mask of ``context``."""
        x = self.center(x)
        y = attention(self.q(x), self.k(x), self.v(x), context.mask)
        result: Tensor = self.out(y.flatten(2))
        return result
