"""A linear layer in place of a sublayer."""

from jaxtyping import Float
from torch import Tensor, nn

from megatron_models.components.context import Context
from megatron_models.components.linear.spec import LinearSpec
from megatron_models.placement import Placement


class Linear(nn.Module):
    """A linear layer of the residual stream's width, which every tensor-parallel rank holds."""

    def __init__(self, spec: LinearSpec, layer: int, placement: Placement) -> None:
        super().__init__()
        self.linear = placement.replicated_linear(spec.linear)

    def forward(
        self, x: Float[Tensor, "s b h"], context: Context | None = None
    ) -> Float[Tensor, "s b h"]:
        """Transforms each token of the sequence, or of this rank's part of it."""
        result: Tensor = self.linear(x)
        return result
