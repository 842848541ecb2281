"""The product of linear layers in few bits, with state of its own for delayed scaling.

`LowPrecisionProduct` quantizes the operands of each of its three products along the dim over which
it sums, and multiplies them by `megatron_kernels.quantized_matmul`. Inputs and weights are saved
for the backward pass in the model's precision, and quantized again there.

Delayed scaling (Micikevicius et al. 2022, section 4) takes scales from the largest magnitudes of
earlier steps. These are state of the layer: maxima over all micro-batches of a step and all ranks
that have a part of the tensor, so every layout has the same scales. Transformer Engine shifts its
history once a micro-batch instead. A tensor without a history, as in the first step, has a scale of
its own, a power of two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from megatron_kernels import Quantized, quantize, quantized_matmul, tensor_scale
from megatron_parallel import Mesh, Sharding, StepState
from megatron_parallel.sharding import ZEROS
from megatron_parallel.tensor_parallel import (
    Multiply,
    PlainProduct,
    Product,
    WeightGradientRequest,
    Weights,
    differentiate,
    multiply_matrix,
)
from megatron_parallel.tensor_parallel.product import as_matrix, as_rows
from torch import Tensor, nn

from megatron_models.low_precision.config import AMAX_HISTORY
from megatron_models.low_precision.recipe import OPERANDS, Operand, ProductRecipe
from megatron_models.low_precision.spreading import hadamard, hashed_noise


@dataclass(frozen=True)
class LowPrecisionProduct(PlainProduct):
    """A `Product` in few bits, `x W^T + b`.

    Attributes:
        recipe: Formats of the operands.
    """

    recipe: ProductRecipe
    is_adapter: ClassVar[bool] = False

    @property
    def uses_requests(self) -> bool:
        """Whether gradients of weights are computed in the model's precision."""
        return not self.recipe.wgrad

    def bind(self, layer: nn.Module, mesh: Mesh) -> Product:
        """Returns the product itself, which has no state."""
        del layer, mesh
        return self

    def forward(
        self,
        x: Float[Tensor, "... in"],
        weights: Weights,
        bias: Tensor | None = None,
        multiply: Multiply = multiply_matrix,
    ) -> Float[Tensor, "... flat"]:
        """Returns `x W^T + b`."""
        return differentiate(self, self._forward, x, weights, bias, multiply)

    def _forward(
        self, x: Tensor, weights: Weights, bias: Tensor | None, multiply: Multiply
    ) -> Tensor:
        weight = as_matrix(weights[0])
        rows = self.quantized(as_rows(x), "input")
        y = quantized_matmul(rows, self.quantized(weight, "weight"), bias, x.dtype)
        return y.view(*x.shape[:-1], len(weight))

    def dgrad(self, dy: Float[Tensor, "rows out"], weights: Weights) -> Float[Tensor, "rows in"]:
        """Returns `dy W`."""
        columns = self.quantized(as_matrix(weights[0]).t(), "weight")
        return quantized_matmul(self.quantized(dy, "gradient"), columns, None, dy.dtype)

    def wgrad(
        self,
        dy: Float[Tensor, "rows out"],
        x: Float[Tensor, "rows in"],
        weights: Weights,
        requests: Sequence[WeightGradientRequest | None],
    ) -> tuple[Tensor | None, ...]:
        """Returns `dy^T x`."""
        request = requests[0]
        if request is None or not self.recipe.wgrad:
            return (None if request is None else request(dy, x),)
        left, right = dy.t(), x.t()
        if self.recipe.hadamard:
            left, right = hadamard(left), hadamard(right)
        gradient = quantized_matmul(
            self.quantized(left, "gradient"), self.quantized(right, "input"), None, dy.dtype
        )
        return (gradient.view(request.shape),)

    def quantized(self, matrix: Float[Tensor, "m k"], operand: Operand) -> Quantized:
        """Returns an operand in few bits.

        Args:
            matrix: The operand, with the dim over which the product sums as its last one.
            operand: What it is.
        """
        noise = None
        if operand == "gradient" and self.recipe.stochastic:
            noise = hashed_noise(matrix)
        return quantize(matrix, self.recipe.of(operand), noise=noise)


@dataclass(frozen=True)
class DelayedProduct(LowPrecisionProduct):
    """A product whose scales follow the magnitudes of earlier steps, before it has a layer.

    Attributes:
        margin: Powers of two between the largest magnitude and the largest element.
        length: Steps of the history.
        algorithm: Magnitude of the history that the scale follows.
    """

    margin: int = 0
    length: int = 1
    algorithm: Literal["most_recent", "max"] = "most_recent"

    def bind(self, layer: nn.Module, mesh: Mesh) -> Product:
        """Returns the product of a layer, and adds the history to the layer."""
        table: dict[str, Sharding] = layer.sharding  # type: ignore[assignment]
        weight = table["weight"]
        table[AMAX_HISTORY] = history_sharding(weight, self.length)
        state = StepState(
            layer,
            AMAX_HISTORY,
            mesh,
            shifted_history,
            parameter="weight",
            observation_shape=(len(OPERANDS),),
            device=layer.get_parameter("weight").device,
        )
        return LayerDelayedProduct(**vars(self), history=state)


@dataclass(frozen=True, eq=False)
class LayerDelayedProduct(DelayedProduct):
    """The product of one layer, with its history.

    Attributes:
        history: The layer's history `[3, steps]`, newest first, with rows of input, weight and
            gradient. Magnitudes are observed where the gradient of the weight is computed, so
            evaluations and frozen layers observe nothing.
    """

    history: StepState = None  # type: ignore[assignment]

    def wgrad(
        self,
        dy: Float[Tensor, "rows out"],
        x: Float[Tensor, "rows in"],
        weights: Weights,
        requests: Sequence[WeightGradientRequest | None],
    ) -> tuple[Tensor | None, ...]:
        """Returns `dy^T x`."""
        self._observe((x, weights[0], dy))
        return super().wgrad(dy, x, weights, requests)

    def quantized(self, matrix: Float[Tensor, "m k"], operand: Operand) -> Quantized:
        """Returns an operand in few bits, scaled by its history."""
        form = self.recipe.of(operand)
        row = self.history.value[OPERANDS.index(operand)]
        amax = row.amax() if self.algorithm == "max" else row[0]
        own = tensor_scale(matrix, replace(form, scale="power_of_two"))
        delayed = amax * 2.0**self.margin / form.largest
        return quantize(matrix, form, scale=torch.where(amax > 0, delayed, own))

    def _observe(self, operands: tuple[Tensor, ...]) -> None:
        """Adds the largest magnitudes of the operands to the observations of this step."""
        seen = [
            each.detach().abs().amax() if each.numel() else each.new_tensor(-torch.inf)
            for each in operands
        ]
        self.history.add(torch.stack([each.to(self.history.value.dtype) for each in seen]))


def history_sharding(weight: Sharding, length: int) -> Sharding:
    """Returns the sharding of the history of a layer with a weight.

    Every rank holds it. It is the maximum over the ranks that have a part of the layer's tensors.
    """
    return Sharding(
        (len(OPERANDS), length),
        init=ZEROS,
        partial=weight.axis or weight.partial,
        reduce="max",
    )


def shifted_history(
    value: Float[Tensor, "operands steps"], observed: Float[Tensor, " operands"]
) -> Float[Tensor, "operands steps"]:
    """Returns the history after a step.

    The row of an operand without a finite, positive magnitude in the step stays.
    """
    newest = observed.to(value.dtype)[:, None]
    shifted = torch.cat((newest, value[:, :-1]), 1)
    return torch.where(newest.isfinite() & (newest > 0), shifted, value)
