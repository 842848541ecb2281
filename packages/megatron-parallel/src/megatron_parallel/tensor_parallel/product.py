"""What a layer multiplies its input by: a product, whose gradients are calls of their own.

    y = product.forward(x, weights, bias)
    dx = product.dgrad(dy, weights)
    dweights = product.wgrad(dy, x, weights, requests)

A product sees this rank's input and this rank's part of each weight. The layer communicates around
it: while one gradient is computed, what the other needs is on its way, and a split backward pass
asks for each at another time. `weights` are the layer's own weight and then what the product adds
to it (`Product.shardings`), which the layer registers: they are in its sharding table, and are
initialised, clipped and saved like any parameter.

`PLAIN` is `x W^T`. An `AccumulatingProduct` adds each weight gradient directly to a buffer, from
its two factors, and returns none to autograd: no matrix as large as the weight is made first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from megatron_parallel import _compat
from megatron_parallel.sharding.sharding import Sharding

Weights = Sequence[Tensor]
"""A layer's weight, then the parameters that its product adds, this rank's part of each."""

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`x W^T + b`, of one matrix `(*out, in)` or of one for each group of rows, `(e, *out, in)`."""


def multiply_matrix(
    x: Float[Tensor, "... in"],
    weight: Float[Tensor, "*out in"],
    bias: Float[Tensor, " flat"] | None = None,
) -> Float[Tensor, "... flat"]:
    """`x W^T + b`; the outputs are one dim."""
    return functional.linear(x, as_matrix(weight), bias)


class WeightGradientRequest:
    """What a backward pass wants of one weight; it makes a gradient of two factors.

    Attributes:
        shape: Of the weight.
    """

    def __init__(self, shape: torch.Size, returned: Callable[[], bool] = lambda: True) -> None:
        self.shape, self._returned = shape, returned

    @property
    def must_return(self) -> bool:
        """Whether `torch.autograd.grad` was asked for the gradient.

        The weight half of a split backward pass does so: then there must be a tensor.
        """
        return self._returned()

    def __call__(
        self, dy: Float[Tensor, "rows out"], x: Float[Tensor, "rows in"]
    ) -> Float[Tensor, "..."] | None:
        """`dy^T x` in the shape of the weight; None if it was added up elsewhere."""
        return (dy.t() @ x).view(self.shape)


