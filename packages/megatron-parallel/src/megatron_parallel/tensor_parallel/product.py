"""Products: what a parallel layer computes of its input and weights, with separate gradients.

    y = product.forward(x, weights, bias)
    dx = product.dgrad(dy, weights)
    dweights = product.wgrad(dy, x, weights, requests)

A product works on the input of this rank and this rank's part of each weight. The layer does the
communication: while one gradient is computed, the input of the other one is in flight, and a split
backward pass computes them at different times. `weights` are the weight of the layer, followed by
the parameters that the product adds (`Product.shardings`). The layer registers these: they are in
its sharding table and are initialised, clipped and saved like all parameters.

`PLAIN` is `x W^T`. `megatron_parallel.tensor_parallel.differentiation` has the autograd functions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from megatron_parallel import _compat
from megatron_parallel.mesh.axes import Axis
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.sharding.sharding import Sharding

Weights = Sequence[Tensor]
"""This rank's part of the weight of a layer, then of each parameter that its product adds."""

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`x W^T + b`, for one matrix `(*out, in)` or one matrix per group of rows, `(e, *out, in)`."""


def multiply_matrix(
    x: Float[Tensor, "... in"],
    weight: Float[Tensor, "*out in"],
    bias: Float[Tensor, " flat"] | None = None,
) -> Float[Tensor, "... flat"]:
    """Returns `x W^T + b`, with the outputs in one dim.

    Compiled code of a CPU adds the bias by itself, together with what follows: a product that adds
    it first copies it to each row. On a GPU the compiler chooses.
    """
    if bias is not None and torch.compiler.is_compiling() and not x.is_cuda:
        return functional.linear(x, as_matrix(weight)) + bias
    return functional.linear(x, as_matrix(weight), bias)


@runtime_checkable
class FactorProduct(Protocol):
    """Multiplies the two factors of a weight's gradient, in place of torch."""

    def __call__(
        self,
        dy: Float[Tensor, "rows out"],
        x: Float[Tensor, "rows in"],
        into: Float[Tensor, "out in"] | None = None,
        *,
        first: bool = True,
    ) -> Float[Tensor, "out in"]:
        """Returns `dy^T x`, or adds it to a matrix.

        Args:
            dy: Gradient of the output.
            x: Input.
            into: Matrix that is changed in place and returned. Defaults to a new one.
            first: Whether `into` is overwritten.
        """


class WeightGradientRequest:
    """Request of a backward pass for the gradient of one weight.

    A product calls it with the two factors of the gradient, and with its own `FactorProduct` if it
    does not leave the multiplication to torch.

    Attributes:
        shape: Shape of the weight.
    """

    def __init__(self, shape: torch.Size, must_return: Callable[[], bool] = lambda: True) -> None:
        self.shape, self._must_return = shape, must_return

    @property
    def must_return(self) -> bool:
        """Whether a tensor must be returned, because `torch.autograd.grad` needs the gradient.

        The weight half of a split backward pass does so.
        """
        return self._must_return()

    def __call__(
        self,
        dy: Float[Tensor, "rows out"],
        x: Float[Tensor, "rows in"],
        multiply: FactorProduct | None = None,
    ) -> Float[Tensor, "..."] | None:
        """Returns `dy^T x` in the shape of the weight; None if it was accumulated elsewhere."""
        return multiply_factors(dy, x, multiply).view(self.shape)


