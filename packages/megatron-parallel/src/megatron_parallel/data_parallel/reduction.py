"""How the gradients of one bucket are summed over its ranks: collectives one after another.

| what a rank keeps | over one axis | over near ranks (inner) and far ones (outer) |
|---|---|---|
| all sums | all-reduce | reduce-scatter inner, all-reduce of the shard outer, all-gather inner |
| its shard | reduce-scatter | reduce-scatter inner, all-reduce of the shard outer |

bf16 on the wire, sums in fp32: every rank sends to each other its part of that one's shard, rounded
to bf16 (all-to-all); the receiver adds all of them up in fp32. Where all sums are kept, shards are
rounded once more and all-gathered. The bytes are those of a reduce-scatter (and all-gather) in
bf16, which would round after each of `n - 1` additions. Between instances shards go in fp32. With
`u = 2**-8`, a sum of gradients `g` is off by at most `u * sum(|g|)`, and where all sums are kept
by `u` of itself more; a sum in bf16 by `n * u * sum(|g|)` (both but for terms of the order `u**2`).

A sum is a generator: it starts a collective, yields it, and is resumed when that is there.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_parallel import _compat
from megatron_parallel.collectives.async_collective import AsyncCollective, Work
from megatron_parallel.mesh.axes import Axis


class ReductionAxes(NamedTuple):
    """The ranks a bucket is summed over: `inner` ones, then their counterparts, if any."""

    inner: Axis
    outer: Axis | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.inner.size * (1 if self.outer is None else self.outer.size)


Sum = Iterator[AsyncCollective]


class AsyncCollectives(NamedTuple):
    """What collectives are for: in `Traffic`, and in the line that tells of a failure."""

    purpose: str
    told: str

    def all_reduce(self, t: Tensor, axis: Axis) -> AsyncCollective:
        """Starts summing `t` in place."""
        return self._start(
            "all_reduce", axis, t, t, lambda: _compat.start_all_reduce(t, axis.process_group)
        )

    def reduce_scatter(self, part: Tensor, whole: Tensor, axis: Axis) -> AsyncCollective:
        """Starts summing this rank's part of `whole`; `part` may be a view of it."""
        return self._start(
            "reduce_scatter",
            axis,
            whole,
            part,
            lambda: _compat.start_reduce_scatter(part, whole, axis.process_group),
        )

    def all_gather(self, whole: Tensor, part: Tensor, axis: Axis) -> AsyncCollective:
        """Starts filling `whole` with the parts of all ranks; `part` may be a view of it."""
        return self._start(
            "all_gather",
            axis,
            part,
            whole,
            lambda: _compat.start_all_gather(whole, part, axis.process_group),
        )

    def all_to_all(self, received: Tensor, sent: Tensor, axis: Axis) -> AsyncCollective:
        """Starts sending each rank its part of `sent`; `received` has a part from each."""
        return self._start(
            "all_to_all",
            axis,
            sent,
            received,
            lambda: _compat.start_all_to_all(received, sent, axis.process_group),
        )

    def _start(
        self,
        verb: str,
        axis: Axis,
        payload: Tensor,
        result: Tensor,
        collective: Callable[[], Work],
    ) -> AsyncCollective:
        operation = f"{verb} of {self.purpose}"
        told = f"{verb} of {self.told}"
        return AsyncCollective(axis, operation, payload, result, collective, description=told)


def all_reduce_bucket(
    flat: Tensor, shard: Tensor, axes: ReductionAxes, collectives: AsyncCollectives
) -> Sum:
    """Sums `flat` in place; `shard` is this rank's part of it among the inner ranks."""
    if axes.outer is None:
        if axes.inner.size > 1:
            yield collectives.all_reduce(flat, axes.inner)
        return
    yield from reduce_scatter_bucket(flat, shard, axes, collectives)
    if axes.inner.size > 1:
        yield collectives.all_gather(flat, shard, axes.inner)


def reduce_scatter_bucket(
    flat: Tensor, shard: Tensor, axes: ReductionAxes, collectives: AsyncCollectives
) -> Sum:
    """Sums this rank's part of `flat` into `shard`, which is that part; the rest is destroyed."""
    if axes.inner.size > 1:
        yield collectives.reduce_scatter(shard, flat, axes.inner)
    if axes.outer is not None:
        yield collectives.all_reduce(shard, axes.outer)


def reduce_in_bf16(
    flat: Tensor, shard: Tensor, axes: ReductionAxes, collectives: AsyncCollectives, *, whole: bool
) -> Sum:
    """Sums what ranks send in bf16, in the dtype of `flat`: into `shard`, and `flat` if `whole`."""
    axis, wire = axes.inner, flat.to(torch.bfloat16)
    if axis.size > 1:
        received = torch.empty_like(wire)
        yield collectives.all_to_all(received, wire, axis)
        torch.sum(received.view(axis.size, -1), dim=0, dtype=flat.dtype, out=shard)
    if axes.outer is not None:
        yield collectives.all_reduce(shard, axes.outer)
    if whole and axis.size > 1:
        yield collectives.all_gather(wire, shard.to(torch.bfloat16), axis)
        flat.copy_(wire)
