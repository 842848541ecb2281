"""Joining a job of several ranks: its default group, what all must agree on, and new groups."""

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
    """This process among those that torchrun, or whoever made the default group, started.

    Uses the default process group if there is one, else creates it from torchrun's variables.
    Before anything else all ranks compare `notes` through the store, and on GPUs that each has one
    of its own.

    Raises:
        LayoutError: The notes of the ranks differ, two have one GPU, this rank has none, or there
            is no group and no torchrun.
        CollectiveError: A rank does not come within `timeout`.
    """

    def __init__(
        self, topic: str, notes: Mapping[str, str], device: str | torch.device, timeout: timedelta
    ) -> None:
        self.device = local_device(device)
        self.timeout = timeout
        self._owned = not dist.is_initialized()
        self._members = 0
        if self._owned:
            init_default_group(self.device, timeout)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._agree(topic, notes, {"CUDA device": device_identity(self.device)})
        self.number = default_store().add(f"mesh/{self.rank}", 1)  # equal on all ranks

    def create_groups(self, wanted: Iterable[tuple[int, ...]]) -> Groups:
        """Creates groups, on all ranks in this order, and returns those that this rank is in.

        Equal sets of ranks (tp and tp_cp when cp is 1) share one, and one rank needs none. Returns
        when every rank has them: one that is lost from then on is named by what it did not join.
        """
        sets = list(dict.fromkeys(ranks for ranks in wanted if len(ranks) > 1))
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
        self, topic: str, notes: Mapping[str, str], own: Mapping[str, str | None] | None = None
    ) -> None:
        """As `agree`; a rank that disagrees, or is left alone, leaves the job."""
        try:
            agree(
                default_store(),
                topic,
                notes,
                rank=self.rank,
                ranks=range(self.world_size),
                timeout=self.timeout,
                own=own,
            )
        except (LayoutError, CollectiveError):
            self.leave()
            raise

    def enter(self) -> None:
        """Counts one more mesh that lives on this job's default group."""
        self._members += 1

    def leave(self) -> None:
        """One mesh less; after the last one the default group ends, if it was made here."""
        self._members -= 1
        if self._members <= 0 and self._owned and dist.is_initialized():
            dist.destroy_process_group()
