"""Every contact with private or fast-moving parts of torch, in one place."""

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

Store = _distributed_c10d.Store  # torch.distributed has it, but its type stubs hide it

# torch 2.13 renamed these two and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `whole` with the parts of all members, along dim 0."""
    _all_gather(whole, part, group=group)


def reduce_scatter(
    part: Tensor, whole: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> None:
    """Fill `part` with this member's part, along dim 0, of the reduced `whole`."""
    _reduce_scatter(part, whole, op, group=group)


def default_store() -> Store:
    """The key-value store the default process group was built on."""
    return distributed_c10d._get_default_store()


def new_groups(
    groups: list[tuple[int, ...]], timeout: timedelta
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Create process groups, on all ranks in the same order; returns those this rank is in."""
    mine = {}
    rank = dist.get_rank()
    for ranks in groups:
        group = dist.new_group(list(ranks), timeout=timeout)
        if rank in ranks:
            mine[ranks] = group
    return mine
