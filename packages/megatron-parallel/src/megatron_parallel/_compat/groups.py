"""The job's key-value store and its process groups."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

Store = _distributed_c10d.Store  # torch.distributed has this, but its type stubs hide it


def tcp_store(
    address: str, port: int, size: int, timeout: timedelta, listener: int | None = None
) -> Store:
    """Returns the key-value store of `size` ranks, when all of them have connected.

    The rank that hosts it passes `listener`, a socket's file descriptor, which torch takes over.
    """
    return _distributed_c10d.TCPStore(
        address,
        port,
        size,
        is_master=listener is not None,
        timeout=timeout,
        master_listen_fd=listener,
    )


def default_store() -> Store:
    """Returns the key-value store of the default process group."""
    return distributed_c10d._get_default_store()


def abort_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """Aborts the collectives in flight on these groups and the default one, from any thread."""
    whole = [*groups, *([dist.group.WORLD] if dist.is_initialized() and dist.group.WORLD else [])]
    nccl: Any = None
    if dist.is_nccl_available():
        found = [group._get_backend(torch.device("cuda")) for group in whole if _has_nccl(group)]
        nccl = next(iter(found), None)
    if nccl is not None:  # in one NCCL group: separate aborts of communicators may deadlock
        nccl._group_start()
    for group in whole:
        group.abort()
    if nccl is not None:
        nccl._group_end()


def _has_nccl(group: dist.ProcessGroup) -> bool:
    return "nccl" in dist.get_backend_config(group)


def new_groups(
    groups: list[tuple[int, ...]], timeout: timedelta
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Creates process groups, in the same order on all ranks; returns those that have this rank.

    A group without this rank costs only a counter: torch does not wait there, unless
    `TORCH_DIST_INIT_BARRIER=1`. `use_local_synchronization` would skip such groups, but it names a
    group by the number of groups of its rank. Ranks with more groups, as those with tied embeddings
    have, would then wait for one another under different names.
    """
    mine = {}
    rank = dist.get_rank()
    for ranks in groups:
        group = dist.new_group(list(ranks), timeout=timeout)
        if rank in ranks:
            mine[ranks] = group
    return mine
