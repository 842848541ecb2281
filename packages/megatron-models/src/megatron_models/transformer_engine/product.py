"""The product of a linear layer by Transformer Engine, in the model's precision or by a recipe.

`TransformerEngineProduct` computes its three products by `general_gemm` and adds gradients of
weights to main gradients in the product itself. `QuantizedProduct` quantizes the operands of each
by Transformer Engine's quantizers, along the dim over which the product sums.

With sequence parallelism, the inputs of column-parallel layers and the gradients of row-parallel
ones are gathered first and quantized then. So ranks with the same rows have the same scales, and no
largest magnitude is reduced in between, as Transformer Engine's own modules do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from megatron_kernels import KernelError
from megatron_kernels.transformer_engine import (
    NAME,
    TransformerEngineRecipe,
    is_quantized,
    te_dgrad,
    te_forward,
    te_unsupported_reason,
    te_wgrad,
)
from megatron_parallel import Mesh
from megatron_parallel.mesh import Axis
from megatron_parallel.tensor_parallel import (
    Gathering,
    Multiply,
    PlainProduct,
    Product,
    WeightGradientRequest,
    Weights,
    differentiate,
    multiply_matrix,
)
from megatron_parallel.tensor_parallel.product import as_matrix
from torch import Tensor, nn

from megatron_models.low_precision.recipe import Operand
from megatron_models.transformer_engine.gather import start_gather
from megatron_models.transformer_engine.shared_gradient import FewBits, SharedGradient


@dataclass(frozen=True)
class TransformerEngineProduct(PlainProduct):
    """The product `x W^T + b` by Transformer Engine, in the dtype of its operands."""

    def forward(
        self,
        x: Float[Tensor, "... in"],
        weights: Weights,
        bias: Tensor | None = None,
        multiply: Multiply = multiply_matrix,
    ) -> Float[Tensor, "... flat"]:
        """Returns `x W^T + b`.

        Raises:
            KernelError: Transformer Engine is missing or does not support the tensors.
        """
        others = [weights[0]] if bias is None else [weights[0], bias]
        reason = te_unsupported_reason(x, *others) or self.shape_reason(x, weights[0])
        if reason is not None:
            raise KernelError(f"linear cannot use backend {NAME}: {reason}")
        return differentiate(self, self._forward, x, weights, bias, multiply)

    def _forward(
        self, x: Tensor, weights: Weights, bias: Tensor | None, multiply: Multiply
    ) -> Tensor:
        del multiply
        return te_forward(x, as_matrix(weights[0]), bias)

    def dgrad(self, dy: Float[Tensor, "rows out"], weights: Weights) -> Float[Tensor, "rows in"]:
        """Returns `dy W`."""
        return te_dgrad(dy, as_matrix(weights[0]))

    def wgrad(
        self,
        dy: Float[Tensor, "rows out"],
        x: Float[Tensor, "rows in"],
        weights: Weights,
        requests: Sequence[WeightGradientRequest | None],
    ) -> tuple[Tensor | None, ...]:
        """Returns `dy^T x`, or adds it to a main gradient."""
        del weights
        request = requests[0]
        return (None if request is None else request(dy, x, self.multiply_factors),)

    def multiply_factors(
        self,
        dy: Float[Tensor, "rows out"],
        x: Float[Tensor, "rows in"],
        into: Float[Tensor, "out in"] | None = None,
        *,
        first: bool = True,
    ) -> Float[Tensor, "out in"]:
        """Returns `dy^T x`, or adds it to a matrix; see `FactorProduct`."""
        return te_wgrad(dy, x, into, first=first)

    def shape_reason(self, x: Tensor, weight: Tensor) -> str | None:
        """Returns why operands of these shapes are not supported; here all are."""


@dataclass(frozen=True)
class QuantizedProduct(TransformerEngineProduct):
    """The product by a recipe.

    Attributes:
        recipe: Formats of the operands.
        quantizes_wgrad: Whether gradients of weights are computed by the recipe too.
        shared: The gradient that `dgrad` has quantized for `wgrad`, of each layer by itself.
    """

    recipe: TransformerEngineRecipe
    quantizes_wgrad: bool
    shared: SharedGradient = field(
        default_factory=SharedGradient, compare=False, repr=False, kw_only=True
    )

    @property
    def uses_requests(self) -> bool:
        """True: gradients of weights are requested, so that they can be accumulated."""
        return True

    def bind(self, layer: nn.Module, mesh: Mesh) -> Product:
        """Returns the product of a layer."""
        del layer, mesh
        return replace(self, shared=SharedGradient())

    @property
    def reads_quantized_norms(self) -> bool:
        """Whether a norm may write the input in few bits.

        Kernels of norms do so where a tensor has one scale. Nothing has then the input in the
        model's precision, of which gradients of weights would be computed.
        """
        return self.recipe.scales_tensors and self.quantizes_wgrad

    def _forward(
        self, x: Tensor, weights: Weights, bias: Tensor | None, multiply: Multiply
    ) -> Tensor:
        del multiply
        weight = self.few_bits(as_matrix(weights[0]), "weight", rows=True)
        if not is_quantized(x):
            x = self.few_bits(x, "input", rows=True).operand
        return te_forward(x, weight.operand, bias, exact=self.recipe.sums_exactly_forward)

    def dgrad(self, dy: Float[Tensor, "rows out"], weights: Weights) -> Float[Tensor, "rows in"]:
        """Returns `dy W`."""
        weight = self.few_bits(as_matrix(weights[0]), "weight", columns=True)
        few = self.few_bits(dy, "gradient", rows=True, columns=self.quantizes_wgrad)
        if self.quantizes_wgrad:
            self.shared.put(dy, few)
        return te_dgrad(few.operand, weight.operand)

    def multiply_factors(
        self,
        dy: Float[Tensor, "rows out"],
        x: Float[Tensor, "rows in"],
        into: Float[Tensor, "out in"] | None = None,
        *,
        first: bool = True,
    ) -> Float[Tensor, "out in"]:
        """Returns `dy^T x`, or adds it to a matrix; see `FactorProduct`."""
        if not self.quantizes_wgrad:
            return te_wgrad(dy, x, into, first=first)
        few = self.shared.take(dy) or self.few_bits(dy, "gradient", columns=True)
        if is_quantized(x):  # by a norm, which wrote rows alone
            x.update_usage(columnwise_usage=True)  # type: ignore[attr-defined]
            own = None
        else:
            own = self.few_bits(x, "input", columns=True)
        self.observe(few, own)
        return te_wgrad(few.operand, x if own is None else own.operand, into, first=first)

    def few_bits(
        self, matrix: Tensor, operand: Operand, *, rows: bool = False, columns: bool = False
    ) -> FewBits:
        """Quantizes an operand.

        Args:
            matrix: The operand.
            operand: What it is.
            rows: Whether a product sums over its last dim.
            columns: Whether a product sums over its first dims.
        """
        quantizer = self.quantizer(operand, matrix.device, rows=rows, columns=columns)
        return FewBits(quantizer(matrix), quantizer)

    def quantizer(
        self,
        operand: Operand,
        device: torch.device,
        *,
        rows: bool = False,
        columns: bool = False,
        group: Any = None,
    ) -> Any:
        """Returns the quantizer of an operand.

        Args:
            operand: What it quantizes.
            device: Where.
            rows: See `few_bits`.
            columns: See `few_bits`.
            group: Ranks that have the other parts of the operand. Defaults to none.
        """
        return self.recipe.quantizer(operand, device, rows=rows, columns=columns, group=group)

    def observe(self, dy: FewBits, x: FewBits | None) -> None:
        """Observes the operands of a weight's gradient in a step; here nothing is observed.

        Args:
            dy: Gradient of the output.
            x: Input, or None if a norm wrote it.
        """

    def observe_norm(self, quantizer: Any) -> None:
        """Observes an input that a norm wrote; here nothing is observed."""

    def start_gather(self, x: Float[Tensor, "part ..."], axis: Axis) -> Gathering:
        """Starts the all-gather of an input, in few bits if a norm wrote it so."""
        return start_gather(x, axis)

    def shape_reason(self, x: Tensor, weight: Tensor) -> str | None:
        """Returns why the recipe does not quantize operands of these shapes, or None."""
        inputs, outputs = weight.shape[-1], weight.shape[:-1].numel()
        rows = x.shape[:-1].numel()
        for shape in ((rows, inputs), (outputs, inputs), (rows, outputs)):
            reason = self.recipe.shape_reason(*shape)
            if reason is not None:
                return reason
        return None
