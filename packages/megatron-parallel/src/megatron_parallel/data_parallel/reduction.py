"""Reduces the gradients of one bucket over its ranks: collectives one after another.

| a rank ends with | over one axis | over near ranks (inner) and far ones (outer) |
|---|---|---|
| all sums | all-reduce | reduce-scatter inner, all-reduce of the shard outer, all-gather inner |
| its shard | reduce-scatter | reduce-scatter inner, all-reduce of the shard outer |

Communication in bf16 with sums in fp32: every rank sends each other rank the latter's shard,
rounded to bf16 (all-to-all). The receiver sums all of them in fp32. If a rank ends with all sums,
shards are rounded once more and all-gathered. This sends as many bytes as a reduce-scatter (and
all-gather) in bf16, which would round after each of `n - 1` additions. Between instances shards are
sent in fp32. With `u = 2**-8`, the error of a sum of gradients `g` is at most `u * sum(|g|)`, plus
`u` times the sum if all sums are gathered. That of a sum in bf16 is at most `n * u * sum(|g|)`.
Terms of order `u**2` are neglected.

A reduction is a generator: it starts a collective, yields it, and is resumed when that is complete.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_parallel import _compat
from megatron_parallel.collectives.async_collective import AsyncCollective, Work
from megatron_parallel.mesh.axes import Axis


class ReductionAxes(NamedTuple):
    """The ranks that a bucket is reduced over: `inner` ones, then `outer` counterparts, if any."""

    inner: Axis
    outer: Axis | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.inner.size * (1 if self.outer is None else self.outer.size)


CollectiveSequence = Iterator[AsyncCollective]


class AsyncCollectives(NamedTuple):
    """Starts collectives with a purpose, as reported in `Traffic`, and a description for errors."""

    purpose: str
    description: str

    def all_reduce(self, t: Tensor, axis: Axis) -> AsyncCollective:
        """Starts summing `t` in place."""
        return self._start(
            "all_reduce", axis, t, t, lambda: _compat.start_all_reduce(t, axis.process_group)
        )

    def reduce_scatter(self, part: Tensor, whole: Tensor, axis: Axis) -> AsyncCollective:
        """Starts summing this rank's shard of `whole` into `part`, possibly a view of `whole`."""
        return self._start(
            "reduce_scatter",
            axis,
            whole,
            part,
            lambda: _compat.start_reduce_scatter(part, whole, axis.process_group),
        )

    def all_gather(self, whole: Tensor, part: Tensor, axis: Axis) -> AsyncCollective:
        """Starts filling `whole` with the shards of all ranks; `part` may be a view of `whole`."""
        return self._start(
            "all_gather",
            axis,
            part,
            whole,
            lambda: _compat.start_all_gather(whole, part, axis.process_group),
        )

    def all_to_all(self, received: Tensor, sent: Tensor, axis: Axis) -> AsyncCollective:
        """Starts sending each rank its slice of `sent`; `received` gets a slice from each rank."""
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
        description = f"{verb} of {self.description}"
        return AsyncCollective(
            axis, operation, payload, result, collective, description=description
        )


def all_reduce_bucket(
    flat: Tensor, shard: Tensor, axes: ReductionAxes, collectives: AsyncCollectives
) -> CollectiveSequence:
    """Sums `flat` in place; `shard` is this rank's shard of it among the inner ranks."""
    if axes.outer is None:
        if axes.inner.size > 1:
            yield collectives.all_reduce(flat, axes.inner)
        return
    yield from reduce_scatter_bucket(flat, shard, axes, collectives)
    if axes.inner.size > 1:
        yield collectives.all_gather(flat, shard, axes.inner)


def reduce_scatter_bucket(
    flat: Tensor, shard: Tensor, axes: ReductionAxes, collectives: AsyncCollectives
) -> CollectiveSequence:
    """Sums into `shard`, this rank's shard of `flat`; overwrites the rest of `flat`."""
    if axes.inner.size > 1:
        yield collectives.reduce_scatter(shard, flat, axes.inner)
    if axes.outer is not None:
        yield collectives.all_reduce(shard, axes.outer)


def reduce_in_bf16(
    flat: Tensor, shard: Tensor, axes: ReductionAxes, collectives: AsyncCollectives, *, whole: bool
) -> CollectiveSequence:
    """Sums gradients in the dtype of `flat`; the inner ranks send them in bf16.

    The sum is in `shard`. If `whole`, `flat` has all sums, rounded to bf16 if there is more than
    one inner rank.
    """
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
