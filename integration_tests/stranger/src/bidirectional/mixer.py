"""Attention in both directions."""

from megatron_kernels import attention
from megatron_models import Placement
from megatron_models.components.context import Context
from torch import Tensor, nn

from bidirectional.center import Center
from bidirectional.config import BidirectionalSpec


class Bidirectional(nn.Module):
    """Self-attention of one layer; the tensor-parallel axis cuts it by heads."""

    def __init__(self, spec: BidirectionalSpec, layer: int, placement: Placement) -> None:
        super().__init__()
        self.q, self.k, self.v = (placement.column_parallel_linear(spec.read) for _ in range(3))
        self.out = placement.row_parallel_linear(spec.out)
        self.center = Center(spec, placement)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Let every token ``[s, b, h]`` attend as the mask allows."""
        x = self.center(x)
        y = attention(self.q(x), self.k(x), self.v(x), context.mask)
        result: Tensor = self.out(y.flatten(2))
        return result
