"""Products that choose what their backward pass reads, such as operands in few bits.

A `Product` whose gradients read its input and weights needs no more than `dgrad` and `wgrad`. A
`SavingProduct` converts its operands, each once: the input for the product and for the gradient of
the weight, the gradient of the output for both gradients, and the weight for the product and for
the gradient of the input. The layers call it in these steps:

    y, saved = product.forward_saving(x, weights, bias, multiply)
    operand = product.gradient(dy, of_input=True, of_weights=True)
    dx = product.input_gradient(operand, saved)
    dweights = product.weight_gradients(operand, saved, requests)

A weight changes once a step, but is read by every micro-batch. Its conversion may be kept between
`hold_weights` and `release_weights`, the only time in which the owner of the weight says that it
does not change (`ConstantWeights`). Outside of that, every pass converts it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

SavedTensors = tuple[Any, ...]
"""Tensors; None in place of one that does not exist."""


class Saved(NamedTuple):
    """What a forward pass saves for its backward pass.

    Attributes:
        input: What remains of the input.
        weights: The weights, what else is needed of them, and in the backward pass the result of
            `SavingProduct.constant_weights`.
    """

    input: SavedTensors
    weights: SavedTensors


class SavingProduct(ABC):
    """A `Product` that chooses what it saves for its backward pass; a base class."""

    @abstractmethod
    def forward_saving(
        self,
        x: Float[Tensor, "... in"],
        weights: Sequence[Tensor],
        bias: Tensor | None,
        multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        *,
        constant: SavedTensors = (),
        saves: bool = True,
        by_rows: bool = False,
    ) -> tuple[Float[Tensor, "... flat"], Saved]:
        """Returns the product, and what the backward pass needs.

        Args:
            x: See `Product.forward`.
            weights: See `Product.forward`.
            bias: See `Product.forward`.
            multiply: See `Product.forward`.
            constant: The result of `constant_weights`.
            saves: Whether gradients of weights are needed. Otherwise nothing of the input is saved.
            by_rows: Whether the first tensor saved of the input has a row for each token, in the
                dims of `x`, so that the caller may save some of them and gather them again.
        """

    @abstractmethod
    def gradient(self, dy: Float[Tensor, "rows out"], *, of_input: bool, of_weights: bool) -> Any:
        """Returns the gradient of the output for the gradients that are needed."""

    @abstractmethod
    def input_gradient(self, gradient: Any, saved: Saved) -> Float[Tensor, "rows in"]:
        """Returns the gradient of the input.

        Args:
            gradient: The result of `gradient`.
            saved: What the forward pass saved, or the weights themselves.
        """

    @abstractmethod
    def weight_gradients(
        self, gradient: Any, saved: Saved, requests: Sequence[Any]
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the weights; see `Product.wgrad`.

        Args:
            gradient: The result of `gradient`.
            saved: What the forward pass saved, or input and weights themselves.
            requests: Request for each weight, or None if its gradient is not needed.
        """

    def constant_weights(self, weights: Sequence[Tensor]) -> SavedTensors:
        """Returns the converted weights while they are held; nothing otherwise."""
        del weights
        return ()

    def hold_weights(self, *, compiled: bool = False) -> None:  # noqa: B027 - it may keep nothing
        """Begins a time in which the weights do not change.

        Args:
            compiled: Whether the passes are compiled by torch.compile, so that conversions may be.
        """

    def release_weights(self) -> None:  # noqa: B027
        """Ends it, and drops what was converted."""


def unwrapped(product: object) -> object:
    """Returns the product that one with accumulation computes."""
    return getattr(product, "product", product)


class ConstantWeights:
    """Times in which the weights of some modules do not change: the micro-batches of one step.

    Args:
        modules: Model chunks. Their products are looked up when such a time begins.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._layers = [
            layer
            for module in modules
            for layer in module.modules()
            if isinstance(unwrapped(getattr(layer, "product", None)), SavingProduct)
        ]

    @property
    def exist(self) -> bool:
        """Whether a product of the modules may convert weights."""
        return bool(self._layers)

    @contextmanager
    def held(self, *, compiled: bool = False) -> Iterator[None]:
        """Returns a context in which products may convert each weight once.

        Every write to a weight must be complete before its layer runs in the context, and none may
        happen until the context ends.

        Args:
            compiled: Whether the passes are compiled by torch.compile. Their code needs all weights
                converted when the context begins, so all must be complete then. By default a weight
                is converted when its layer runs first, so gathers of later ones may be in flight.
        """
        products = [(layer, unwrapped(layer.product)) for layer in self._layers]
        for _, product in products:
            product.hold_weights(compiled=compiled)  # type: ignore[attr-defined]
        try:
            if compiled:
                for layer, product in products:
                    given = [getattr(layer, name) for name in layer.product_parameters]  # type: ignore[union-attr]
                    product.constant_weights(given)  # type: ignore[attr-defined]
            yield
        finally:
            for _, product in products:
                product.release_weights()  # type: ignore[attr-defined]


def save_for_backward(ctx: Any, saved: Saved, constant: SavedTensors) -> None:
    """Saves tensors in the context of an autograd function.

    Converted weights belong to the step and not to the activations of a micro-batch, so hooks on
    saved tensors do not see them: these would move them to host memory.
    """
    compiles = torch.compiler.is_compiling()
    ctx.constant = () if compiles else constant
    ctx.save_for_backward(*saved.input, *saved.weights, *(constant if compiles else ()))
    ctx.num_inputs, ctx.num_weights = len(saved.input), len(saved.weights)


def saved_of(ctx: Any) -> Saved:
    """Returns the tensors of `save_for_backward`, converted weights after the others."""
    tensors = tuple(ctx.saved_tensors)
    inputs = ctx.num_inputs
    return Saved(tensors[:inputs], (*tensors[inputs:], *ctx.constant))
