"""Sorting of tokens by expert, and the inverse."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from megatron_kernels.ops.moe import rows as gathered
from megatron_kernels.ops.precision import upcast
from megatron_kernels.registry import AUTO, Backend, accept_all, op


class Permutation(NamedTuple):
    """The source of each row of `permute`.

    Attributes:
        order: `[n * k]`, for each row its flat index `token * k + choice` in `[n, k]`. Choices of
            no expert come last; the first rows are those of `counts`.
        counts: `[e]`, rows of each expert; at most `n * k` in total.
    """

    order: Int[Tensor, " choices"]
    counts: Int[Tensor, " e"]


def sort_by_expert(experts: Int[Tensor, "n k"], num_experts: int) -> Permutation:
    """Returns the order that sorts all choices by expert, with tokens in order for each expert.

    The host reads no number: both results have shapes that do not depend on the choices. A caller
    that knows a smaller bound for the number of routed choices may use only the first part of
    `order`.

    Args:
        experts: Expert numbers that each of n tokens has chosen. A number outside the range of
            experts (-1) means none.
        num_experts: Number of experts.
    """
    flat = experts.flatten()
    routed = (flat >= 0) & (flat < num_experts)
    keys, order = torch.sort(torch.where(routed, flat, num_experts), stable=True)
    limits = torch.arange(num_experts + 1, dtype=keys.dtype, device=keys.device)
    return Permutation(order, torch.searchsorted(keys, limits).diff())


def select_rows(tokens: Tensor, order: Tensor, choices: int) -> Tensor:
    """Calls `index_select`; its backward adds the gradients of a token's rows one by one."""
    rows = tokens.index_select(0, order.clamp(min=0) // choices)
    return torch.where((order < 0)[:, None], rows.detach(), rows)


@op(
    Backend("torch", gathered.permute, accept_all, "gathers, also in the backward pass"),
    Backend("reference", select_rows, accept_all, "plain torch"),
)
def permute(
    tokens: Float[Tensor, "n h"],
    order: Int[Tensor, " m"],
    choices: int,
    *,
    backend: str = AUTO,
) -> Float[Tensor, "m h"]:
    """Returns a row for every choice of every token, in the order of `sort_by_expert`.

    Args:
        tokens: `[n, h]`.
        order: `Permutation.order`, the first part of it, or other rows: for each the flat index of
            its choice, which no other row has, or -1 for a row of no choice.
        choices: Number k of experts that each token has chosen.
        backend: "auto" or the name of one backend.

    Returns:
        `[m, h]`, copies of rows of `tokens`. A row of no choice is that of the first token and has
        no gradient.
    """
    return permute.run(backend, tokens, order, choices)


def sum_rows(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Moves every row back to `[n, k, h]` and adds up the choices.

    No `index_copy`: it saves the rows for the backward pass besides their copies.
    """
    n, k = weights.shape
    count = len(order)
    indices = torch.full((n * k + 1,), count, dtype=order.dtype, device=order.device)
    indices[torch.where(order < 0, n * k, order)] = torch.arange(
        count, dtype=order.dtype, device=order.device
    )
    rows = functional.pad(rows, (0, 0, 0, 1))  # zeros for choices without a row
    outputs = rows.index_select(0, indices[:-1]).view(n, k, rows.shape[1])
    return torch.einsum("nkh,nk->nh", upcast(outputs), upcast(weights)).to(rows.dtype)


@op(
    Backend("torch", gathered.unpermute, accept_all, "gathers, also in the backward pass"),
    Backend("reference", sum_rows, accept_all, "plain torch, in float32 or float64"),
)
def unpermute(
    rows: Float[Tensor, "m h"],
    order: Int[Tensor, " m"],
    weights: Float[Tensor, "n k"],
    *,
    backend: str = AUTO,
) -> Float[Tensor, "n h"]:
    """Returns the weighted sum of each token's rows: the inverse of `permute`.

    Args:
        rows: `[m, h]`, in the order of `sort_by_expert`. Rows of choices without an expert must be
            zero, as `grouped_matmul` returns them.
        order: That of `permute`. A row of no choice has no effect and no gradient.
        weights: `[n, k]`, weight of each choice of each token. The weight of a choice without a row
            or expert has no effect and no gradient.
        backend: "auto" or the name of one backend.

    Returns:
        `[n, h]` in the dtype of `rows`, summed in at least float32 in the order of the choices;
        zero for a token without rows.
    """
    return unpermute.run(backend, rows, order, weights)
