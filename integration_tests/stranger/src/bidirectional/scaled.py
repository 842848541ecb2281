"""A product of linear layers: ``(x W^T) * scale`` with a learned factor for each output."""

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
    """The scaled product; ``scale`` is sharded like the outputs, or its gradient is partial."""

    start: float
    is_adapter = False

    def shardings(self, weight: Sharding) -> Mapping[str, Sharding]:
        """Returns the sharding of the factors."""
        outputs, init = weight.shape[:-1], Init("constant", self.start)
        if weight.dim == len(outputs):  # inputs are split: ranks have partial sums of the outputs
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
        """Returns the scaled product of ``x`` and the weight, plus the bias."""
        weight, scale = weights
        y = multiply(x, weight, None) * scale.flatten()
        return y if bias is None else y + bias

    def dgrad(self, dy: Tensor, weights: Weights) -> Tensor:
        """Returns the gradient of the input."""
        weight, scale = weights
        return PLAIN.dgrad(dy * scale.flatten(), [weight])

    def wgrad(
        self,
        dy: Tensor,
        x: Tensor,
        weights: Weights,
        requests: Sequence[WeightGradientRequest | None],
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradients of weight and factors."""
        weight, scale = weights
        scale_gradient = None
        if requests[1] is not None:
            scale_gradient = (dy * multiply_matrix(x, weight)).sum(0).view_as(scale)
        return *PLAIN.wgrad(dy * scale.flatten(), x, [weight], requests[:1]), scale_gradient

    def merged_weight(self, weights: Weights) -> Tensor:
        """Returns the weight multiplied by its factors."""
        weight, scale = weights
        return weight * scale.unsqueeze(-1)


def products(config: ScaledConfig) -> Mapping[str, Scaled]:
    """Returns the product for the projections of feed-forward layers."""
    return dict.fromkeys(("linear_fc1", "linear_fc2"), Scaled(config.start))
