"""Axes: the named process groups of one rank."""

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
    """One named process group of this rank.

    Attributes:
        name: Name of the axis.
        ranks: Global ranks of the group, ascending.
        index: Coordinate of this rank: its index in `ranks`.
        group: The process group; None if `size` is 1, where collectives are no-ops.
        size: Number of ranks.
        ledger: Counts traffic; shared by all axes of a mesh.
        mesh: Identifies the mesh among all meshes of the job.
        watchdog: Watches asynchronous collectives; shared by all axes of a mesh.
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
        """The process group, for collectives of torch.

        Raises:
            LayoutError: The axis has no process group.
        """
        if self.group is None:
            raise LayoutError(
                f"axis {self.name!r} of {self.size} ranks has no process group: "
                "build the mesh with Mesh.bind to communicate"
            )
        return self.group

    def count(self, operation: str, t: torch.Tensor) -> None:
        """Counts a message with payload `t`, inside a block of `Mesh.counting`."""
        if self.ledger.open:
            self.ledger.add(self.name, operation, t.nbytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Axis":
        return self  # process groups cannot be copied; a copied model shares them


class MeshBase:
    """The axes of one rank; base class of `Mesh` and `GridMesh`.

    Attributes:
        rank: Rank of this process in the job.
        world_size: Number of ranks of this mesh.
        device: Device of this rank.
        timeout: Time-out of each collective.
    """

    def __init__(
        self,
        description: str,
        members: Mapping[str, tuple[int, ...]],
        rank: int,
        device: str | torch.device,
        timeout: timedelta,
        groups: Groups | None,
        job: Job | None,
    ) -> None:
        self._description = description  # for errors
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
        for name, ranks in members.items():
            if ranks:
                self._add_axis(name, ranks)
        if job is not None:
            job.enter()

    def _add_axis(self, name: str, ranks: tuple[int, ...]) -> None:
        """Adds an axis of this rank, whose group exists if it has several ranks."""
        number = str(0 if self._job is None else self._job.number)
        group, index = self._groups.get(ranks), ranks.index(self.rank)
        self._axes[name] = Axis(
            name, ranks, index, group, len(ranks), self._ledger, number, self._watchdog
        )

    @property
    def is_imagined(self) -> bool:
        """Whether the other ranks do not exist, so that collectives give no values."""
        return self._job is not None and self._job.imagined

    def _watch(self) -> Watchdog | None:
        """Returns a watchdog for devices whose host does not wait for collectives itself."""
        mark = marker_factory(self.device)
        if mark is None or not self._groups or self.is_imagined:
            return None

        def abort() -> None:
            _compat.abort_groups(list(self._groups.values()))

        return Watchdog(mark, abort, self.timeout.total_seconds())

    def axis(self, name: str) -> Axis:
        """Returns this rank's axis of that name.

        Raises:
            LayoutError: This rank is in no group of that name.
        """
        found = self._axes.get(self._canonical(name))
        if found is None:
            raise LayoutError(f"rank {self.rank} is in no {name!r} group of {self._description}")
        return found

    def has_axis(self, name: str) -> bool:
        """Returns whether this rank is in a group of that name.

        Only some pipeline ranks are in a group `embedding`, or in one that a model adds.
        """
        return self._canonical(name) in self._axes

    def _canonical(self, name: str) -> str:
        """Returns the canonical name of an axis."""
        return name

    def agree(self, topic: str, values: Mapping[str, str], axis: str = "world") -> None:
        """Verifies that all ranks of `axis` give equal `values`.

        Raises:
            LayoutError: The values differ. Raised on every rank of the axis.
            CollectiveError: A rank does not take part within the time-out of the mesh.
        """
        ranks = self.axis(axis).ranks
        if len(ranks) > 1 and not self.is_imagined:
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
        """Destroys the groups that this mesh created. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._watchdog is not None:
            self._watchdog.close()
        if not dist.is_initialized():  # the owner of the default group has destroyed it
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
