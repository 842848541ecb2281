"""Ring attention: keys and values are passed from rank to rank while blocks are computed.

In step `i`, rank `r` has the keys and values of rank `r - i`. It sends them to the next rank while
it computes the blocks of its queries with them. Outputs are combined by their log-sum-exp. In the
backward pass, keys and values go round the ring once more. Their gradients follow one step behind
and are accumulated from rank to rank until they reach their owner. Each rank adds its contribution
to the gradients of its own keys at the end, so both make `n - 1` steps (Liu et al., Ring Attention
with Blockwise Transformers).

Sums over blocks are float32 (float64 for float64 inputs), also in messages.
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
    *,
    sinks: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, "s b n dv"]:
    """Returns attention of this rank's queries over the keys of all ranks of the axis.

    Can be differentiated once.

    Args:
        q: Queries of this rank, according to `plan.split`.
        k: Keys of this rank. Each of the g groups is used by n/g neighbouring heads.
        v: Values of this rank.
        plan: Plan from `plan_ring` for this rank's index on the axis.
        axis: Axis of the ring.
        operations: Block functions. Defaults to `PlainBlocks`.
        sinks: A logit of each head that takes part in the softmax and has no value. It is one more
            block of every row, whose output is zero and whose log-sum-exp is the logit.

    Raises:
        LayoutError: The plan is for another number of ranks or tokens.
        CollectiveError: A neighbour does not take part within the time-out of the mesh.
    """
    if plan.split.ranks != axis.size or plan.split.local_length != len(q):
        raise LayoutError(
            f"the plan of the ring is for {plan.split.ranks} ranks with {plan.split.local_length} "
            f"tokens each, not for {len(q)} tokens on axis {axis.name!r} of {axis.size} ranks"
        )
    result: Tensor = _Ring.apply(  # type: ignore[no-untyped-call]
        q, k, v, sinks, plan, axis, PlainBlocks() if operations is None else operations
    )
    return result


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        plan: RingPlan,
        axis: Axis,
        operations: BlockOperations,
    ) -> Tensor:
        pair = _Pair(k, v)
        held = pair.packed(k, v)
        out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=_accumulation_dtype(q.dtype))
        lse = out.new_full(q.shape[:3], -torch.inf)
        if sinks is not None:
            lse.copy_(sinks.expand_as(lse))
        for step in range(axis.size):
            incoming = _Message(held, axis, "keys and values") if step < axis.size - 1 else None
            keys, values = pair.parts(held)
            for block in plan.blocks[(axis.index - step) % axis.size]:
                rows, columns = block.rows, block.columns
                found = operations.forward(q[rows], keys[columns], values[columns], block.mask)
                _merge(out[rows], lse[rows], *found)
            held = held if incoming is None else incoming.wait()
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse, sinks)
        ctx.ring = plan, axis, operations, pair
        return result.view_as(result)  # torch 2.11 compiles what `to` leaves without gradients

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        plan, axis, operations, pair = ctx.ring
        dout = grads[0]
        held = pair.packed(k, v)
        dq = torch.zeros_like(q, dtype=_accumulation_dtype(q.dtype))
        own = moving = torch.zeros_like(held, dtype=_accumulation_dtype(k.dtype))
        following: _Message | None = None
        for step in range(axis.size):
            incoming = _Message(held, axis, "keys and values") if step < axis.size - 1 else None
            keys, values = pair.parts(held)
            share = own if step == 0 else torch.zeros_like(own)
            dkeys, dvalues = pair.parts(share)
            for block in plan.blocks[(axis.index - step) % axis.size]:
                rows, columns = block.rows, block.columns
                block_inputs = (
                    dout[rows],
                    q[rows],
                    keys[columns],
                    values[columns],
                    out[rows],
                    lse[rows],
                )
                found = operations.backward(*block_inputs, block.mask)
                for total, part in zip(
                    (dq[rows], dkeys[columns], dvalues[columns]), found, strict=True
                ):
                    total.add_(part)
            if step > 0:  # gradients of these keys from the previous ranks, and from this rank
                moving = share if following is None else following.wait().add_(share)
                following = _Message(moving, axis, "gradients of keys and values", homeward=True)
            held = held if incoming is None else incoming.wait()
        if following is not None:
            own = own.add_(following.wait())
        dk, dv = pair.parts(own)
        dsinks = None if sinks is None else _sink_gradient(dout, out, lse, sinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None


class _Pair:
    """Keys and values packed into one tensor `[t, b, g (d + dv)]`, for a single message."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.groups = k.shape[2]
        self.sizes = [self.groups * k.shape[3], self.groups * v.shape[3]]

    @staticmethod
    def packed(k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([k.flatten(2), v.flatten(2)], -1)

    def parts(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Returns views of keys and values."""
        k, v = (
            torch.unflatten(part, -1, (self.groups, -1))
            for part in torch.split(packed, self.sizes, -1)
        )
        return k, v


class _Message:
    """A tensor in flight to the next rank of a ring, and one from the previous rank."""

    def __init__(self, sent: Tensor, axis: Axis, what: str, *, homeward: bool = False) -> None:
        self.homeward = homeward  # gradients of keys and values have a tag of their own
        self._sent = sent  # referenced until it is sent
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
        self._works: list[dist.Work] = []
        with self._failures.for_launch():
            if torch.compiler.is_compiling():  # no graph has messages between two ranks
                _shift(self._received, sent, axis)
                return
            self._works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, sent, after, group, tag),
                    dist.P2POp(dist.irecv, self._received, before, group, tag),
                ]
            )

    def wait(self) -> Tensor:
        """Returns the received tensor."""
        with self._failures:
            for work in self._works:
                work.wait()
        return self._received


def _shift(received: Tensor, sent: Tensor, axis: Axis) -> None:
    """Sends a tensor to the next rank of an axis and receives one of the same shape."""
    to, coming = [0] * axis.size, [0] * axis.size
    to[(axis.index + 1) % axis.size] = coming[(axis.index - 1) % axis.size] = len(sent)
    dist.all_to_all_single(received, sent, coming, to, group=axis.process_group)


def _sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Returns the gradient of the sinks `[n]`: a sink takes its probability from all values."""
    wide = _accumulation_dtype(out.dtype)
    share = (dout.to(wide) * out.to(wide)).sum(-1)
    return -(torch.exp(sinks - lse) * share).sum((0, 1)).to(sinks.dtype)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Combines two attention outputs over different keys, in place."""
    total = torch.logaddexp(lse, more_lse)
    safe = torch.where(torch.isneginf(total), 0, total)
    out.mul_((lse - safe).exp_()[..., None]).add_(more * (more_lse - safe).exp_()[..., None])
    lse.copy_(total)
