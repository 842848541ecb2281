"""Building blocks of batch-invariant backends: a row's result depends on that row alone.

Kernels choose their order of summation by the shape of all rows, so a row of a batch of 16 and the
same row alone differ in their last bits. Backends named `batch-invariant` fix the order:

- A matrix product has tiles of `ROWS` rows, the last one padded. Every call of the kernel has the
  same shape, and each row of a tile goes through the same operations. Rows begin at multiples of
  `ALIGNMENT` bytes, because kernels treat the first elements of others differently.
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
from torch.nn import functional

NAME: Final = "batch-invariant"
"""Name of these backends."""

SLOWER: Final = "slower than sums in any order"
"""Why they run on request only."""

ROWS: Final = 128
"""Rows of a tile. More are faster for many rows, fewer for one."""

ALIGNMENT: Final = 64


def row_sum(x: Float[Tensor, "*rows h"]) -> Float[Tensor, "*rows 1"]:
    """Returns the sum of each row, added in halves."""
    while (width := x.shape[-1]) > 1:
        half = width // 2
        halves = x[..., :half] + x[..., half : 2 * half]
        if width % 2:
            halves = torch.cat((halves, x[..., -1:]), -1)
        x = halves
    return x


def multiply_in_tiles(
    x: Float[Tensor, "rows k"], weight: Float[Tensor, "out k"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "rows out"]:
    """Returns `x W^T + b`, computed for `ROWS` rows at a time."""
    if x.data_ptr() % ALIGNMENT:
        x = x.clone()
    x, matrix = aligned(x), aligned(weight).t()
    rows = len(x)
    whole = rows // ROWS * ROWS
    y = x.new_empty(rows, weight.shape[0])

    def multiply(tile: Tensor, out: Tensor) -> Tensor:
        if bias is None:
            return torch.mm(tile, matrix, out=out)
        return torch.addmm(bias, tile, matrix, out=out)

    for start in range(0, whole, ROWS):
        multiply(x[start : start + ROWS], y[start : start + ROWS])
    if whole < rows:
        last = functional.pad(x[whole:], (0, 0, 0, ROWS - (rows - whole)))
        y[whole:] = multiply(last, y.new_empty(ROWS, y.shape[1]))[: rows - whole]
    return y


def aligned(x: Float[Tensor, "*rows k"]) -> Float[Tensor, "*rows _"]:
    """Returns rows with zeros at their end, so that they fill multiples of `ALIGNMENT` bytes."""
    missing = -x.shape[-1] % (ALIGNMENT // x.element_size())
    return functional.pad(x, (0, missing)) if missing else x.contiguous()


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
