"""Joining a job of several ranks: the default process group, agreement, and new groups."""

from collections.abc import Iterable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_parallel import _compat
from megatron_parallel.collectives.watchdog import backend_timeout
from megatron_parallel.errors import CollectiveError, LayoutError, backend_text
from megatron_parallel.mesh.agreement import agree
from megatron_parallel.mesh.devices import device_identity, local_device
from megatron_parallel.mesh.rendezvous import init_default_group
from megatron_parallel.mesh.store import default_store

Groups = dict[tuple[int, ...], dist.ProcessGroup]


class Job:
    """One rank of a job of several processes.

    Uses the default process group if there is one, else creates it from the environment variables
    of torchrun. Before any communication, all ranks compare `values` through the store. On GPUs,
    they also verify that each rank has a GPU of its own.

    Raises:
        LayoutError: The values of the ranks differ, two ranks share a GPU, this rank has none, or
            there is neither a default group nor torchrun.
        CollectiveError: A rank does not join within `timeout`.
    """

    imagined = False
    """Whether the other ranks do not exist (`Mesh.imagined`)."""

    def __init__(
        self, topic: str, values: Mapping[str, str], device: str | torch.device, timeout: timedelta
    ) -> None:
        self.device = local_device(device)
        self.timeout = timeout
        self._owned = not dist.is_initialized()
        self._members = 0
        if self._owned:
            init_default_group(self.device, timeout)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._agree(topic, values, {"CUDA device": device_identity(self.device)})
        self.number = default_store().add(f"mesh/{self.rank}", 1)  # equal on all ranks

    def create_groups(self, rank_sets: Iterable[tuple[int, ...]]) -> Groups:
        """Creates process groups and returns those that contain this rank, by their ranks.

        All ranks create the same groups in the same order. Equal sets of ranks (tp and tp_cp when
        cp is 1) share a group, and a set of one rank needs none. Returns when every rank has its
        groups, so a rank that is lost later is named by the collective that it did not join.

        Raises:
            CollectiveError: A rank does not create the groups within the time-out.
        """
        sets = list(dict.fromkeys(ranks for ranks in rank_sets if len(ranks) > 1))
        try:
            groups = _compat.new_groups(sets, backend_timeout(self.device, self.timeout))
        except RuntimeError as error:
            self.leave()
            raise CollectiveError(
                f"not all of {self.world_size} ranks created the process groups within "
                f"{self.timeout.total_seconds():g} s: see their own output ({backend_text(error)})"
            ) from error
        self._agree("process groups", {"number of groups": str(len(sets))})
        return groups

    def _agree(
        self, topic: str, values: Mapping[str, str], own: Mapping[str, str | None] | None = None
    ) -> None:
        """Calls `agree`. If it fails, this rank leaves the job."""
        try:
            agree(
                default_store(),
                topic,
                values,
                rank=self.rank,
                ranks=range(self.world_size),
                timeout=self.timeout,
                own=own,
            )
        except (LayoutError, CollectiveError):
            self.leave()
            raise

    def enter(self) -> None:
        """Registers one more mesh that uses the default group of this job."""
        self._members += 1

    def leave(self) -> None:
        """Unregisters a mesh. The last one destroys the default group if it was created here."""
        self._members -= 1
        if self._members <= 0 and self._owned and dist.is_initialized():
            dist.destroy_process_group()
