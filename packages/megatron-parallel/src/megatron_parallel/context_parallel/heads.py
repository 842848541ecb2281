"""All-to-all attention: an exchange gives each rank the whole sequence of some heads.

Heads are independent of one another, so any attention kernel can be used (Jacobs et al., DeepSpeed
Ulysses). The number of ranks must divide the heads of a rank. If it does not divide the KV heads,
they are replicated until it does: with 2 KV heads on 4 ranks, each one goes to 2 ranks.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from megatron_parallel.collectives.operations import all_to_all
from megatron_parallel.context_parallel.blocks import RingPlan
from megatron_parallel.context_parallel.plain import BlockOperations
from megatron_parallel.context_parallel.ring import ring_attention
from megatron_parallel.context_parallel.split import ContextSplit
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.axes import Axis

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""An attention function, differentiable by autograd: q, k, v to `[s, b, n, dv]`."""

HEADS: Final = "heads"
"""Purpose of the exchanges, as reported in `Traffic` and in errors."""


def check_heads(heads: int, ranks: int) -> None:
    """Verifies that the `heads` of a rank can be scattered over `ranks`.

    Raises:
        LayoutError: `ranks` does not divide `heads`.
    """
    if heads % ranks:
        raise LayoutError(
            f"{heads} heads on each tensor-parallel rank cannot be scattered over {ranks} "
            "context-parallel ranks: all-to-all attention needs a multiple of them, ring ('p2p') "
            "and 'allgather' need none"
        )


def scatter_heads(
    x: Float[Tensor, "part b n d"], axis: Axis
) -> Float[Tensor, "sequence b n_part d"]:
    """Exchanges a part of the sequence with all heads for the whole sequence with some heads.

    The sequence is in the order of the ranks.
    """
    result: Tensor = _ScatterHeads.apply(x, axis)  # type: ignore[no-untyped-call]
    return result


def gather_heads(
    x: Float[Tensor, "sequence b n_part d"], axis: Axis
) -> Float[Tensor, "part b n d"]:
    """Returns the inverse of `scatter_heads`."""
    result: Tensor = _GatherHeads.apply(x, axis)  # type: ignore[no-untyped-call]
    return result


def all_to_all_attention(
    q: Float[Tensor, "part b n d"],
    k: Float[Tensor, "part b g d"],
    v: Float[Tensor, "part b g dv"],
    split: ContextSplit,
    axis: Axis,
    attend: Attend,
) -> Float[Tensor, "part b n dv"]:
    """Returns attention of this rank's queries over the keys of all ranks of the axis.

    Args:
        q: Queries of this rank.
        k: Keys of this rank.
        v: Values of this rank.
        split: Split of the sequence over the ranks.
        axis: Context-parallel axis.
        attend: Attention over the whole sequence, in its order, for the `n/ranks` heads from
            `axis.index * n/ranks` on.

    Raises:
        LayoutError: The number of ranks does not divide the heads.
    """
    q, k, v = (split.to_sequence_order(t) for t in _scatter_all(q, k, v, axis))
    return gather_heads(split.to_rank_order(attend(q, k, v)), axis)


def hierarchical_attention(
    q: Float[Tensor, "part b n d"],
    k: Float[Tensor, "part b g d"],
    v: Float[Tensor, "part b g dv"],
    within: ContextSplit,
    plan: RingPlan,
    inner: Axis,
    outer: Axis,
    operations: BlockOperations | None = None,
    *,
    sinks: Float[Tensor, " n_part"] | None = None,
) -> Float[Tensor, "part b n d"]:
    """Returns attention with all-to-all over the inner and a ring over the outer axis.

    Combines both kinds of attention (Fang and Zhao, USP). Context-parallel rank `r` has index
    `r % inner.size` on the inner axis and `r // inner.size` on the outer one. Slow links between
    groups carry `inner.size` times fewer steps of the ring.

    Args:
        q: Queries of this rank.
        k: Keys of this rank.
        v: Values of this rank.
        within: Split of the tokens of a group over its inner ranks, `split.within(...)`.
        plan: Plan of a ring over `split.joined(inner.size)`.
        inner: Axis of near ranks.
        outer: Axis across the groups of near ranks.
        operations: Block functions of the ring, for the heads from `inner.index * n/inner` on.
        sinks: Sinks of these heads, as in `ring_attention`.

    Raises:
        LayoutError: The number of inner ranks does not divide the heads.
    """
    q, k, v = (within.to_sequence_order(t) for t in _scatter_all(q, k, v, inner))
    out = ring_attention(q, k, v, plan, outer, operations, sinks=sinks)
    return gather_heads(within.to_rank_order(out), inner)


def _scatter_all(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Scatters queries, keys and values in one message to each rank."""
    check_heads(q.shape[2], axis.size)
    copies = math.lcm(k.shape[2], axis.size) // k.shape[2]
    if copies > 1:
        k, v = (t.repeat_interleave(copies, 2) for t in (k, v))
    # Heads of values may have another width, so the channels of all heads are joined.
    by_rank = [torch.unflatten(t, 2, (axis.size, -1)).flatten(3) for t in (q, k, v)]
    scattered = scatter_heads(torch.cat(by_rank, 3), axis).squeeze(2)
    parts = torch.split(scattered, [t.shape[3] for t in by_rank], 2)
    first, second, third = (
        torch.unflatten(part, 2, (-1, t.shape[3])) for part, t in zip(parts, (q, k, v), strict=True)
    )
    return first, second, third


class _ScatterHeads(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather(grads[0], ctx.axis), None


class _GatherHeads(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _gather(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scatter(grads[0], ctx.axis), None


def _scatter(x: Tensor, axis: Axis) -> Tensor:
    by_rank = torch.unflatten(x, 2, (axis.size, -1)).movedim(2, 0)
    return all_to_all(by_rank, axis, purpose=HEADS).flatten(0, 1)


def _gather(x: Tensor, axis: Axis) -> Tensor:
    by_rank = torch.unflatten(x, 0, (axis.size, -1))
    return all_to_all(by_rank, axis, purpose=HEADS).movedim(0, 2).flatten(2, 3)
