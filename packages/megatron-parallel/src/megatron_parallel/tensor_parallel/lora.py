"""Low-rank adapters (Hu et al. 2021, "LoRA"): `y = x W^T + (alpha / r) (x A^T) B^T`.

`W` is frozen; `A` `[r, in]` and `B` `[*out, r]` are trained. B starts at zero, so that training
starts from the model that is adapted, and A as in Hugging Face's PEFT, uniform within
`1 / sqrt(in)`. There is no dropout.

Where a layer cuts its outputs, B is cut like them, and every rank holds A, whose gradient is
partial: each rank knows the share that passes through its part of B. Where it cuts its inputs, A is
cut like them and B's gradient is partial. Nothing more is sent than without adapters, but for these
small sums, once a step. Experts have an A and a B each.
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
    """The `Product` with a low-rank adapter.

    Attributes:
        rank: Columns of A and B.
        alpha: The adapter is scaled by `alpha / rank`.
    """

    rank: int
    alpha: float
    is_adapter: ClassVar[bool] = True

    @property
    def scale(self) -> float:
        """What the product with A and B is multiplied by."""
        return self.alpha / self.rank

    def shardings(self, weight: Sharding) -> Mapping[str, Sharding]:
        """How A and B are cut: one of them like the weight, the other's gradient is partial."""
        numbers = weight.shape[:1] if weight.experts else ()
        last, inputs = len(weight.shape) - 1, weight.shape[-1]
        a_shape, b_shape = (*numbers, self.rank, inputs), (*weight.shape[:-1], self.rank)
        init, experts, fused = Init("uniform", inputs**-0.5), weight.experts, weight.fused_dim
        if weight.dim == last:
            a = Sharding(a_shape, weight.axis, len(a_shape) - 1, experts=experts, init=init)
            b = Sharding(b_shape, fused_dim=fused, experts=experts, init=ZEROS, partial=weight.axis)
            return {A: a, B: b}
        a = Sharding(a_shape, experts=experts, init=init, partial=weight.axis)
        b = Sharding(
            b_shape,
            weight.axis,
            weight.dim,
            weight.padded,
            fused,
            experts=experts,
            init=ZEROS,
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
        """`x W^T + b + (alpha / r) (x A^T) B^T`."""
        weight, a, b = weights
        low = multiply(x, a, None) * self.scale
        return multiply(x, weight, bias) + multiply(low, b, None)

    def dgrad(self, dy: Float[Tensor, "rows out"], weights: Weights) -> Float[Tensor, "rows in"]:
        """`dy W + (alpha / r) (dy B) A`."""
        weight, a, b = weights
        return torch.addmm(dy @ as_matrix(weight), dy @ as_matrix(b), a, alpha=self.scale)

    def wgrad(
        self,
        dy: Float[Tensor, "rows out"],
        x: Float[Tensor, "rows in"],
        weights: Weights,
        requests: Sequence[WeightGradientRequest | None],
    ) -> tuple[Tensor | None, ...]:
        """Of A `(alpha / r) (dy B)^T x`, of B `(alpha / r) dy^T (x A^T)`."""
        _, a, b = weights
        of_weight, of_a, of_b = requests
        return (
            None if of_weight is None else of_weight(dy, x),
            None if of_a is None else of_a((dy @ as_matrix(b)) * self.scale, x),
            None if of_b is None else of_b(dy, multiply_matrix(x, a) * self.scale),
        )

    def merged_weight(self, weights: Weights) -> Tensor:
        """`W + (alpha / r) B A`, of each expert."""
        weight, a, b = weights
        columns = b.flatten(1, -2) if a.dim() == 3 else as_matrix(b)
        return weight + self.scale * (columns @ a).view(weight.shape)


def lora_products(config: LoRAConfig) -> Mapping[str, LoRA]:
    """Returns the adapter of each role of layers that `config` names."""
    return dict.fromkeys(config.target_modules, LoRA(config.rank, config.alpha))
