"""The feed-forward layer: up projection, activation, down projection."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxtyping import Float
from megatron_kernels import bias_gelu, bias_swiglu, gelu, glu, pointwise, swiglu
from megatron_parallel.tensor_parallel import ColumnParallelLinear
from torch import Tensor, nn

from megatron_models.components.context import Context
from megatron_models.components.mlp.spec import GATES, MLPConfig, MLPSpec
from megatron_models.placement import Placement


class MLP(nn.Module):
    """``down(activation(up(x)))``. If gated, ``up`` is gate and up projection, ``(2, f, h)``.

    If the placement fuses them, the activation adds the bias of ``up``.
    """

    def __init__(self, spec: MLPSpec, layer: int, placement: Placement) -> None:
        super().__init__()
        self.activate = activation_of(spec, placement.backend)
        self.add_and_activate = bias_activation_of(spec, placement)
        self.up = placement.column_parallel_linear(spec.up)
        self.down = placement.row_parallel_linear(spec.down)

    @property
    def input_layer(self) -> ColumnParallelLinear:
        """The layer that alone reads the input."""
        return self.up

    def forward(
        self, x: Float[Tensor, "s b h"], context: Context | None = None
    ) -> Float[Tensor, "s b h"]:
        """Transforms each token of the sequence, or of this rank's part of it."""
        cut = None if context is None else context.sequence_parallel
        if self.add_and_activate is None:
            y = self.activate(self.up(x, sequence_parallel=cut))
        else:
            y = self.up(x, sequence_parallel=cut, adds_bias=False)
            y = self.add_and_activate(y, self.up.bias)
        result: Tensor = self.down(y, sequence_parallel=cut)
        return result


def bias_activation_of(spec: MLPSpec, placement: Placement) -> Callable[..., Tensor] | None:
    """Returns the operation that adds a bias and applies the activation, or None for two."""
    if not spec.has_mlp_bias:
        return None
    if spec.activation in ("gelu", "gelu_tanh"):
        backend = placement.fused(bias_gelu)
        approximate = "tanh" if spec.activation == "gelu_tanh" else "none"
        options: dict[str, Any] = {"approximate": approximate, "backend": backend}
        return None if backend is None else partial(bias_gelu, **options)
    plain = not spec.activation_func_clamp_value and not spec.glu_linear_offset
    if spec.activation == "swiglu" and plain:
        backend = placement.fused(bias_swiglu)
        return None if backend is None else partial(bias_swiglu, backend=backend)
    return None


def activation_of(
    config: MLPConfig, backend: Callable[[str], str] = lambda _: "auto"
) -> Callable[[Tensor], Tensor]:
    """Returns the activation; a gated one maps ``[..., 2, f]`` to ``[..., f]``.

    Args:
        config: Its name and bounds.
        backend: Returns the backend of an operation.
    """
    name = config.activation
    bound, offset = config.activation_func_clamp_value, config.glu_linear_offset
    if name == "swiglu" and not bound and not offset:
        return partial(swiglu, backend=backend("swiglu"))
    if name in GATES:
        gate = GATES[name]
        return partial(glu, gate=gate, bound=bound, offset=offset, backend=backend("glu"))
    if name in ("gelu", "gelu_tanh"):
        approximate: Any = "tanh" if name == "gelu_tanh" else "none"
        return partial(gelu, approximate=approximate, backend=backend("gelu"))
    kind: Any = name
    return partial(pointwise, kind=kind, backend=backend("pointwise"))
