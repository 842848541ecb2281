"""Scores of an indexer, which select the keys of sparse attention (DeepSeek-AI 2025, V3.2)."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd import Function

from megatron_kernels.ops.precision import upcast
from megatron_kernels.registry import AUTO, Backend, accept_all, op


def reference(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Computes the products of all heads at once."""
    products = torch.einsum("sbnd,tbd->bsnt", upcast(q), upcast(k))
    return torch.einsum("bsnt,sbn->bst", torch.relu(products), upcast(weights))


def head_by_head(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Adds up the heads, so that memory holds the products of one; backward repeats them."""
    scores: Tensor = _IndexScores.apply(q, k, weights)  # type: ignore[no-untyped-call]
    return scores


@op(
    Backend("torch", head_by_head, accept_all, "one head at a time"),
    Backend("reference", reference, accept_all, "all heads at once"),
)
def index_scores(
    q: Float[Tensor, "s b n d"],
    k: Float[Tensor, "t b d"],
    weights: Float[Tensor, "s b n"],
    *,
    backend: str = AUTO,
) -> Float[Tensor, "b s t"]:
    """Returns the sum over heads of `weight * relu(q k)`.

    Args:
        q: Queries `[s, b, n, d]`.
        k: Keys `[t, b, d]`, shared by all heads.
        weights: Weight of each head `[s, b, n]`.
        backend: "auto" or the name of one backend.

    Returns:
        `[b, s, t]` in float32, or float64 for float64.
    """
    return index_scores.run(backend, q, k, weights)


def select_keys(
    scores: Float[Tensor, "b s t"], allowed: Bool[Tensor, "b_or_1 s t"], count: int
) -> Bool[Tensor, "b s t"]:
    """Returns the keys with the highest scores of each query, among those that it may attend to.

    Of keys with equal scores the first are returned, for every number of keys after them.

    Args:
        scores: Scores of all keys.
        allowed: Whether a query may attend to a key.
        count: Number of keys. A query with fewer allowed keys gets all of them.
    """
    allowed = allowed.expand_as(scores)
    if count >= scores.shape[-1]:
        return allowed
    ranked = scores.detach().masked_fill(~allowed, -torch.inf)
    least = ranked.topk(count, -1).values[..., -1:]
    above, equal = ranked > least, ranked == least
    left = count - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= left))) & allowed


class _IndexScores(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, weights)
        total = torch.zeros((), dtype=upcast(q).dtype, device=q.device)
        for head in range(q.shape[2]):
            total = total + torch.relu(_products(q, k, head)) * _of_head(weights, head)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, weights = ctx.saved_tensors
        of_q, of_weights, of_k = [], [], torch.zeros_like(upcast(k))
        for head in range(q.shape[2]):
            products = _products(q, k, head)
            of_weights.append((grads[0] * torch.relu(products)).sum(-1).t())
            inner = grads[0] * _of_head(weights, head) * (products > 0)
            of_q.append(torch.einsum("bst,tbd->sbd", inner, upcast(k)))
            of_k = of_k + torch.einsum("bst,sbd->tbd", inner, upcast(q[:, :, head]))
        return (
            torch.stack(of_q, 2).to(q.dtype),
            of_k.to(k.dtype),
            torch.stack(of_weights, 2).to(weights.dtype),
        )


def _products(q: Tensor, k: Tensor, head: int) -> Tensor:
    return torch.einsum("sbd,tbd->bst", upcast(q[:, :, head]), upcast(k))


def _of_head(weights: Tensor, head: int) -> Tensor:
    return upcast(weights[:, :, head]).t()[..., None]
