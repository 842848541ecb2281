"""Building blocks of batch-invariant backends: a row's result depends on that row alone.

Kernels choose their order of summation by the shape of all rows, so a row of a batch of 16 and the
same row alone differ in their last bits. Backends named `batch-invariant` fix the order:

- A matrix product has tiles of a few sizes whose rows have the same bits, which a comparison shows
  before the first product of a shape (`invariant_product`).
- A sum over a row adds halves elementwise, which leaves no choice to a kernel (`row_sum`).
- Other elementwise functions are products, sums, quotients, roots and torch's vectorized exp, erf
  and tanh. Not `sigmoid` and `silu`: on CPUs they round the last elements of a tensor otherwise.

Backward passes are those of the fused backends.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

NAME: Final = "batch-invariant"
"""Name of these backends."""

SLOWER: Final = "slower than sums in any order"
"""Why they run on request only."""


def row_sum(x: Float[Tensor, "*rows h"]) -> Float[Tensor, "*rows 1"]:
    """Returns the sum of each row, added in halves."""
    last = []
    while (width := x.shape[-1]) > 1:
        if width % 2:
            last.append(x[..., -1:])
            x = x[..., :-1]
        x = torch.add(*x.chunk(2, -1))
    for column in reversed(last):
        x = x + column
    return x


def with_gradients_of(
    function: Callable[..., Tensor], forward: Callable[..., Tensor], *arguments: Any
) -> Tensor:
    """Returns `forward(*arguments)`, whose backward pass is that of `function`.

    The backward pass computes `function` again.

    Args:
        function: A differentiable function of the arguments.
        forward: Computes the same in another order. Runs without gradients.
        arguments: Tensors and others.
    """
    tensors = (each for each in arguments if isinstance(each, Tensor))
    if not torch.is_grad_enabled() or not any(each.requires_grad for each in tensors):
        return forward(*arguments)
    result: Tensor = _Forward.apply(function, forward, *arguments)  # type: ignore[no-untyped-call]
    return result


class _Forward(Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        function, forward, *arguments = inputs
        ctx.function = function
        ctx.save_for_backward(*(a if isinstance(a, Tensor) else None for a in arguments))
        ctx.others = [None if isinstance(a, Tensor) else a for a in arguments]
        y: Tensor = forward(*arguments)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        arguments = [
            other if tensor is None else tensor.detach().requires_grad_(needs)
            for tensor, other, needs in zip(ctx.saved_tensors, ctx.others, wanted, strict=True)
        ]
        leaves = [a for a, needs in zip(arguments, wanted, strict=True) if needs]
        with torch.enable_grad():
            found = iter(torch.autograd.grad(ctx.function(*arguments), leaves, grads[0]))
        return None, None, *(next(found) if needs else None for needs in wanted)
