"""How the gradients of one bucket are summed over its ranks: collectives one after another.

| what a rank keeps | over one axis | over near ranks (inner) and far ones (outer) |
|---|---|---|
| all sums | all-reduce | reduce-scatter inner, all-reduce of the shard outer, all-gather inner |
| its shard | reduce-scatter | reduce-scatter inner, all-reduce of the shard outer |

A sum is a generator: it starts a collective, yields it, and is resumed when that is there.
"""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from megatron_parallel import _compat
from megatron_parallel.collective_failure import naming_failures
from megatron_parallel.mesh import Axis


class Route(NamedTuple):
    """The ranks a bucket is summed over: `inner` ones, then their counterparts, if any."""

    inner: Axis
    outer: Axis | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.inner.size * (1 if self.outer is None else self.outer.size)


class Started(NamedTuple):
    """A collective on its way: what `Traffic` calls it, and what an error does."""

    axis: Axis
    operation: str
    told: str
    nbytes: int
    work: dist.Work
    since: float

    def wait(self) -> float:
        """Return when it is there, with the seconds that took."""
        since = time.perf_counter()
        with naming_failures(self.axis, self.told):
            self.work.wait()
        return time.perf_counter() - since


Sum = Iterator[Started]


class Messages(NamedTuple):
    """What collectives are for: in `Traffic`, and in the line that tells of a failure."""

    purpose: str
    told: str

    def all_reduce(self, t: Tensor, axis: Axis) -> Started:
        """Start summing `t` in place."""
        return self._start("all_reduce", axis, t, lambda: _compat.start_all_reduce(t, axis.bound))

    def reduce_scatter(self, part: Tensor, whole: Tensor, axis: Axis) -> Started:
        """Start summing this rank's part of `whole`; `part` may be a view of it."""
        return self._start(
            "reduce_scatter",
            axis,
            whole,
            lambda: _compat.start_reduce_scatter(part, whole, axis.bound),
        )

    def all_gather(self, whole: Tensor, part: Tensor, axis: Axis) -> Started:
        """Start filling `whole` with the parts of all ranks; `part` may be a view of it."""
        return self._start(
            "all_gather", axis, part, lambda: _compat.start_all_gather(whole, part, axis.bound)
        )

    def _start(
        self, verb: str, axis: Axis, payload: Tensor, collective: Callable[[], dist.Work]
    ) -> Started:
        operation, told = f"{verb} of {self.purpose}", f"{verb} of {self.told}"
        axis.count(operation, payload)
        since = time.perf_counter()
        with naming_failures(axis, told):
            work = collective()
        return Started(axis, operation, told, payload.nbytes, work, since)


def sum_whole(flat: Tensor, shard: Tensor, route: Route, messages: Messages) -> Sum:
    """Sum `flat` in place; `shard` is this rank's part of it among the inner ranks."""
    if route.outer is None:
        if route.inner.size > 1:
            yield messages.all_reduce(flat, route.inner)
        return
    yield from sum_shard(flat, shard, route, messages)
    if route.inner.size > 1:
        yield messages.all_gather(flat, shard, route.inner)


def sum_shard(flat: Tensor, shard: Tensor, route: Route, messages: Messages) -> Sum:
    """Sum this rank's part of `flat` into `shard`, which is that part; the rest is destroyed."""
    if route.inner.size > 1:
        yield messages.reduce_scatter(shard, flat, route.inner)
    if route.outer is not None:
        yield messages.all_reduce(shard, route.outer)
