"""Where a layer's product sends the gradient of its weight: to autograd, or to who adds it up.

A product that knows its `Accumulate` hands over `dy` and `x` and gives autograd nothing: nobody has
to make the gradient, a matrix as large as the weight, only to add it to another one. Autograd calls
the hooks of the parameter all the same, once all products of the backward pass are done.
"""

from typing import Any, Protocol, TypeGuard, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_parallel import _compat


@runtime_checkable
class Accumulate(Protocol):
    """Adds `dy^T x` to the gradient of one weight."""

    def __call__(
        self, dy: Float[Tensor, "rows out"], x: Float[Tensor, "rows in"], *, returned: bool
    ) -> Tensor | None:
        """What autograd is to be given for the gradient.

        Args:
            dy: Gradient of the product.
            x: Its input.
            returned: Whether `torch.autograd.grad` was asked for the gradient, as the weight half
                of a split backward pass does, so that there must be a tensor.
        """


class Multiplies(Protocol):
    """A module that multiplies by its weight, as layers cut over an axis do.

    `multiplies` says whether it does: a table of embeddings does where it is the output layer too.
    It cannot be asked for by `isinstance`, which from Python 3.12 on does not see the parameters of
    a module; `may_multiply` can.
    """

    weight: Parameter
    multiplies: bool
    accumulate: Accumulate | None


def may_multiply(module: nn.Module) -> TypeGuard[Multiplies]:
    """Return whether a module has the attributes of `Multiplies`."""
    return all(hasattr(module, name) for name in ("weight", "multiplies", "accumulate"))


def weight_gradient(
    ctx: Any,
    index: int,
    dy: Float[Tensor, "rows out"],
    x: Float[Tensor, "rows in"],
    shape: tuple[int, ...],
) -> Tensor | None:
    """In the backward pass of a function, its gradient of a weight, the input `index`.

    Args:
        ctx: Of the function; its `accumulate` is an `Accumulate` or None.
        index: Counts the inputs that are tensors, which must come first.
        dy: Gradient of the product.
        x: Its input.
        shape: Of the weight, `(*out, in)`.
    """
    accumulate: Accumulate | None = ctx.accumulate
    if accumulate is None:
        return (dy.t() @ x).view(shape)
    return accumulate(dy, x, returned=_compat.gradient_returned(ctx, index))
