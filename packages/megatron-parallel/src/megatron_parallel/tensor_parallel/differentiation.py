"""How products are differentiated: by their own steps, and with gradients added to buffers.

An `AccumulatingProduct` adds each weight gradient directly to a buffer, from its two factors, and
returns none to autograd: no matrix as large as the weight is made first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from megatron_parallel import _compat
from megatron_parallel.tensor_parallel.product import (
    AccumulateGradient,
    FactorProduct,
    Multiply,
    Product,
    WeightGradientRequest,
    Weights,
    as_rows,
    multiply_matrix,
    no_gradients,
    weight_gradient_requests,
)
from megatron_parallel.tensor_parallel.saving import (
    Saved,
    SavedTensors,
    SavingProduct,
    save_for_backward,
    saved_of,
)

Compute = Callable[[Tensor, Weights, Tensor | None, Multiply], Tensor]
"""The forward pass of a product, without gradients."""


class AccumulatingProduct:
    """A product that accumulates the gradients of its weights directly into buffers.

    Autograd still calls the hooks of a weight, after all products of the backward pass. A copy is
    the product without accumulation.

    Args:
        product: The product.
        accumulate: Accumulator of the gradient by index in `Weights`. Autograd accumulates the
            others.
    """

    def __init__(self, product: Product, accumulate: Mapping[int, AccumulateGradient]) -> None:
        self.product, self.accumulate = product, dict(accumulate)
        self.is_adapter, self.shardings = product.is_adapter, product.shardings
        self.dgrad, self.merged_weight = product.dgrad, product.merged_weight

    def forward(
        self,
        x: Float[Tensor, "... in"],
        weights: Weights,
        bias: Tensor | None = None,
        multiply: Multiply = multiply_matrix,
    ) -> Float[Tensor, "... flat"]:
        """Returns the result of the product."""
        if torch.compiler.is_compiling():  # compiled code cannot add to a buffer
            return self.product.forward(x, weights, bias, multiply)
        return differentiate(self, self.product.forward, x, weights, bias, multiply)

    def wgrad(
        self,
        dy: Float[Tensor, "rows out"],
        x: Float[Tensor, "rows in"],
        weights: Weights,
        requests: Sequence[WeightGradientRequest | None],
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the product, after accumulating those with an accumulator."""
        return self.product.wgrad(dy, x, weights, self.accumulated(requests))

    def accumulated(
        self, requests: Sequence[WeightGradientRequest | None]
    ) -> list[WeightGradientRequest | None]:
        """Returns requests that accumulate the gradients of weights with an accumulator."""
        return [
            _Accumulated(each, self.accumulate[index])
            if each and index in self.accumulate
            else each
            for index, each in enumerate(requests)
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns the product without accumulation, so that copies do not share buffers."""
        return _same, (self.product,)


class _Accumulated(WeightGradientRequest):
    """A request that passes the two factors to an accumulator."""

    def __init__(self, request: WeightGradientRequest, accumulate: AccumulateGradient) -> None:
        super().__init__(request.shape, lambda: request.must_return)
        self._accumulate = accumulate

    def __call__(
        self,
        dy: Float[Tensor, "rows out"],
        x: Float[Tensor, "rows in"],
        multiply: FactorProduct | None = None,
    ) -> Float[Tensor, "..."] | None:
        return self._accumulate(dy, x, must_return=self.must_return, multiply=multiply)


class _SavesOperands(SavingProduct):
    """A product whose gradients read its input and weights."""

    def __init__(self, product: Product, compute: Compute | None) -> None:
        self._product, self._compute = product, compute or product.forward

    def forward_saving(
        self,
        x: Float[Tensor, "... in"],
        weights: Weights,
        bias: Tensor | None,
        multiply: Multiply,
        **options: Any,
    ) -> tuple[Float[Tensor, "... flat"], Saved]:
        """Returns the product, and input and weights."""
        return self._compute(x, weights, bias, multiply), Saved((x,), tuple(weights))

    def gradient(self, dy: Float[Tensor, "rows out"], *, of_input: bool, of_weights: bool) -> Any:
        """Returns the gradient itself."""
        return dy

    def input_gradient(self, gradient: Any, saved: Saved) -> Float[Tensor, "rows in"]:
        """Returns the result of `Product.dgrad`."""
        return self._product.dgrad(gradient, saved.weights)

    def weight_gradients(
        self, gradient: Any, saved: Saved, requests: Sequence[WeightGradientRequest | None]
    ) -> tuple[Tensor | None, ...]:
        """Returns the result of `Product.wgrad`."""
        return self._product.wgrad(gradient, as_rows(saved.input[0]), saved.weights, requests)


class _SavesAndAccumulates(SavingProduct):
    """A `SavingProduct` whose gradients of weights are accumulated in buffers."""

    def __init__(self, accumulating: AccumulatingProduct, product: SavingProduct) -> None:
        self._accumulating, self._product = accumulating, product

    def forward_saving(
        self, *arguments: Any, **options: Any
    ) -> tuple[Float[Tensor, "... flat"], Saved]:
        """Returns the result of the product."""
        return self._product.forward_saving(*arguments, **options)

    def gradient(self, dy: Float[Tensor, "rows out"], *, of_input: bool, of_weights: bool) -> Any:
        """Returns the result of the product."""
        return self._product.gradient(dy, of_input=of_input, of_weights=of_weights)

    def input_gradient(self, gradient: Any, saved: Saved) -> Float[Tensor, "rows in"]:
        """Returns the result of the product."""
        return self._product.input_gradient(gradient, saved)

    def weight_gradients(
        self, gradient: Any, saved: Saved, requests: Sequence[WeightGradientRequest | None]
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the product, after accumulating those with an accumulator."""
        requests = self._accumulating.accumulated(requests)
        return self._product.weight_gradients(gradient, saved, requests)

    def constant_weights(self, weights: Weights) -> SavedTensors:
        """Returns the result of the product."""
        return self._product.constant_weights(weights)


def saving(product: Product, compute: Compute | None = None) -> SavingProduct:
    """Returns a product as one that says what it saves.

    Args:
        product: The product.
        compute: The forward pass, without gradients. Defaults to the product's.
    """
    if isinstance(product, AccumulatingProduct) and isinstance(product.product, SavingProduct):
        return _SavesAndAccumulates(product, product.product)
    return product if isinstance(product, SavingProduct) else _SavesOperands(product, compute)


def differentiate(
    product: Product,
    compute: Compute,
    x: Float[Tensor, "... in"],
    weights: Weights,
    bias: Tensor | None,
    multiply: Multiply,
) -> Float[Tensor, "... flat"]:
    """Returns `compute(x, weights, bias, multiply)`, differentiated by a product.

    Args:
        product: Its `dgrad` and `wgrad` compute the gradients, or for a `SavingProduct` its own
            steps, which also compute the forward pass.
        compute: The forward pass, without gradients.
        x: See `Product.forward`.
        weights: See `Product.forward`.
        bias: See `Product.forward`.
        multiply: See `Product.forward`.
    """
    return differentiate_steps(saving(product, compute), x, weights, bias, multiply)


def differentiate_steps(
    steps: SavingProduct,
    x: Float[Tensor, "... in"],
    weights: Weights,
    bias: Tensor | None,
    multiply: Multiply,
) -> Float[Tensor, "... flat"]:
    """Returns the product of the steps of a `SavingProduct`, which also compute its gradients.

    Args:
        steps: The product.
        x: See `Product.forward`.
        weights: See `Product.forward`.
        bias: See `Product.forward`.
        multiply: See `Product.forward`.
    """
    options = steps, multiply, wants_gradients(weights)
    constant = steps.constant_weights(weights)
    y: Tensor = _Product.apply(x, *weights, bias, options, *constant)  # type: ignore[no-untyped-call]
    return y


def wants_gradients(weights: Weights) -> bool:
    """Returns whether a backward pass will need gradients of weights."""
    return torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)


