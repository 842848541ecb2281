"""A layout bound to the process groups of this rank.

`Mesh.single()` is one process: no `torch.distributed`, every axis of size 1, every collective a
no-op. `Mesh.bind(layout, ...)` is one rank of many, started by torchrun. `bind_meshes` puts several
layouts beside one another or over the same ranks, and `bind_grids` axes of any names. A mesh is
passed explicitly to whatever communicates; there is no global one.
"""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.axes import BoundAxes
from megatron_parallel.mesh.devices import local_device
from megatron_parallel.mesh.grid import Grid
from megatron_parallel.mesh.group_names import canonical_group_name
from megatron_parallel.mesh.job import Groups, Job
from megatron_parallel.mesh.layout import ParallelLayout

DEFAULT_TIMEOUT: Final = timedelta(minutes=10)


class Mesh(BoundAxes):
    """One rank's view of the job: who it is, on which device, and its groups.

    Built by `Mesh.single`, `Mesh.bind` or `bind_meshes`. `Mesh(layout, rank)` has no groups: it
    answers where that rank stands and what it holds, for planning, tests and checkpoint tools, and
    cannot communicate. With `first`, the layout's ranks are `first`, `first + 1`, … of the job.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        rank: int,
        device: str | torch.device = "cpu",
        *,
        first: int = 0,
        timeout: timedelta = DEFAULT_TIMEOUT,
        groups: Groups | None = None,
        job: Job | None = None,
    ) -> None:
        self.layout = layout
        members = {
            name: _shifted(layout.group_of(name, rank - first), first)
            for name in layout.group_names
        }
        super().__init__(f"layout {layout}", members, rank, device, timeout, groups, job)

    @classmethod
    def single(cls, device: str | torch.device = "cpu") -> "Mesh":
        """Returns the mesh of a single process, which needs no `torch.distributed`."""
        return cls(ParallelLayout(dp=1), 0, device)

    @classmethod
    def bind(
        cls,
        layout: ParallelLayout,
        *,
        device: str | torch.device = "cpu",
        timeout: timedelta = DEFAULT_TIMEOUT,
        configuration: str | Mapping[str, str] = "",
    ) -> "Mesh":
        """Joins the job as one of its ranks: compare notes with the others, create all groups.

        Uses the default process group if there is one, else creates it from the variables torchrun
        sets (Gloo on CPUs, NCCL on GPUs; `device="cuda"` becomes this rank's own). Without either,
        a layout of one rank gives a single-process mesh.

        Before any communication every rank's layout and `configuration` (a digest, or several
        things by name) are compared through the store. Any difference raises `LayoutError` on every
        rank, naming the ranks and the values; a rank that does not come is a `CollectiveError`,
        within `timeout`, which is also the time-out of every group's collectives. All ranks then
        create all groups in one fixed order.
        """
        alone = not dist.is_initialized() and "WORLD_SIZE" not in os.environ
        if alone and layout.tp * layout.cp * layout.pp == 1:
            return cls(layout.resolve(1), 0, local_device(device), timeout=timeout)
        notes = {"layout": str(layout), **_notes(configuration)}
        job = Job("layout and configuration", notes, device, timeout)
        try:
            resolved = layout.resolve(job.world_size)
        except LayoutError:
            job.leave()
            raise
        groups = job.create_groups(_groups_of(resolved))
        return cls(resolved, job.rank, job.device, timeout=timeout, groups=groups, job=job)

    def _canonical(self, name: str) -> str:
        return name if name in self._axes else canonical_group_name(name)

    def __repr__(self) -> str:
        return f"Mesh(rank {self.rank} of {self.world_size}, {self.layout}, {self.device})"


class GridMesh(BoundAxes):
    """One rank's place on a `Grid`: an axis for each of the grid's group names.

    Built by `bind_grids`; `GridMesh(grid, rank)` has no groups.
    """

    def __init__(
        self,
        grid: Grid,
        rank: int,
        device: str | torch.device = "cpu",
        *,
        timeout: timedelta = DEFAULT_TIMEOUT,
        groups: Groups | None = None,
        job: Job | None = None,
    ) -> None:
        self.grid = grid
        members = {name: grid.group_of(axes, rank) for name, axes in grid.named_groups.items()}
        super().__init__(f"grid {grid}", members, rank, device, timeout, groups, job)

    def __repr__(self) -> str:
        return f"GridMesh(rank {self.rank} of {self.world_size}, {self.grid}, {self.device})"


def bind_meshes(
    layouts: Mapping[str, tuple[ParallelLayout, range]],
    *,
    device: str | torch.device = "cpu",
    timeout: timedelta = DEFAULT_TIMEOUT,
    configuration: str | Mapping[str, str] = "",
) -> dict[str, Mesh]:
    """Binds several layouts in one job, for models whose modules are cut in different ways.

    For example a vision encoder on ranks 0-3 and a language model on ranks 4-7, or both on all
    eight with other degrees. Every rank of the job calls this with the same layouts and gets the
    meshes it has a place in; each has groups of its own and is closed on its own.

    Args:
        layouts: By the name of the module, a layout and the consecutive ranks it is laid over.
        device: As for `Mesh.bind`.
        timeout: As for `Mesh.bind`.
        configuration: As for `Mesh.bind`.

    Raises:
        LayoutError: A layout does not fit its ranks, the job has no such ranks, or ranks disagree.
        CollectiveError: A rank does not come within `timeout`.
    """
    resolved = {
        name: (layout.resolve(_consecutive(name, ranks)), ranks)
        for name, (layout, ranks) in layouts.items()
    }
    notes = {name: f"{layout}, {_span(ranks)}" for name, (layout, ranks) in resolved.items()}
    job = Job("layouts and configuration", {**notes, **_notes(configuration)}, device, timeout)
    _check_ranks({name: ranks for name, (_, ranks) in resolved.items()}, job)
    meshes = {}
    for name, (layout, ranks) in resolved.items():
        groups = job.create_groups(_shifted(part, ranks.start) for part in _groups_of(layout))
        if job.rank in ranks:
            meshes[name] = Mesh(
                layout,
                job.rank,
                job.device,
                first=ranks.start,
                timeout=timeout,
                groups=groups,
                job=job,
            )
    return meshes


def bind_grids(
    grids: Mapping[str, Grid],
    *,
    device: str | torch.device = "cpu",
    timeout: timedelta = DEFAULT_TIMEOUT,
    configuration: str | Mapping[str, str] = "",
) -> dict[str, GridMesh]:
    """Binds grids of any named axes in one job; as `bind_meshes` otherwise."""
    notes = {name: str(grid) for name, grid in grids.items()}
    job = Job("grids and configuration", {**notes, **_notes(configuration)}, device, timeout)
    _check_ranks({name: grid.ranks for name, grid in grids.items()}, job)
    meshes = {}
    for name, grid in grids.items():
        groups = job.create_groups(
            ranks for axes in grid.named_groups.values() for ranks in grid.groups(axes)
        )
        if job.rank in grid.ranks:
            meshes[name] = GridMesh(
                grid, job.rank, job.device, timeout=timeout, groups=groups, job=job
            )
    return meshes


def _groups_of(layout: ParallelLayout) -> list[tuple[int, ...]]:
    return [ranks for name in layout.group_names for ranks in layout.groups(name)]


def _shifted(ranks: tuple[int, ...], first: int) -> tuple[int, ...]:
    return tuple(first + rank for rank in ranks)


def _notes(configuration: str | Mapping[str, str]) -> Mapping[str, str]:
    return {"configuration": configuration} if isinstance(configuration, str) else configuration


def _consecutive(name: str, ranks: range) -> int:
    if not len(ranks) or ranks.step != 1 or ranks.start < 0:
        raise LayoutError(f"{name}: {ranks} is not one or more ranks that follow one another")
    return len(ranks)


def _span(ranks: range) -> str:
    return f"ranks {ranks.start}-{ranks.stop - 1}"


def _check_ranks(parts: Mapping[str, range], job: Job) -> None:
    for name, ranks in parts.items():
        if ranks.stop > job.world_size:
            job.leave()
            raise LayoutError(
                f"{name} is laid over {_span(ranks)}, but the job has {job.world_size} ranks"
            )
