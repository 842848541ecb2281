"""Low-rank adapters (Hu et al. 2021, "LoRA"): `y = x W^T + (alpha / r) (x A^T) B^T`.

`W` is frozen; `A` `[r, in]` and `B` `[*out, r]` are trained. B starts at zero, so training starts
from the base model. A starts uniform within `1 / sqrt(in)`, as in Hugging Face's PEFT. There is no
dropout.

If a layer cuts its outputs, B is cut in the same way, and every rank holds A. The gradient of A is
partial: each rank computes the part that passes through its part of B. If a layer cuts its inputs,
A is cut in the same way and the gradient of B is partial. In a replicated layer, both gradients are
partial where that of the weight is. The only additional communication is the
sum of these small gradients, once a step. Each expert has its own A and B.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_parallel.sharding.sharding import ZEROS, Init, Sharding
from megatron_parallel.tensor_parallel.lora_config import LoRAConfig
from megatron_parallel.tensor_parallel.product import (
    Multiply,
    WeightGradientRequest,
    Weights,
    as_matrix,
    multiply_matrix,
)

A: Final = "lora_a"
B: Final = "lora_b"


@dataclass(frozen=True)
class LoRA:
    """A `Product` with a low-rank adapter.

    Attributes:
        rank: Columns of A and B.
        alpha: The adapter is scaled by `alpha / rank`.
    """

    rank: int
    alpha: float
    is_adapter: ClassVar[bool] = True

    @property
    def scale(self) -> float:
        """Factor of the product with A and B."""
        return self.alpha / self.rank

    def shardings(self, weight: Sharding) -> Mapping[str, Sharding]:
        """Returns the shardings of A and B.

        One of them is cut like the weight, the other one has a partial gradient.
        """
        numbers = weight.shape[:1] if weight.experts else ()
        last, inputs = len(weight.shape) - 1, weight.shape[-1]
        a_shape, b_shape = (*numbers, self.rank, inputs), (*weight.shape[:-1], self.rank)
        init, experts, fused = Init("uniform", inputs**-0.5), weight.experts, weight.fused_dim
        if weight.dim == last:
            a = Sharding(a_shape, weight.axis, len(a_shape) - 1, experts=experts, init=init)
            b = Sharding(b_shape, fused_dim=fused, experts=experts, init=ZEROS, partial=weight.axis)
            return {A: a, B: b}
        # For a replicated weight, A and B are replicated too, with partial gradients if it has one.
        a = Sharding(a_shape, experts=experts, init=init, partial=weight.axis or weight.partial)
        b = Sharding(
            b_shape,
            weight.axis,
            weight.dim,
            weight.padded,
            fused,
            experts=experts,
            init=ZEROS,
            partial=weight.partial,
            spill_dim=weight.spill_dim,
        )
        return {A: a, B: b}

    def forward(
        self,
        x: Float[Tensor, "... in"],
        weights: Weights,
        bias: Tensor | None = None,
        multiply: Multiply = multiply_matrix,
    ) -> Float[Tensor, "... flat"]:
        """Returns `x W^T + b + (alpha / r) (x A^T) B^T`."""
        weight, a, b = weights
        low = multiply(x, a, None) * self.scale
        return multiply(x, weight, bias) + multiply(low, b, None)

    def dgrad(self, dy: Float[Tensor, "rows out"], weights: Weights) -> Float[Tensor, "rows in"]:
        """Returns `dy W + (alpha / r) (dy B) A`."""
        weight, a, b = weights
        return torch.addmm(dy @ as_matrix(weight), dy @ as_matrix(b), a, alpha=self.scale)

    def wgrad(
        self,
        dy: Float[Tensor, "rows out"],
        x: Float[Tensor, "rows in"],
        weights: Weights,
        requests: Sequence[WeightGradientRequest | None],
    ) -> tuple[Tensor | None, ...]:
        """Returns `(alpha / r) (dy B)^T x` for A and `(alpha / r) dy^T (x A^T)` for B."""
        _, a, b = weights
        of_weight, of_a, of_b = requests
        return (
            None if of_weight is None else of_weight(dy, x),
            None if of_a is None else of_a((dy @ as_matrix(b)) * self.scale, x),
            None if of_b is None else of_b(dy, multiply_matrix(x, a) * self.scale),
        )

    def merged_weight(self, weights: Weights) -> Tensor:
        """Returns `W + (alpha / r) B A`, for each expert if there are experts."""
        weight, a, b = weights
        columns = b.flatten(1, -2) if a.dim() == 3 else as_matrix(b)
        return weight + self.scale * (columns @ a).view(weight.shape)


def lora_products(config: LoRAConfig) -> Mapping[str, LoRA]:
    """Returns the adapter for each role of layers in `config.target_modules`."""
    return dict.fromkeys(config.target_modules, LoRA(config.rank, config.alpha))
