"""Ring attention: keys and values travel from rank to rank while blocks are computed.

In step `i` rank `r` has the keys and values of rank `r - i`, computes the blocks of its queries
with them, and sends them on meanwhile. Outputs are combined by their log-sum-exp. In the backward
pass keys and values go round once more, and their gradients follow one step behind, summed up from
rank to rank until they are home; each rank keeps its own share of its own keys' gradient and adds
it at the end, so both go `n - 1` steps (Liu et al., Ring Attention with Blockwise Transformers).

Sums over blocks are float32 (float64 for float64), also while they travel.
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from megatron_parallel.collectives.failure import raise_collective_errors
from megatron_parallel.context_parallel.blocks import RingPlan
from megatron_parallel.context_parallel.plain import BlockOperations, PlainBlocks
from megatron_parallel.errors import LayoutError, rank_list
from megatron_parallel.mesh.axes import Axis


def ring_attention(
    q: Float[Tensor, "s b n d"],
    k: Float[Tensor, "s b g d"],
    v: Float[Tensor, "s b g dv"],
    plan: RingPlan,
    axis: Axis,
    operations: BlockOperations | None = None,
) -> Float[Tensor, "s b n dv"]:
    """Attention of this rank's queries over the keys of all ranks of the axis.

    It can be differentiated once.

    Args:
        q: This rank's queries, as `plan.split` shares the sequence out.
        k: Its keys; each of the g groups serves n/g neighbouring heads.
        v: Its values.
        plan: From `plan_ring`, for this rank's index on the axis.
        axis: The ranks of the ring.
        operations: The block functions; by default `PlainBlocks`.

    Raises:
        LayoutError: The plan is for another number of ranks or of tokens.
        CollectiveError: Within the mesh's time-out, if a neighbour does not answer.
    """
    if plan.split.ranks != axis.size or plan.split.local_length != len(q):
        raise LayoutError(
            f"a ring planned for {plan.split.ranks} ranks of {plan.split.local_length} tokens each "
            f"was given {len(q)} tokens on axis {axis.name!r} of {axis.size} ranks"
        )
    result: Tensor = _Ring.apply(  # type: ignore[no-untyped-call]
        q, k, v, plan, axis, PlainBlocks() if operations is None else operations
    )
    return result


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: RingPlan,
        axis: Axis,
        operations: BlockOperations,
    ) -> Tensor:
        pair = _Pair(k, v)
        held = pair.packed(k, v)
        out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=_wide(q.dtype))
        lse = out.new_full(q.shape[:3], -torch.inf)
        for step in range(axis.size):
            coming = _Message(held, axis, "keys and values") if step < axis.size - 1 else None
            keys, values = pair.parts(held)
            for block in plan.blocks[(axis.index - step) % axis.size]:
                rows, columns = block.rows, block.columns
                found = operations.forward(q[rows], keys[columns], values[columns], block.mask)
                _merge(out[rows], lse[rows], *found)
            held = held if coming is None else coming.wait()
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.ring = plan, axis, operations, pair
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        plan, axis, operations, pair = ctx.ring
        dout = grads[0]
        held = pair.packed(k, v)
        dq = torch.zeros_like(q, dtype=_wide(q.dtype))
        own = travelling = torch.zeros_like(held, dtype=_wide(k.dtype))
        following: _Message | None = None
        for step in range(axis.size):
            coming = _Message(held, axis, "keys and values") if step < axis.size - 1 else None
            keys, values = pair.parts(held)
            share = own if step == 0 else torch.zeros_like(own)
            dkeys, dvalues = pair.parts(share)
            for block in plan.blocks[(axis.index - step) % axis.size]:
                rows, columns = block.rows, block.columns
                here = dout[rows], q[rows], keys[columns], values[columns], out[rows], lse[rows]
                found = operations.backward(*here, block.mask)
                for total, part in zip(
                    (dq[rows], dkeys[columns], dvalues[columns]), found, strict=True
                ):
                    total.add_(part)
            if step > 0:  # what the ranks before have added up for these keys, and our share
                travelling = share if following is None else following.wait().add_(share)
                following = _Message(
                    travelling, axis, "gradients of keys and values", homeward=True
                )
            held = held if coming is None else coming.wait()
        if following is not None:
            own = own.add_(following.wait())
        dk, dv = pair.parts(own)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


class _Pair:
    """Keys and values as one tensor `[t, b, g (d + dv)]`, which is one message."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.groups = k.shape[2]
        self.sizes = [self.groups * k.shape[3], self.groups * v.shape[3]]

    @staticmethod
    def packed(k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([k.flatten(2), v.flatten(2)], -1)

    def parts(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the two."""
        k, v = (
            torch.unflatten(part, -1, (self.groups, -1))
            for part in torch.split(packed, self.sizes, -1)
        )
        return k, v


class _Message:
    """A tensor on its way to the next rank of a ring, and the previous rank's to here."""

    def __init__(self, sent: Tensor, axis: Axis, what: str, *, homeward: bool = False) -> None:
        self.homeward = homeward  # gradients follow keys and values, on a tag of their own
        self._sent = sent  # kept until it is sent
        self._received = torch.empty_like(sent)
        after = axis.ranks[(axis.index + 1) % axis.size]
        before = axis.ranks[(axis.index - 1) % axis.size]
        axis.count(f"send of {what}", sent)
        axis.count(f"receive of {what}", self._received)
        self._failures = raise_collective_errors(
            axis,
            f"exchange of {what} with {rank_list(sorted({before, after}))}",
            sent,
            match=f"exchange of {what} on axis {axis.name!r}",
        )
        group, tag = axis.process_group, int(homeward)
        with self._failures.for_launch():
            self._works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, sent, after, group, tag),
                    dist.P2POp(dist.irecv, self._received, before, group, tag),
                ]
            )

    def wait(self) -> Tensor:
        """Returns what came."""
        with self._failures:
            for work in self._works:
                work.wait()
        return self._received


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Combines two outputs, each a softmax over its own keys, in place."""
    total = torch.logaddexp(lse, more_lse)
    safe = torch.where(torch.isneginf(total), 0, total)
    out.mul_((lse - safe).exp_()[..., None]).add_(more * (more_lse - safe).exp_()[..., None])
    lse.copy_(total)
