"""The job of one rank whose other ranks do not exist."""

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_parallel._compat.imagined import init_fake_group, new_fake_group
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.job import Groups, Job


class ImaginedJob(Job):
    """Creates process groups whose collectives return at once, with wrong values.

    Raises:
        LayoutError: This process is in a job already.
    """

    imagined = True

    def __init__(self, rank: int, world_size: int, device: torch.device, timeout: timedelta):
        if dist.is_initialized():
            raise LayoutError(
                "this process is in a job of torch.distributed already; imagine a rank in another "
                "process, or close the mesh of the other rank first"
            )
        self.device, self.timeout = device, timeout
        self.rank, self.world_size, self.number = rank, world_size, 0
        self._owned, self._members = True, 0
        init_fake_group(rank, world_size)

    def create_groups(self, rank_sets: Iterable[tuple[int, ...]]) -> Groups:
        """Creates the groups that contain this rank, by their ranks."""
        sets = dict.fromkeys(ranks for ranks in rank_sets if len(ranks) > 1 and self.rank in ranks)
        return {ranks: new_fake_group(ranks, self.timeout) for ranks in sets}