@runtime_checkable
class Product(Protocol):
    """What a column-, row-parallel or expert layer computes of its input and its weight."""

    @property
    def is_adapter(self) -> bool:
        """Whether only parameters of products are trained, as of low-rank adapters."""

    def shardings(self, weight: Sharding) -> Mapping[str, Sharding]:
        """Further parameters of the layer by local name, in the order in which they are handed in.

        Args:
            weight: How the layer's own is cut. Its last dim is the input. A gradient that is a sum
                over the axis which cuts the weight is `partial`.
        """

    def forward(
        self,
        x: Float[Tensor, "... in"],
        weights: Weights,
        bias: Tensor | None = None,
        multiply: Multiply = multiply_matrix,
    ) -> Float[Tensor, "... flat"]:
        """Returns the product, plus the bias; autograd differentiates it.

        Args:
            x: This rank's input.
            weights: See `Weights`.
            bias: With one dim.
            multiply: By which matrices are multiplied; experts have one that knows their rows.
        """

    def dgrad(self, dy: Float[Tensor, "rows out"], weights: Weights) -> Float[Tensor, "rows in"]:
        """Gradient of the input. Layers of a single matrix alone ask for it."""

    def wgrad(
        self,
        dy: Float[Tensor, "rows out"],
        x: Float[Tensor, "rows in"],
        weights: Weights,
        requests: Sequence[WeightGradientRequest | None],
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the weights. Layers of a single matrix alone ask for them.

        Args:
            dy: Gradient of the product.
            x: Its input.
            weights: See `Weights`.
            requests: Of each weight, what makes its gradient of two factors `[rows, out]` and
                `[rows, in]`; None where the pass wants no gradient. Those of matrices go through
                it, so that they can be added up where they are made.

        Returns:
            What autograd is given for each weight.
        """

    def merged_weight(self, weights: Weights) -> Tensor:
        """The weight with which `PLAIN` computes the same, in the shape of the layer's own."""


@dataclass(frozen=True)
class PlainProduct:
    """`x W^T + b`."""

    is_adapter: ClassVar[bool] = False

    def shardings(self, weight: Sharding) -> Mapping[str, Sharding]:
        """Nothing beside the weight."""
        del weight
        return {}

    def forward(
        self,
        x: Float[Tensor, "... in"],
        weights: Weights,
        bias: Tensor | None = None,
        multiply: Multiply = multiply_matrix,
    ) -> Float[Tensor, "... flat"]:
        """`x W^T + b`."""
        return multiply(x, weights[0], bias)

    def dgrad(self, dy: Float[Tensor, "rows out"], weights: Weights) -> Float[Tensor, "rows in"]:
        """`dy W`."""
        return dy @ as_matrix(weights[0])

    def wgrad(
        self,
        dy: Float[Tensor, "rows out"],
        x: Float[Tensor, "rows in"],
        weights: Weights,
        requests: Sequence[WeightGradientRequest | None],
    ) -> tuple[Tensor | None, ...]:
        """`dy^T x`."""
        return (None if requests[0] is None else requests[0](dy, x),)

    def merged_weight(self, weights: Weights) -> Tensor:
        """Returns the weight itself."""
        return weights[0]


PLAIN: Final = PlainProduct()
"""The product of layers that are given no other."""


@runtime_checkable
class AccumulateGradient(Protocol):
    """Adds `dy^T x` to the gradient of one weight."""

    def __call__(
        self, dy: Float[Tensor, "rows out"], x: Float[Tensor, "rows in"], *, must_return: bool
    ) -> Tensor | None:
        """Returns what autograd is to be given for the gradient.

        Args:
            dy: Gradient of the product.
            x: Its input.
            must_return: See `WeightGradientRequest`.
        """


class AccumulatingProduct:
    """A product whose weights' gradients are added up by the product that makes them.

    Autograd calls the hooks of a weight all the same, once all products of the backward pass are
    done. A copy of it is the product without: nobody sums its gradients.

    Args:
        product: What is multiplied.
        accumulate: By number of a weight, what adds its gradients up; others are autograd's.
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
        """As the product's."""
        if torch.compiler.is_compiling():  # traced code cannot add to a buffer
            return self.product.forward(x, weights, bias, multiply)
        y: Tensor = _Product.apply(x, *weights, bias, (self, multiply))  # type: ignore[no-untyped-call]
        return y

    def wgrad(
        self,
        dy: Float[Tensor, "rows out"],
        x: Float[Tensor, "rows in"],
        weights: Weights,
        requests: Sequence[WeightGradientRequest | None],
    ) -> tuple[Tensor | None, ...]:
        """As the product's, but for those that are added up here."""
        added = [
            _Added(each, self.accumulate[number]) if each and number in self.accumulate else each
            for number, each in enumerate(requests)
        ]
        return self.product.wgrad(dy, x, weights, added)

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns what a copy is."""
        return _same, (self.product,)


class _Added(WeightGradientRequest):
    """Two factors go to who adds up their product."""

    def __init__(self, requests: WeightGradientRequest, accumulate: AccumulateGradient) -> None:
        super().__init__(requests.shape, lambda: requests.must_return)
        self._accumulate = accumulate

    def __call__(
        self, dy: Float[Tensor, "rows out"], x: Float[Tensor, "rows in"]
    ) -> Float[Tensor, "..."] | None:
        return self._accumulate(dy, x, must_return=self.must_return)


class _Product(Function):
    """A product of one rank by its own `dgrad` and `wgrad`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        *weights, bias, (product, multiply) = rest
        ctx.save_for_backward(x, *weights)
        ctx.product = product
        y: Tensor = product.product.forward(x, weights, bias, multiply)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows = as_rows(grads[0])
        dx = None
        if _compat.gradient_wanted(ctx, 0):
            dx = ctx.product.dgrad(rows, weights).view(x.shape)
        requests = weight_gradient_requests(ctx, weights)
        dweights = weight_gradients(ctx.product, rows, x, weights, requests)
        needs_bias = _compat.gradient_wanted(ctx, 1 + len(weights))
        return dx, *dweights, rows.sum(0) if needs_bias else None, None


def weight_gradient_requests(ctx: Any, weights: Weights) -> list[WeightGradientRequest | None]:
    """In the backward pass of a function of `x`, `*weights`, ...: what it wants of the weights."""

    def returned(index: int) -> Callable[[], bool]:
        return lambda: _compat.gradient_returned(ctx, index)

    return [
        WeightGradientRequest(weight.shape, returned(index))
        if _compat.gradient_wanted(ctx, index)
        else None
        for index, weight in enumerate(weights, 1)
    ]


def weight_gradients(
    product: Product,
    dy: Float[Tensor, "rows out"],
    x: Float[Tensor, "... in"],
    weights: Weights,
    requests: Sequence[WeightGradientRequest | None],
) -> tuple[Tensor | None, ...]:
    """Returns what `Product.wgrad` gives, if any weight is requests."""
    if not any(requests):
        return (None,) * len(weights)
    return product.wgrad(dy, as_rows(x), weights, requests)


def as_matrix(weight: Float[Tensor, "*out in"]) -> Float[Tensor, "flat in"]:
    """Returns a weight with one dim of outputs."""
    return weight if weight.dim() == 2 else weight.flatten(0, -2)


def as_rows(t: Float[Tensor, "... h"]) -> Float[Tensor, "rows h"]:
    """`[..., h]` as a matrix."""
    return t.reshape(-1, t.shape[-1])


def _same(product: Product) -> Product:
    return product