class _Product(Function):
    """A product of one rank, differentiated by its own steps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        at = next(number for number, each in enumerate(rest) if isinstance(each, tuple))
        *weights, bias = rest[:at]
        (saver, multiply, saves), constant = rest[at], rest[at + 1 :]
        y, saved = saver.forward_saving(x, weights, bias, multiply, constant=constant, saves=saves)
        save_for_backward(ctx, saved, constant)
        ctx.saver, ctx.num_constant = saver, len(constant)
        ctx.shape, ctx.shapes = x.shape, [weight.shape for weight in weights]
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, count = saved_of(ctx), len(ctx.shapes)
        rows = as_rows(grads[0])
        of_input = _compat.gradient_wanted(ctx, 0)
        requests = weight_gradient_requests(ctx, ctx.shapes)
        needs_bias = _compat.gradient_wanted(ctx, 1 + count)
        dx, dweights = None, no_gradients(count)
        if of_input or any(requests):
            operand = ctx.saver.gradient(rows, of_input=of_input, of_weights=any(requests))
            if of_input:
                dx = ctx.saver.input_gradient(operand, saved).view(ctx.shape)
            if any(requests):
                dweights = ctx.saver.weight_gradients(operand, saved, requests)
        dbias = rows.sum(0) if needs_bias else None
        return dx, *dweights, dbias, None, *no_gradients(ctx.num_constant)


def _same(product: Product) -> Product:
    return product
