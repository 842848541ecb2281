"""A product of linear layers: ``(x W^T) * g`` with a learned factor for each output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_parallel import Sharding
from megatron_parallel.sharding import Init
from megatron_parallel.tensor_parallel import (
    PLAIN,
    Multiply,
    WeightGradientRequest,
    Weights,
    multiply_matrix,
)
from torch import Tensor

from bidirectional.scaled_kind import ScaledConfig


@dataclass(frozen=True)
class Scaled:
    """The product; ``scale`` is cut like the outputs, or its gradient is partial."""

    start: float
    is_adapter = False

    def shardings(self, weight: Sharding) -> Mapping[str, Sharding]:
        """Describe the factors."""
        outputs, init = weight.shape[:-1], Init("constant", self.start)
        if weight.dim == len(outputs):  # the inputs are cut: a rank has a part of each output's sum
            return {"scale": Sharding(outputs, weight_decay=False, init=init, partial=weight.axis)}
        return {
            "scale": Sharding(
                outputs,
                weight.axis,
                weight.dim,
                weight.padded,
                weight.fused_dim,
                weight_decay=False,
                init=init,
                spill_dim=weight.spill_dim,
            )
        }

    def forward(
        self,
        x: Tensor,
        weights: Weights,
        bias: Tensor | None = None,
        multiply: Multiply = multiply_matrix,
    ) -> Tensor:
        """Multiply, then scale."""
        weight, scale = weights
        y = multiply(x, weight, None) * scale.flatten()
        return y if bias is None else y + bias

    def dgrad(self, dy: Tensor, weights: Weights) -> Tensor:
        """Return the gradient of the input."""
        weight, scale = weights
        return PLAIN.dgrad(dy * scale.flatten(), [weight])

    def wgrad(
        self,
        dy: Tensor,
        x: Tensor,
        weights: Weights,
        requests: Sequence[WeightGradientRequest | None],
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of weight and factors."""
        weight, scale = weights
        of_scale = None
        if requests[1] is not None:
            of_scale = (dy * multiply_matrix(x, weight)).sum(0).view_as(scale)
        return *PLAIN.wgrad(dy * scale.flatten(), x, [weight], requests[:1]), of_scale

    def merged_weight(self, weights: Weights) -> Tensor:
        """Return the weight times its factors."""
        weight, scale = weights
        return weight * scale.unsqueeze(-1)


def products(config: ScaledConfig) -> Mapping[str, Scaled]:
    """Scale the projections of feed-forward layers."""
    return dict.fromkeys(("linear_fc1", "linear_fc2"), Scaled(config.start))
