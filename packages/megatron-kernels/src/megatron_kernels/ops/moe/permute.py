"""Tokens sorted by expert, and back again."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from megatron_kernels.ops.precision import upcast
from megatron_kernels.registry import AUTO, Backend, accept_all, op


class Permutation(NamedTuple):
    """Where the rows of `permute` come from.

    Attributes:
        order: `[m]`, for each row the number `token * k + choice` of its place in `[n, k]`.
        counts: `[e]`, rows of each expert; m in all.
    """

    order: Int[Tensor, " m"]
    counts: Int[Tensor, " e"]


def sort_by_expert(experts: Int[Tensor, "n k"], num_experts: int) -> Permutation:
    """The order that puts all choices of the first expert first, tokens in order within each.

    Args:
        experts: Experts that each of n tokens has chosen; a number that is no expert's (-1) stands
            for none, and has no row.
        num_experts: How many there are.
    """
    flat = experts.flatten()
    routed = (flat >= 0) & (flat < num_experts)
    key = torch.where(routed, flat, num_experts)
    counts = torch.bincount(key, minlength=num_experts + 1)[:num_experts]
    order = torch.argsort(key, stable=True)
    if flat.device.type == "cpu" and bool(routed.all()):
        return Permutation(order, counts)
    return Permutation(order[: int(counts.sum())], counts)


def gather_rows(tokens: Tensor, order: Tensor, choices: int) -> Tensor:
    """`index_select`; its backward adds the gradients of a token's rows."""
    return tokens.index_select(0, order // choices)


@op(Backend("reference", gather_rows, accept_all, "plain torch"))
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
        order: `Permutation.order`.
        choices: k, the experts that each token has chosen.
        backend: "auto" or the name of one backend.

    Returns:
        `[m, h]`, copies of rows of `tokens`.
    """
    return permute.run(backend, tokens, order, choices)


def sum_rows(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Take every row back to `[n, k, h]` and add the choices up, in one order whatever the device.

    No `index_add`: on CUDA its sums depend on who comes first. No `index_copy`: it keeps the rows
    for the backward pass, beside their copies.
    """
    n, k = weights.shape
    count = len(order)
    places = torch.full((n * k,), count, dtype=order.dtype, device=order.device)
    places[order] = torch.arange(count, dtype=order.dtype, device=order.device)
    if count < n * k:  # a row of zeros for the choices that have none
        rows = functional.pad(rows, (0, 0, 0, 1))
    answers = rows.index_select(0, places).view(n, k, -1)
    return torch.einsum("nkh,nk->nh", upcast(answers), upcast(weights)).to(rows.dtype)


@op(Backend("reference", sum_rows, accept_all, "plain torch, in float32 or float64"))
def unpermute(
    rows: Float[Tensor, "m h"],
    order: Int[Tensor, " m"],
    weights: Float[Tensor, "n k"],
    *,
    backend: str = AUTO,
) -> Float[Tensor, "n h"]:
    """Returns the weighted sum of each token's rows: the inverse of `permute`.

    Args:
        rows: `[m, h]`, in the order of `sort_by_expert`.
        order: `Permutation.order`.
        weights: `[n, k]`: of each choice of each token. Those of a choice without a row have no
            effect, and no gradient.
        backend: "auto" or the name of one backend.

    Returns:
        `[n, h]` in the dtype of `rows`, summed in float32 at least; zero for a token without rows.
    """
    return unpermute.run(backend, rows, order, weights)
