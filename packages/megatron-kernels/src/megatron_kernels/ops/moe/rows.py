"""Rows of the choices of tokens: gathered, and added up by token, in both passes.

A choice has at most one row, and a row at most one choice (`permute`). So the gradient of a gather
is a sum over the choices of each token, and that of a weighted sum is a gather. Neither adds to
memory row by row: the results do not depend on timing, and nothing is rounded between two summands.
Operations on indices are small. The host reads none of them. A row of no choice has the index -1,
which is that of the last element: of one more than there are choices.

Eager code sums with `embedding_bag`, one kernel that reads every row once. The compiler cannot look
into it, and makes one kernel of gathers, products and sums.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_kernels.ops.precision import upcast


def permute(tokens: Tensor, order: Tensor, choices: int) -> Tensor:
    """Gathers the token of each row; the backward pass gathers the rows of each token."""
    result: Tensor = _Permute.apply(tokens, order, choices)  # type: ignore[no-untyped-call]
    return result


class _Permute(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape = len(tokens), choices
        return tokens.index_select(0, _tokens(order, choices))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        tokens, choices = ctx.shape
        return _sums(grads[0], order, tokens, choices, None).to(grads[0].dtype), None, None


def unpermute(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Adds up the rows of each token and saves them as they are.

    The backward pass gathers the token of each row once, for both gradients.
    """
    result: Tensor = _Unpermute.apply(rows, order, weights)  # type: ignore[no-untyped-call]
    return result


class _Unpermute(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, order, weights)
        tokens, choices = weights.shape
        total = _sums(rows, order, tokens, choices, weights).to(rows.dtype)
        # torch 2.11 compiles a function without gradients if `.to` has no effect on its result.
        return total.view_as(total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        rows, order, weights = ctx.saved_tensors
        of_rows, of_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        if not weights.numel():  # no token to gather
            return torch.zeros_like(rows), None, torch.zeros_like(weights)
        dy = grads[0].index_select(0, _tokens(order, weights.shape[1]))  # of each row's token
        wide = upcast(dy)
        d_rows = d_weights = None
        if of_weights:
            dots = _dots(upcast(rows), wide)
            flat = dots.new_zeros(weights.numel() + 1).index_put((order,), dots)
            d_weights = flat[:-1].view(weights.shape).to(weights.dtype)
        if of_rows:
            factors = upcast(weights).flatten()
            factors = torch.cat((factors, factors.new_zeros(1)))[order]
            factors = factors[:, None]
            if dy.is_cuda:  # in registers in the wider dtype, which a CPU computes in copies
                d_rows = dy.mul_(factors)
            else:
                d_rows = (wide * factors).to(rows.dtype)
        return d_rows, None, d_weights


def _tokens(order: Tensor, choices: int) -> Tensor:
    """Returns the token of each row; the first for a row of no choice."""
    return order.clamp(min=0) // choices


def _dots(one: Tensor, other: Tensor) -> Tensor:
    """Returns the scalar product of each two rows."""
    if torch.compiler.is_compiling():
        return (one * other).sum(1)
    return torch.einsum("mh,mh->m", one, other)  # without a product of every element in memory


def _sums(rows: Tensor, order: Tensor, tokens: int, choices: int, weights: Tensor | None) -> Tensor:
    """Returns the sum of each token's rows in the order of its choices.

    It is computed in at least float32, and may have been rounded to the dtype of `rows`.

    Args:
        rows: `[m, h]`.
        order: The choice of each row.
        tokens: Number of tokens.
        choices: Choices of each token.
        weights: A factor of each choice, or None for 1.
    """
    if not tokens or not len(order):
        return rows.new_zeros(tokens, rows.shape[1])
    if not torch.compiler.is_compiling():
        return _bags(rows, order, tokens, choices, weights)
    missing, count = len(order), tokens * choices
    indices = torch.arange(missing, dtype=order.dtype, device=order.device)
    inverse = order.new_full((count + 1,), missing)
    inverse = inverse.index_put((order,), indices)[:-1].view(tokens, choices)
    sources, present = inverse.clamp(max=missing - 1), inverse < missing
    total = upcast(rows.new_zeros(()))
    for choice in range(choices):
        row = upcast(rows.index_select(0, sources[:, choice]))
        if weights is not None:
            row = row * upcast(weights[:, choice, None])
        total = total + torch.where(present[:, choice, None], row, 0.0)
    return total


def _bags(rows: Tensor, order: Tensor, tokens: int, choices: int, weights: Tensor | None) -> Tensor:
    """Computes `_sums` by `embedding_bag`. The first bag has the rows of no choice."""
    flat, indices = torch.sort(order)
    firsts = torch.arange(-choices, tokens * choices, choices, device=order.device)
    starts = torch.searchsorted(flat, firsts)
    factors = None
    if weights is not None:  # they have the dtype of the rows
        rows, factors = upcast(rows), upcast(weights).flatten()[flat]
    return torch.embedding_bag(rows, indices, starts, False, 0, False, factors)[0][1:]
