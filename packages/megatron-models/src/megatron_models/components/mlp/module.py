"""The feed-forward layer: up projection, activation, down projection."""

from jaxtyping import Float
from megatron_kernels import gelu, swiglu
from torch import Tensor, nn

from megatron_models.components.context import Context
from megatron_models.components.mlp.spec import Activation, MLPSpec
from megatron_models.placement import Placement


class MLP(nn.Module):
    """``down(activation(up(x)))``. With SwiGLU, ``up`` is gate and up projection, ``(2, f, h)``."""

    def __init__(self, spec: MLPSpec, layer: int, placement: Placement) -> None:
        super().__init__()
        self.activation = spec.activation
        self.up = placement.column_parallel_linear(spec.up)
        self.down = placement.row_parallel_linear(spec.down)

    def forward(
        self, x: Float[Tensor, "s b h"], context: Context | None = None
    ) -> Float[Tensor, "s b h"]:
        """Transforms each token of the sequence, or of this rank's part of it."""
        cut = None if context is None else context.sequence_parallel
        y = activate(self.up(x, sequence_parallel=cut), self.activation)
        result: Tensor = self.down(y, sequence_parallel=cut)
        return result


def activate(x: Float[Tensor, "..."], activation: Activation) -> Float[Tensor, "... f"]:
    """Applies an activation by its configured name; ``swiglu`` takes ``[..., 2, f]``."""
    if activation == "swiglu":
        return swiglu(x)
    return gelu(x, "tanh" if activation == "gelu_tanh" else "none")
