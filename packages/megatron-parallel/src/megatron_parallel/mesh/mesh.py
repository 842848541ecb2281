"""Meshes: layouts bound to the process groups of this rank.

`Mesh.single()` is the mesh of one process: it does not use `torch.distributed`, every axis has size
1, and every collective is a no-op. `Mesh.bind(layout, ...)` is one of several ranks started by
torchrun. `bind_meshes` binds several layouts, side by side or over the same ranks, and `bind_grids`
binds grids with any axes. A mesh is passed explicitly to all code that communicates; there is no
global mesh.
"""

import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.axes import MeshBase
from megatron_parallel.mesh.devices import local_device
from megatron_parallel.mesh.grid import Grid
from megatron_parallel.mesh.group_names import canonical_group_name, stage_group_name
from megatron_parallel.mesh.imagined import ImaginedJob
from megatron_parallel.mesh.job import Groups, Job
from megatron_parallel.mesh.layout import ParallelLayout

DEFAULT_TIMEOUT: Final = timedelta(minutes=10)


class Mesh(MeshBase):
    """One rank of a layout, with its device and process groups.

    Built by `Mesh.single`, `Mesh.bind` or `bind_meshes`. `Mesh(layout, rank)` has no process groups
    and cannot communicate; it gives the coordinates and shards of a rank for planning, tests and
    checkpoint tools. With `first_rank`, the layout consists of the ranks of the job from
    `first_rank` on.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        rank: int,
        device: str | torch.device = "cpu",
        *,
        first_rank: int = 0,
        timeout: timedelta = DEFAULT_TIMEOUT,
        groups: Groups | None = None,
        job: Job | None = None,
    ) -> None:
        self.layout, self._first_rank = layout, first_rank
        self._stage_groups: set[str] = set()
        members = {
            name: _shifted(layout.group_of(name, rank - first_rank), first_rank)
            for name in layout.group_names
        }
        super().__init__(f"layout {layout}", members, rank, device, timeout, groups, job)

    @classmethod
    def single(cls, device: str | torch.device = "cpu") -> "Mesh":
        """Returns the mesh of a single process, without `torch.distributed`."""
        return cls(ParallelLayout(dp=1), 0, device)

    @classmethod
    def imagined(
        cls, layout: ParallelLayout, rank: int = 0, device: str | torch.device = "cpu"
    ) -> "Mesh":
        """Returns the mesh of one rank of a job whose other ranks do not exist.

        Collectives return at once and give no values: the tensors that they return have the right
        shapes only. Together with tensors without values (`megatron_parallel.imagined`) one process
        runs what this rank would do in a job of any size. Close the mesh before imagining another
        rank.

        Args:
            layout: The layout. Its number of ranks must be known.
            rank: Rank in the imagined job.
            device: Device of the rank.

        Raises:
            LayoutError: The layout does not have such a rank, or this process is in a job.
        """
        layout.group_of("world", rank)  # refuses other ranks
        if layout.world_size == 1:
            return cls(layout, rank, device)
        job = ImaginedJob(rank, layout.world_size, torch.device(device), DEFAULT_TIMEOUT)
        groups = job.create_groups(_groups_of(layout))
        return cls(layout, rank, device, groups=groups, job=job)

    @classmethod
    def bind(
        cls,
        layout: ParallelLayout,
        *,
        device: str | torch.device = "cpu",
        timeout: timedelta = DEFAULT_TIMEOUT,
        configuration: str | Mapping[str, str] = "",
    ) -> "Mesh":
        """Joins the job as one of its ranks and creates all process groups.

        Uses the default process group if there is one, else creates it from the environment
        variables of torchrun (Gloo on CPUs, NCCL on GPUs; `device="cuda"` selects the GPU of this
        rank). Without either, a layout of one rank gives a single-process mesh.

        Before any communication, the ranks compare `layout` and `configuration` through the store.
        Then all ranks create all groups in one fixed order.

        Args:
            layout: The layout. Must be the same on all ranks.
            device: Device of this rank. Defaults to the CPU.
            timeout: Time-out of joining, and of each collective.
            configuration: A digest, or several values by name, that must be the same on all ranks.

        Raises:
            LayoutError: The layout does not fit the number of ranks, or the ranks disagree. The
                error names the ranks and their values, and is raised on every rank.
            CollectiveError: A rank does not join within `timeout`.
        """
        alone = not dist.is_initialized() and "WORLD_SIZE" not in os.environ
        if alone and layout.tp * layout.cp * layout.pp == 1:
            return cls(layout.resolve(1), 0, local_device(device), timeout=timeout)
        values = {"layout": str(layout), **_compared_values(configuration)}
        job = Job("layout and configuration", values, device, timeout)
        try:
            resolved = layout.resolve(job.world_size)
        except LayoutError:
            job.leave()
            raise
        groups = job.create_groups(_groups_of(resolved))
        return cls(resolved, job.rank, job.device, timeout=timeout, groups=groups, job=job)

    def add_stage_group(self, pipeline_ranks: Iterable[int]) -> str | None:
        """Adds an axis of pipeline ranks that all hold some parameters (`Sharding.tied`).

        A model calls this when it is built. All ranks of the job call it with the same pipeline
        ranks, in the same order, since it creates process groups. A second call with the same ones
        does nothing.

        Args:
            pipeline_ranks: Coordinates on the axis `pp`.

        Returns:
            The name of the axis, which only the ranks in such a group have; None for one pipeline
            rank, which shares nothing.

        Raises:
            LayoutError: A pipeline rank does not exist, or the mesh has only some ranks of the job
                and process groups are missing.
            CollectiveError: A rank does not create the groups within the time-out.
        """
        holders = set(pipeline_ranks)
        name = stage_group_name(holders)
        sets = [_shifted(ranks, self._first_rank) for ranks in self.layout.groups(name)]
        if len(holders) == 1:
            return None
        if self._job is not None and name not in self._stage_groups:
            present = {_shifted(ranks, self._first_rank) for ranks in _groups_of(self.layout)}
            missing = [ranks for ranks in sets if ranks not in present]
            if missing and self._job.world_size != self.world_size:
                raise LayoutError(
                    f"pipeline ranks {sorted(holders)} of a mesh with {self.world_size} of "
                    f"{self._job.world_size} ranks of the job cannot share parameters; use pp 2 or "
                    "a mesh of all ranks"
                )
            self._groups |= self._job.create_groups(missing) if missing else {}
        self._stage_groups.add(name)
        for ranks in sets:
            if self.rank in ranks:
                self._add_axis(name, ranks)
        return name

    def _canonical(self, name: str) -> str:
        return name if name in self._axes else canonical_group_name(name)

    def __repr__(self) -> str:
        return f"Mesh(rank {self.rank} of {self.world_size}, {self.layout}, {self.device})"


class GridMesh(MeshBase):
    """One rank of a `Grid`, with an axis for each group of the grid.

    Built by `bind_grids`. `GridMesh(grid, rank)` has no process groups and cannot communicate.
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

    For example, a vision encoder on ranks 0-3 and a language model on ranks 4-7, or both on all
    eight ranks with different degrees. All ranks of the job call this with the same layouts. Each
    mesh has process groups of its own and is closed separately.

    Args:
        layouts: A layout and its consecutive ranks, by name of the module.
        device: As for `Mesh.bind`.
        timeout: As for `Mesh.bind`.
        configuration: As for `Mesh.bind`.

    Returns:
        The meshes that contain this rank, by name.

    Raises:
        LayoutError: A layout does not fit its ranks, the job lacks these ranks, or ranks disagree.
        CollectiveError: A rank does not join within `timeout`.
    """
    resolved = {
        name: (layout.resolve(_consecutive(name, ranks)), ranks)
        for name, (layout, ranks) in layouts.items()
    }
    values = {name: f"{layout}, {_span(ranks)}" for name, (layout, ranks) in resolved.items()}
    job = Job(
        "layouts and configuration", {**values, **_compared_values(configuration)}, device, timeout
    )
    _check_ranks({name: ranks for name, (_, ranks) in resolved.items()}, job)
    meshes = {}
    for name, (layout, ranks) in resolved.items():
        groups = job.create_groups(_shifted(part, ranks.start) for part in _groups_of(layout))
        if job.rank in ranks:
            meshes[name] = Mesh(
                layout,
                job.rank,
                job.device,
                first_rank=ranks.start,
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
    """Binds grids of any named axes in one job. Otherwise as `bind_meshes`."""
    values = {name: str(grid) for name, grid in grids.items()}
    job = Job(
        "grids and configuration", {**values, **_compared_values(configuration)}, device, timeout
    )
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


def _compared_values(configuration: str | Mapping[str, str]) -> Mapping[str, str]:
    return {"configuration": configuration} if isinstance(configuration, str) else configuration


def _consecutive(name: str, ranks: range) -> int:
    if not len(ranks) or ranks.step != 1 or ranks.start < 0:
        raise LayoutError(f"{name}: {ranks} is not a range of one or more consecutive ranks")
    return len(ranks)


def _span(ranks: range) -> str:
    return f"ranks {ranks.start}-{ranks.stop - 1}"


def _check_ranks(parts: Mapping[str, range], job: Job) -> None:
    for name, ranks in parts.items():
        if ranks.stop > job.world_size:
            job.leave()
            raise LayoutError(
                f"{name} needs {_span(ranks)}, but the job has {job.world_size} ranks"
            )
