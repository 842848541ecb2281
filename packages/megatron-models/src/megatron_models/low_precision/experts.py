"""The product of experts in FP8: rows of tokens by group, each group with its own matrix.

Each operand has one scale, as in the other layers: the rows of all experts of this rank, all their
matrices, and all gradients. So operands are cast once, and the input is saved in FP8.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from jaxtyping import Float, Int
from megatron_kernels import (
    TensorElements,
    groups_of_rows,
    quantized_grouped_gradient,
    quantized_grouped_matmul,
)
from megatron_parallel.tensor_parallel import (
    Multiply,
    Saved,
    SavedTensors,
    SavingProduct,
    Weights,
)
from megatron_parallel.tensor_parallel.product import WeightGradientRequest
from torch import Tensor

from megatron_models.low_precision.recipe import Operand


class CastsOperands(Protocol):
    """What casts the operands of a layer, and observes their magnitudes."""

    def elements(
        self,
        x: Float[Tensor, "... m k"],
        operand: Operand,
        *,
        rows: bool = True,
        columns: bool = True,
        scale: Tensor | None = None,
    ) -> TensorElements:
        """Returns an operand in FP8."""

    def constant_weights(self, weights: Weights) -> tuple[Tensor, ...]:
        """Returns the elements of the weight while they are held."""

    def observe(self, *magnitudes: Tensor) -> None:
        """Adds the largest magnitudes of input, weight and gradient to those of this step."""

    def backend(self, name: str) -> str:
        """Returns the backend of an operation."""


class _Gradient(NamedTuple):
    """The gradient of the output, in FP8 and in the precision of the model."""

    cast: TensorElements
    exact: Tensor


class GroupedSteps(SavingProduct):
    """The steps of the product of experts, for the rows of one micro-batch.

    Args:
        operands: Casts the operands of the layer.
        counts: Rows of each expert on this rank.
        has_tail: Whether rows of no expert may follow.
    """

    def __init__(self, operands: CastsOperands, counts: Int[Tensor, " e"], has_tail: bool) -> None:
        self._operands, self._counts, self._has_tail = operands, counts, has_tail

    def forward_saving(
        self,
        x: Float[Tensor, "m i"],
        weights: Weights,
        bias: Tensor | None,
        multiply: Multiply,
        *,
        constant: SavedTensors = (),
        saves: bool = True,
        by_rows: bool = False,
    ) -> tuple[Float[Tensor, "m o"], Saved]:
        """Returns the product of each row; zero for rows of no expert."""
        weight = TensorElements(*constant) if constant else self._matrices(weights[0])
        own = self._operands.elements(self._without_tail(x), "input", columns=False)
        y = self._multiply(own, weight.rows, weight.scale, x)
        kept = (own.rows, own.scale, own.amax) if saves else ()
        return y, Saved(kept, (weights[0], weight.scale, weight.amax))

    def gradient(self, dy: Float[Tensor, "m o"], *, of_input: bool, of_weights: bool) -> _Gradient:
        """Returns the gradient of the output in FP8, which both other gradients read."""
        own = self._without_tail(dy)
        return _Gradient(self._operands.elements(own, "gradient", columns=False), dy)

    def input_gradient(self, gradient: _Gradient, saved: Saved) -> Float[Tensor, "m i"]:
        """Returns the gradient of each row; zero for rows of no expert."""
        weight, scale, _, *held = saved.weights
        cast = TensorElements(*held) if held else self._matrices(weight, scale)
        columns = cast.columns if cast.columns.numel() else cast.rows.mT
        return self._multiply(gradient.cast, columns, cast.scale, gradient.exact)

    def weight_gradients(
        self,
        gradient: _Gradient,
        saved: Saved,
        requests: Sequence[WeightGradientRequest | None],
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradient of the matrices."""
        rows, scale, amax = saved.input
        self._operands.observe(amax, saved.weights[2], gradient.cast.amax)
        if requests[0] is None:
            return (None,)
        found = quantized_grouped_gradient(
            gradient.cast.rows,
            gradient.cast.scale,
            rows,
            scale,
            self._counts,
            gradient.exact.dtype,
            backend=self._operands.backend("quantized_grouped_gradient"),
        )
        return (found.view(requests[0].shape),)

    def constant_weights(self, weights: Weights) -> tuple[Tensor, ...]:
        """Returns the elements of the matrices while they are held."""
        return self._operands.constant_weights(weights)

    def _without_tail(self, x: Float[Tensor, "m k"]) -> Float[Tensor, "m k"]:
        """Returns rows with zeros for those of no expert, which must not affect the scale."""
        if not self._has_tail:
            return x
        owner = groups_of_rows(self._counts.to(x.device), len(x))
        return x.masked_fill((owner == len(self._counts))[:, None], 0)

    def _matrices(self, weight: Tensor, scale: Tensor | None = None) -> TensorElements:
        return self._operands.elements(weight.flatten(1, -2), "weight", columns=False, scale=scale)

    def _multiply(
        self, rows: TensorElements, matrices: Tensor, scale: Tensor, like: Tensor
    ) -> Tensor:
        return quantized_grouped_matmul(
            rows.rows,
            rows.scale,
            matrices,
            scale,
            self._counts,
            like.dtype,
            backend=self._operands.backend("quantized_grouped_matmul"),
        )
