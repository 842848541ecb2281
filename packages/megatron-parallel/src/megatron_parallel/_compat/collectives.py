"""torch's collectives, under the names of each version of torch."""

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed these two and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    """Fills `whole` with the shards of all ranks of the group, along dim 0."""
    _all_gather(whole, part, group=group)


def reduce_scatter(
    part: Tensor, whole: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> None:
    """Fills `part` with this rank's shard, along dim 0, of the reduced `whole`."""
    _reduce_scatter(part, whole, op, group=group)


def start_all_reduce(t: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts summing `t` in place."""
    return _started(dist.all_reduce(t, group=group, async_op=True))


def start_all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts filling `whole` with the shards of all ranks; `part` may be a view of it."""
    return _started(_all_gather(whole, part, group=group, async_op=True))


def start_reduce_scatter(part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts summing this rank's shard of `whole` into `part`, which may be a view of `whole`."""
    return _started(_reduce_scatter(part, whole, group=group, async_op=True))


def start_all_to_all(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts sending each rank its slice of `sent`, along dim 0."""
    return _started(dist.all_to_all_single(received, sent, group=group, async_op=True))


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:  # only on ranks outside of the group
        raise RuntimeError("this rank is not in the group of the collective")
    return work
