"""The product of linear layers in few bits.

`LowPrecisionProduct` converts the operands of the three products of a layer: along the dim over
which a product sums, as matrix units need it. With one scale for a tensor both dims have the same
elements, so each operand is cast once, with a copy for the other dim; with blocks each dim has its
own. Inputs are saved for the backward pass as converted for the gradient of the weight, and weights
are converted once a step (`megatron_models.low_precision.held_weight`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, NamedTuple

import torch
from jaxtyping import Float
from megatron_kernels import (
    AUTO,
    Quantized,
    ScaleType,
    TensorElements,
    of_tensor,
    quantize,
    quantize_tensor,
    quantized_matmul,
    transpose,
)
from megatron_parallel import Mesh, Sharding
from megatron_parallel.tensor_parallel import (
    Multiply,
    PlainProduct,
    Product,
    Saved,
    SavedTensors,
    SavingProduct,
    WeightGradientRequest,
    Weights,
    differentiate_steps,
    multiply_matrix,
)
from megatron_parallel.tensor_parallel.product import as_matrix, as_rows
from torch import Tensor, nn

from megatron_models.grouped_multiply import GroupedMultiply
from megatron_models.low_precision.experts import GroupedSteps
from megatron_models.low_precision.held_weight import HeldWeight
from megatron_models.low_precision.operands import PARTS, BothWays, pack, unpack
from megatron_models.low_precision.recipe import Operand, ProductRecipe
from megatron_models.low_precision.spreading import WIDTH, hadamard, hashed_noise

_FP8: Final = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class OutputGradient(NamedTuple):
    """The gradient of the output.

    Attributes:
        both: In few bits, or None if no product needs it.
        exact: The gradient itself.
    """

    both: BothWays | None
    exact: Tensor


@dataclass(frozen=True)
class LowPrecisionProduct(PlainProduct, SavingProduct):
    """A `Product` in few bits, `x W^T + b`.

    Attributes:
        recipe: Formats of the operands.
        keeps_input: Whether the input is saved as it is, because another operation saves it too.
        backends: Backends of operations of `megatron_kernels` by name.
        held: The converted weight of the layer, or None before the product has one.
        grouped: Whether the layer is one of experts.
    """

    recipe: ProductRecipe
    keeps_input: bool = False
    backends: tuple[tuple[str, str], ...] = ()
    held: HeldWeight | None = None
    grouped: bool = False
    observes: ClassVar[bool] = False

    @property
    def uses_requests(self) -> bool:
        """Whether gradients of weights are computed in the model's precision."""
        return not self.recipe.wgrad

    def bind(self, layer: nn.Module, mesh: Mesh) -> Product:
        """Returns the product of a layer."""
        del mesh
        return replace(self, held=HeldWeight(), grouped=is_of_experts(layer))

    def backend(self, name: str) -> str:
        """Returns the backend of an operation, ``auto`` if none is chosen."""
        return dict(self.backends).get(name, AUTO)

    def forward(
        self,
        x: Float[Tensor, "... in"],
        weights: Weights,
        bias: Tensor | None = None,
        multiply: Multiply = multiply_matrix,
    ) -> Float[Tensor, "... flat"]:
        """Returns `x W^T + b`."""
        if isinstance(multiply, GroupedMultiply):
            steps = GroupedSteps(self, multiply.counts, multiply.has_tail)
            return differentiate_steps(steps, x, weights, bias, multiply)
        return differentiate_steps(self, x, weights, bias, multiply)

    def dgrad(self, dy: Float[Tensor, "rows out"], weights: Weights) -> Float[Tensor, "rows in"]:
        """Returns `dy W`."""
        gradient = self.gradient(dy, of_input=True, of_weights=False)
        return self.input_gradient(gradient, Saved((), tuple(weights)))

    def wgrad(
        self,
        dy: Float[Tensor, "rows out"],
        x: Float[Tensor, "rows in"],
        weights: Weights,
        requests: Sequence[WeightGradientRequest | None],
    ) -> tuple[Tensor | None, ...]:
        """Returns `dy^T x`."""
        gradient = self.gradient(dy, of_input=False, of_weights=True)
        return self.weight_gradients(gradient, Saved((x,), tuple(weights)), requests)

    # -- the steps of a `SavingProduct` ----------------------------------------------------------

    def forward_saving(
        self,
        x: Float[Tensor, "... in"],
        weights: Weights,
        bias: Tensor | None,
        multiply: Multiply,
        *,
        constant: SavedTensors = (),
        saves: bool = True,
        by_rows: bool = False,
    ) -> tuple[Float[Tensor, "... flat"], Saved]:
        """Returns `x W^T + b`, and the input as the gradient of the weight reads it.

        That is the input itself if it is kept, or if blocks of tokens would be cut.
        """
        matrix, rows = as_matrix(weights[0]), as_rows(x)
        by_tensor = self.recipe.input.is_per_tensor
        keeps = self.keeps_input or not self.recipe.wgrad or (by_rows and not by_tensor)
        converts = saves and not keeps
        both = self.converted(rows, "input", columns=converts and not by_rows)
        weight, scale = self._weight_rows(matrix, constant)
        y = quantized_matmul(_found(both.rows), weight, bias, x.dtype)
        kept: tuple[Tensor | None, ...] = ()
        amax = both.amax if self.observes else None
        if converts:
            own = pack(both.rows if by_rows else both.columns)
            if by_rows:  # collectives take bytes
                own = (saved_tensor(own[0]).view(torch.uint8).view(x.shape), *own[1:])
            kept = (*own, amax)
        elif saves:
            kept = (x, _found(both.rows).scales, amax) if by_tensor else (x,)
        saved = Saved(kept, (weights[0], *scale))
        return y.view(*x.shape[:-1], len(matrix)), saved

    def gradient(
        self, dy: Float[Tensor, "rows out"], *, of_input: bool, of_weights: bool
    ) -> OutputGradient:
        """Returns the gradient of the output in few bits."""
        columns = of_weights and self.recipe.wgrad
        if not of_input and not columns:
            return OutputGradient(None, dy)
        return OutputGradient(self.converted(dy, "gradient", rows=of_input, columns=columns), dy)

    def input_gradient(self, gradient: OutputGradient, saved: Saved) -> Float[Tensor, "rows in"]:
        """Returns `dy W`."""
        rows = _found(None if gradient.both is None else gradient.both.rows)
        return quantized_matmul(rows, self._weight_columns(saved), None, gradient.exact.dtype)

    def weight_gradients(
        self,
        gradient: OutputGradient,
        saved: Saved,
        requests: Sequence[WeightGradientRequest | None],
    ) -> tuple[Tensor | None, ...]:
        """Returns `dy^T x`."""
        request, dy = requests[0], gradient.exact
        left = None if gradient.both is None else gradient.both.columns
        right, amax = self._input_columns(saved.input, len(dy))
        if self.observes:
            self._observe(saved, gradient, amax)
        if request is None or left is None or right is None:
            return (None if request is None else request(dy, as_rows(saved.input[0])),)
        product = quantized_matmul(left, right, None, dy.dtype)
        return (product.view(request.shape),)

    def constant_weights(self, weights: Weights) -> tuple[Any, ...]:
        """Returns the converted weight while it is held."""
        if self.held is None:
            return ()
        return self.held.of(weights[0], self._converted_weight)

    def hold_weights(self, *, compiled: bool = False) -> None:
        """Begins a time in which the weight does not change."""
        if self.held is not None:
            self.held.hold(compiled=compiled)

    def release_weights(self) -> None:
        """Ends it."""
        if self.held is not None:
            self.held.release()

    # -- conversions -----------------------------------------------------------------------------

    def elements(
        self,
        x: Float[Tensor, "... m k"],
        operand: Operand,
        *,
        rows: bool = True,
        columns: bool = True,
        scale: Tensor | None = None,
    ) -> TensorElements:
        """Returns an operand in FP8 with one scale.

        Args:
            x: The operand.
            operand: What it is.
            rows: Whether products that sum over its last dim are computed.
            columns: Whether products that sum over the dim before are computed.
            scale: Its scale, if it is known. By default it is found, and the magnitude too.
        """
        form = self.recipe.of(operand)
        known = scale is not None
        if not known:
            scale = self.scale(operand)
        return quantize_tensor(
            x,
            form.elements,
            self.scale_rule(operand),
            None if scale is None else scale.view(()),
            rows,
            columns,
            not known,
            backend=self.backend("quantize_tensor"),
        )

    def scale(self, operand: Operand) -> Float[Tensor, ""] | None:
        """Returns the scale of an operand with one, 0 if it is its own, None if it always is."""
        del operand
        return None

    def scale_rule(self, operand: Operand) -> ScaleType:
        """Returns how an operand's own scale is chosen."""
        return self.recipe.of(operand).scale

    def converted(
        self,
        matrix: Float[Tensor, "m k"],
        operand: Operand,
        *,
        rows: bool = True,
        columns: bool = True,
        scale: Tensor | None = None,
    ) -> BothWays:
        """Returns an operand in few bits.

        Args:
            matrix: The operand.
            operand: What it is.
            rows: Whether a product sums over its columns.
            columns: Whether a product sums over its rows.
            scale: Its scale, if the format has one and it is known.
        """
        form = self.recipe.of(operand)
        if form.is_per_tensor and form.elements in ("e4m3", "e5m2"):
            found = self.elements(matrix, operand, rows=rows, columns=columns, scale=scale)
            return BothWays(
                found.of_rows(form) if rows else None,
                found.of_columns(form) if columns else None,
                found.amax,
            )
        left = self._blocks(matrix, operand) if rows else None
        right = None
        if columns and left is not None and form.rows == form.columns:
            right = transpose(left)
        elif columns:
            spread = self.recipe.hadamard and operand != "weight"
            right = self._blocks(hadamard(matrix.t()) if spread else matrix.t(), operand)
        return BothWays(left, right, None)

    def _blocks(self, matrix: Float[Tensor, "m k"], operand: Operand) -> Quantized:
        """Returns an operand with scales of blocks of its columns."""
        noise = None
        if operand == "gradient" and self.recipe.stochastic:
            noise = hashed_noise(matrix)
        return quantize(matrix, self.recipe.of(operand), noise=noise)

    def _converted_weight(self, weight: Tensor) -> tuple[Tensor | None, ...]:
        """Returns what is held of a weight: of experts its elements, of others both matrices."""
        if self.grouped:
            fused = "scaled_grouped_mm" in self.backend("quantized_grouped_matmul")
            return tuple(self.elements(weight.flatten(1, -2), "weight", columns=fused))
        return self.converted(as_matrix(weight), "weight").pack()

    def _weight_rows(
        self, matrix: Tensor, constant: SavedTensors
    ) -> tuple[Quantized, tuple[Tensor, ...]]:
        """Returns the weight for the product, and its scale if another conversion can take it."""
        form = self.recipe.weight
        if constant:
            return unpack(constant[:PARTS], form, matrix.shape[1]), ()
        weight = _found(self.converted(matrix, "weight", columns=False).rows)
        return weight, (weight.scales,) if form.is_per_tensor else ()

    def _weight_columns(self, saved: Saved) -> Quantized:
        """Returns the transposed weight for the gradient of the input."""
        matrix, constant = as_matrix(saved.weights[0]), self._constant(saved)
        if constant:
            return unpack(constant[PARTS : 2 * PARTS], self.recipe.weight, len(matrix))
        scale = saved.weights[1] if len(saved.weights) > 1 else None
        both = self.converted(matrix, "weight", rows=False, scale=scale)
        return _found(both.columns)

    def _input_columns(
        self, kept: tuple[Tensor | None, ...], tokens: int
    ) -> tuple[Quantized | None, Tensor | None]:
        """Returns the transposed input for the gradient of the weight, and its magnitude."""
        first, form = kept[0], self.recipe.input
        if len(kept) <= PARTS:  # the input as it is, and what is known of it
            scale, amax = kept[1:] or (None, None)
            if not self.recipe.wgrad:
                return None, amax
            both = self.converted(as_rows(saved_tensor(first)), "input", rows=False, scale=scale)
            return both.columns, both.amax if scale is None else amax
        *parts, amax = kept
        if first is not None and first.dtype == torch.uint8 and form.elements in _FP8:
            rows = as_rows(first).view(_FP8[form.elements])
            return of_tensor(rows.t(), saved_tensor(parts[1]), form), amax
        width = tokens + (-tokens % WIDTH if self.recipe.hadamard else 0)
        return unpack(tuple(parts), form, width), amax

    @staticmethod
    def _constant(saved: Saved) -> tuple[Tensor | None, ...]:
        """Returns the converted weight among the tensors that were saved."""
        held = 2 * PARTS + 1
        return saved.weights[-held:] if len(saved.weights) > held else ()

    def observe(self, *magnitudes: Tensor) -> None:
        """Observes nothing: a tensor's own scale has no history."""

    def _observe(self, saved: Saved, gradient: OutputGradient, amax: Tensor | None) -> None:
        """Observes the operands of a micro-batch, where scales have a history."""


def _found(quantized: Quantized | None) -> Quantized:
    if quantized is None:
        raise TypeError("the operand was not converted for this product")
    return quantized


def saved_tensor(x: Tensor | None) -> Tensor:
    """Returns a saved tensor, or raises a `TypeError` if it was not saved."""
    if x is None:
        raise TypeError("the magnitude of an operand was not saved")
    return x


def is_of_experts(layer: nn.Module) -> bool:
    """Returns whether a layer has a matrix for each expert."""
    table: dict[str, Sharding] = layer.sharding  # type: ignore[assignment]
    return table["weight"].experts
