"""The process groups of one rank, by name, and what can be done over them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from megatron_parallel import _compat
from megatron_parallel.collectives.traffic import Ledger, Traffic
from megatron_parallel.collectives.watchdog import Watchdog, marker_factory
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.agreement import agree
from megatron_parallel.mesh.job import Groups, Job
from megatron_parallel.mesh.store import default_store


@dataclass(frozen=True, eq=False)
class Axis:
    """This rank's process group of one name.

    `ranks` are its members' global ranks, ascending, and `index` this rank's place among them.
    `group` is None when `size` is 1: collectives over such an axis do nothing. All axes of a mesh
    share its `ledger` and its `watchdog`, and `mesh` tells it from other meshes of the job.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None
    size: int
    ledger: Ledger = field(default_factory=Ledger, repr=False)
    mesh: str = field(default="", repr=False)
    watchdog: Watchdog | None = field(default=None, repr=False)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group, for torch's collectives; raises `LayoutError` if there is none."""
        if self.group is None:
            raise LayoutError(
                f"axis {self.name!r} of {self.size} ranks has no process group: "
                "build the mesh with Mesh.bind to communicate"
            )
        return self.group

    def count(self, operation: str, t: torch.Tensor) -> None:
        """Counts a message that `t` is the payload of, if anyone asked (`Mesh.counting`)."""
        if self.ledger.open:
            self.ledger.add(self.name, operation, t.nbytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Axis":
        return self  # process groups cannot be copied, and a copied model shares them


class BoundAxes:
    """One rank's axes: what `Mesh` and `GridMesh` have in common.

    Attributes:
        rank: Of this process, in the whole job.
        world_size: Number of ranks of this mesh.
        device: Where this rank computes.
        timeout: Of every collective.
    """

    def __init__(
        self,
        place: str,
        members: Mapping[str, tuple[int, ...]],
        rank: int,
        device: str | torch.device,
        timeout: timedelta,
        groups: Groups | None,
        job: Job | None,
    ) -> None:
        self._place = place  # for errors
        self.rank = rank
        self.world_size = len(members["world"])
        self.device = torch.device(device)
        self.timeout = timeout
        self._groups = dict(groups or {})
        self._job = job
        self._closed = False
        self._ledger = Ledger()
        self._watchdog = self._watch()
        self._axes: dict[str, Axis] = {}
        number = str(0 if job is None else job.number)
        for name, ranks in members.items():
            if ranks:
                group = self._groups.get(ranks)
                index = ranks.index(rank)
                self._axes[name] = Axis(
                    name, ranks, index, group, len(ranks), self._ledger, number, self._watchdog
                )
        if job is not None:
            job.enter()

    def _watch(self) -> Watchdog | None:
        """Starts waiting for collectives, on devices whose host does not wait for them itself."""
        mark = marker_factory(self.device)
        if mark is None or not self._groups:
            return None
        groups = list(self._groups.values())
        return Watchdog(mark, lambda: _compat.abort_groups(groups), self.timeout.total_seconds())

    def axis(self, name: str) -> Axis:
        """This rank's axis of that name; raises `LayoutError` if it is in no such group."""
        found = self._axes.get(self._canonical(name))
        if found is None:
            raise LayoutError(f"rank {self.rank} is in no {name!r} group of {self._place}")
        return found

    def has_axis(self, name: str) -> bool:
        """Whether this rank is in a group of that name (`embedding`: only first and last stage)."""
        return self._canonical(name) in self._axes

    def _canonical(self, name: str) -> str:
        """Returns the name under which an axis is kept."""
        return name

    def agree(self, topic: str, values: Mapping[str, str], axis: str = "world") -> None:
        """Raises `LayoutError` on every rank of `axis` unless all of them give equal `values`.

        A rank that does not come within the mesh's time-out is a `CollectiveError`.
        """
        ranks = self.axis(axis).ranks
        if len(ranks) > 1:
            agree(
                default_store(),
                topic,
                values,
                rank=self.rank,
                ranks=ranks,
                timeout=self.timeout,
                axis=axis,
            )

    @contextmanager
    def counting(self) -> Iterator[Traffic]:
        """Counts what this rank communicates over the axes of this mesh in the `with` block.

        `megatron_parallel.collectives.traffic` describes what is counted. Compiled functions run
        eagerly in the block, since a compiled graph counts nothing.
        """
        with self._ledger.counting() as traffic:
            yield traffic

    def close(self) -> None:
        """Destroys the groups this mesh created; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._watchdog is not None:
            self._watchdog.close()
        if not dist.is_initialized():  # whoever made the default group has ended it
            return
        for group in self._groups.values():
            dist.destroy_process_group(group)
        if self._job is not None:
            self._job.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