@runtime_checkable
class Product(Protocol):
    """What a column-parallel, row-parallel or expert layer computes of its input and weights."""

    @property
    def is_adapter(self) -> bool:
        """Whether only the parameters of products are trained, as with low-rank adapters."""

    def shardings(self, weight: Sharding) -> Mapping[str, Sharding]:
        """Returns the shardings of the added parameters by local name, in the order of `Weights`.

        A parameter whose gradient is a sum over the axis that cuts the weight is `partial`.

        Args:
            weight: Sharding of the weight of the layer. Its last dim is the input.
        """

    def forward(
        self,
        x: Float[Tensor, "... in"],
        weights: Weights,
        bias: Tensor | None = None,
        multiply: Multiply = multiply_matrix,
    ) -> Float[Tensor, "... flat"]:
        """Returns the product plus the bias. Differentiable by autograd.

        Args:
            x: Input of this rank.
            weights: See `Weights`.
            bias: Bias with one dim, or None.
            multiply: Matrix multiplication. Experts pass a grouped one.
        """

    def dgrad(self, dy: Float[Tensor, "rows out"], weights: Weights) -> Float[Tensor, "rows in"]:
        """Returns the gradient of the input. Not used for experts."""

    def wgrad(
        self,
        dy: Float[Tensor, "rows out"],
        x: Float[Tensor, "rows in"],
        weights: Weights,
        requests: Sequence[WeightGradientRequest | None],
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the weights. Not used for experts.

        Args:
            dy: Gradient of the output.
            x: Input.
            weights: See `Weights`.
            requests: Request for each weight, or None if its gradient is not needed. Called with
                two factors `[rows, out]` and `[rows, in]`. Gradients of matrices must be computed
                through their requests, so that they can be accumulated directly.

        Returns:
            The gradient of each weight for autograd, or None.
        """

    def merged_weight(self, weights: Weights) -> Tensor:
        """Returns the weight with which `PLAIN` computes the same, in the shape of the weight."""


@runtime_checkable
class LayerProduct(Protocol):
    """A `Product` that has state in each layer, or that computes gradients of weights by itself."""

    @property
    def uses_requests(self) -> bool:
        """Whether gradients of weights are computed by requests, so that they can be accumulated.

        Otherwise `wgrad` returns them, and autograd accumulates them.
        """

    def bind(self, layer: nn.Module, mesh: Mesh) -> Product:
        """Returns the product of one layer, which is called when the layer is built.

        Args:
            layer: The layer. Its attribute `sharding` has a row for each parameter; the product may
                add state (`megatron_parallel.StepState`).
            mesh: Mesh of this rank.
        """


@runtime_checkable
class Gathering(Protocol):
    """An all-gather that was started."""

    def wait(self) -> Tensor:
        """Waits for it and returns the whole tensor."""


@runtime_checkable
class GatheringProduct(Protocol):
    """A `Product` whose input may be in few bits, which it gathers as they are."""

    def start_gather(self, x: Float[Tensor, "part ..."], axis: Axis) -> Gathering:
        """Starts the all-gather of an input that sequence parallelism cuts along dim 0.

        Args:
            x: This rank's part of the input.
            axis: Axis that cuts it.
        """


@dataclass(frozen=True)
class PlainProduct:
    """The product `x W^T + b`."""

    is_adapter: ClassVar[bool] = False

    def shardings(self, weight: Sharding) -> Mapping[str, Sharding]:
        """Returns an empty mapping."""
        del weight
        return {}

    def forward(
        self,
        x: Float[Tensor, "... in"],
        weights: Weights,
        bias: Tensor | None = None,
        multiply: Multiply = multiply_matrix,
    ) -> Float[Tensor, "... flat"]:
        """Returns `x W^T + b`."""
        return multiply(x, weights[0], bias)

    def dgrad(self, dy: Float[Tensor, "rows out"], weights: Weights) -> Float[Tensor, "rows in"]:
        """Returns `dy W`."""
        return dy @ as_matrix(weights[0])

    def wgrad(
        self,
        dy: Float[Tensor, "rows out"],
        x: Float[Tensor, "rows in"],
        weights: Weights,
        requests: Sequence[WeightGradientRequest | None],
    ) -> tuple[Tensor | None, ...]:
        """Returns `dy^T x`."""
        return (None if requests[0] is None else requests[0](dy, x),)

    def merged_weight(self, weights: Weights) -> Tensor:
        """Returns the weight itself."""
        return weights[0]


PLAIN: Final = PlainProduct()
"""The default product."""


@runtime_checkable
class AccumulateGradient(Protocol):
    """Accumulates the gradient `dy^T x` of one weight."""

    def __call__(
        self,
        dy: Float[Tensor, "rows out"],
        x: Float[Tensor, "rows in"],
        *,
        must_return: bool,
        multiply: FactorProduct | None = None,
    ) -> Tensor | None:
        """Adds `dy^T x` and returns the gradient for autograd, or None.

        Args:
            dy: Gradient of the output.
            x: Input.
            must_return: See `WeightGradientRequest`.
            multiply: Multiplication of the product. Defaults to the accumulator's own.
        """


def no_gradients(count: int) -> tuple[None, ...]:
    """Returns as many times None."""
    return (None,) * count


def weight_gradient_requests(
    ctx: Any, shapes: Sequence[torch.Size]
) -> list[WeightGradientRequest | None]:
    """Returns the requests for weight gradients in the backward pass of a function.

    The inputs of the function must be `x`, the weights, of these shapes, followed by others.
    """

    def returned(index: int) -> Callable[[], bool]:
        return lambda: _compat.gradient_returned(ctx, index)

    return [
        WeightGradientRequest(shape, returned(index))
        if _compat.gradient_wanted(ctx, index)
        else None
        for index, shape in enumerate(shapes, 1)
    ]


def multiply_factors(
    dy: Float[Tensor, "rows out"], x: Float[Tensor, "rows in"], multiply: FactorProduct | None
) -> Float[Tensor, "out in"]:
    """Returns `dy^T x`, by torch without another `FactorProduct`."""
    return dy.t() @ x if multiply is None else multiply(dy, x)


def as_matrix(weight: Float[Tensor, "*out in"]) -> Float[Tensor, "flat in"]:
    """Returns a weight as a matrix, with the outputs in one dim."""
    return weight if weight.dim() == 2 else weight.flatten(0, -2)


def as_rows(t: Float[Tensor, "... h"]) -> Float[Tensor, "rows h"]:
    """Returns `[..., h]` as a matrix."""
    return t.reshape(-1, t.shape[-1])
