"""What the autograd functions of parallel linear layers get besides tensors."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from megatron_parallel.mesh.axes import Axis
from megatron_parallel.tensor_parallel.differentiation import (
    AccumulatingProduct,
    saving,
    wants_gradients,
)
from megatron_parallel.tensor_parallel.product import (
    Gathering,
    Product,
    Weights,
    multiply_matrix,
)
from megatron_parallel.tensor_parallel.saving import Saved, SavedTensors, SavingProduct


class LinearOptions(NamedTuple):
    """Arguments of a function that are not tensors of autograd.

    Attributes:
        product: The product.
        axis: The axis.
        cut: Whether the sequence is cut.
        num_slices: Maximum number of slices.
        constant: Converted weights, see `SavingProduct.constant_weights`.
        saves: Whether gradients of weights are needed.
        start_gather: How a `GatheringProduct` starts the all-gather of its input; None for others.
    """

    product: SavingProduct
    axis: Axis
    cut: bool
    num_slices: int
    constant: SavedTensors
    saves: bool
    start_gather: Callable[[Tensor, Axis], Gathering] | None

    def forward(self, x: Tensor, weights: Weights, bias: Tensor | None) -> tuple[Tensor, Saved]:
        """Returns the product, and what the backward pass needs."""
        return self.product.forward_saving(
            x,
            weights,
            bias,
            multiply_matrix,
            constant=self.constant,
            saves=self.saves,
            by_rows=self.cut,
        )

    def of_slice(self, x: Tensor, weights: Weights, bias: Tensor | None = None) -> Tensor:
        """Returns the product of a slice, of which nothing is saved."""
        return self._replace(saves=False).forward(x, weights, bias)[0]


def linear_options(
    product: Product, axis: Axis, cut: bool, num_slices: int, weights: Weights
) -> LinearOptions:
    """Returns the options of a call; arguments are the attributes of `LinearOptions`."""
    saver = saving(product)
    constant = saver.constant_weights(weights)
    return LinearOptions(
        saver, axis, cut, num_slices, constant, wants_gradients(weights), _own_gather(product)
    )


def unpack(*rest: Any) -> tuple[list[Tensor], Tensor | None, LinearOptions]:
    """Returns the arguments after the input: weights, bias, and options."""
    *weights, bias, options = rest
    return weights, bias, options


def _own_gather(product: Product) -> Callable[[Tensor, Axis], Gathering] | None:
    """Returns how a `GatheringProduct` starts the all-gather of its input; None for others."""
    own = product.product if isinstance(product, AccumulatingProduct) else product
    start: Callable[[Tensor, Axis], Gathering] | None = getattr(own, "start_gather", None)
    return start
