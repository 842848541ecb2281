"""A layout bound to the process groups of this rank.

`Mesh.single()` is one process: no `torch.distributed`, every axis of size 1, every collective a
no-op. `Mesh.bind(layout, ...)` is one rank of many, started by torchrun. A mesh is passed
explicitly to whatever communicates; there is no global one.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from megatron_parallel import _compat
from megatron_parallel.agreement import agree
from megatron_parallel.errors import CollectiveError, backend_text
from megatron_parallel.layout import LayoutError, ParallelLayout, canonical_group_name
from megatron_parallel.store import default_store
from megatron_parallel.traffic import Ledger, Traffic

DEFAULT_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, eq=False)
class Axis:
    """This rank's process group of one name.

    `ranks` are its members' global ranks, ascending, and `index` this rank's place among them.
    `group` is None when `size` is 1: collectives over such an axis do nothing. All axes of a mesh
    share its `ledger`, and `mesh` tells it from other meshes of the job.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None
    size: int
    ledger: Ledger = field(default_factory=Ledger, repr=False)
    mesh: str = field(default="", repr=False)

    @property
    def bound(self) -> dist.ProcessGroup:
        """The group, for torch's collectives; raises `LayoutError` if there is none."""
        if self.group is None:
            raise LayoutError(
                f"axis {self.name!r} of {self.size} ranks has no process group: "
                "build the mesh with Mesh.bind to communicate"
            )
        return self.group

    def count(self, operation: str, t: torch.Tensor) -> None:
        """Count a message that `t` is the payload of, if anyone asked (`Mesh.counting`)."""
        if self.ledger.open:
            self.ledger.add(self.name, operation, t.nbytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Axis":
        return self  # process groups cannot be copied, and a copied model shares them


class Mesh:
    """One rank's view of the job: who it is, on which device, and its groups.

    Built by `Mesh.single` or `Mesh.bind`. `Mesh(layout, rank)` has no groups: it answers where that
    rank stands and what it holds, for planning, tests and checkpoint tools, and cannot communicate.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        rank: int,
        device: str | torch.device = "cpu",
        *,
        groups: Mapping[tuple[int, ...], dist.ProcessGroup] | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        owns_default_group: bool = False,
        number: int = 0,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.world_size = layout.world_size
        self.device = torch.device(device)
        self.timeout = timeout
        self._groups = dict(groups or {})
        self._owns_default_group = owns_default_group
        self._closed = False
        self._ledger = Ledger()
        self._axes: dict[str, Axis] = {}
        for name in layout.group_names:
            ranks = layout.group_of(name, rank)
            if ranks:
                group = self._groups.get(ranks)
                self._axes[name] = Axis(
                    name, ranks, ranks.index(rank), group, len(ranks), self._ledger, str(number)
                )

    @classmethod
    def single(cls, device: str | torch.device = "cpu") -> "Mesh":
        """The mesh of a single process, which needs no `torch.distributed`."""
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
        """Join the job as one of its ranks: compare notes with the others, create all groups.

        Uses the default process group if there is one, else creates it from the variables torchrun
        sets (Gloo on CPUs, NCCL on GPUs; `device="cuda"` becomes this rank's own). Without either,
        a layout of one rank gives a single-process mesh.

        Before any communication every rank's layout and `configuration` (a digest, or several
        things by name) are compared through the store. Any difference raises `LayoutError` on every
        rank, naming the ranks and the values; a rank that does not come is a `CollectiveError`,
        within `timeout`, which is also the time-out of every group's collectives. All ranks then
        create all groups in one fixed order.
        """
        created = False
        if not dist.is_initialized():
            if "WORLD_SIZE" not in os.environ and layout.tp * layout.cp * layout.pp == 1:
                return cls(layout.resolve(1), 0, _local_device(device), timeout=timeout)
            _init_default_group(_local_device(device), timeout)
            created = True
        rank, world_size = dist.get_rank(), dist.get_world_size()
        notes = (
            {"configuration": configuration} if isinstance(configuration, str) else configuration
        )
        try:
            agree(
                default_store(),
                "layout and configuration",
                {"layout": str(layout), **notes},
                rank=rank,
                ranks=range(world_size),
                timeout=timeout,
            )
            resolved = layout.resolve(world_size)
            groups = _create_groups(resolved, timeout)
            number = default_store().add(f"mesh/{rank}", 1)  # equal on all ranks
        except (LayoutError, CollectiveError):
            if created:
                dist.destroy_process_group()
            raise
        return cls(
            resolved,
            rank,
            _local_device(device),
            groups=groups,
            timeout=timeout,
            owns_default_group=created,
            number=number,
        )

    def axis(self, name: str) -> Axis:
        """This rank's axis of that name; raises `LayoutError` if it is in no such group."""
        found = self._axes.get(name) or self._axes.get(canonical_group_name(name))
        if found is None:
            raise LayoutError(f"rank {self.rank} is in no {name!r} group of layout {self.layout}")
        return found

    def has_axis(self, name: str) -> bool:
        """Whether this rank is in a group of that name (`embedding`: only first and last stage)."""
        return canonical_group_name(name) in self._axes

    def agree(self, topic: str, values: Mapping[str, str], axis: str = "world") -> None:
        """Raise `LayoutError` on every rank of `axis` unless all of them give equal `values`.

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
        """Count what this rank communicates over the axes of this mesh in the `with` block.

        `megatron_parallel.traffic` says what is counted and how. Compiled functions run eagerly
        in the block, as a compiled graph counts nothing.
        """
        with self._ledger.counting() as traffic:
            yield traffic

    def close(self) -> None:
        """Destroy the groups this mesh created; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if not dist.is_initialized():  # whoever made the default group has ended it
            return
        for group in self._groups.values():
            dist.destroy_process_group(group)
        if self._owns_default_group:
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Mesh(rank {self.rank} of {self.world_size}, {self.layout}, {self.device})"


def _local_device(device: str | torch.device) -> torch.device:
    where = torch.device(device)
    if where.type != "cuda":
        return where
    if str(where) == "cuda":  # no index given
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(where)
    return where


def _init_default_group(device: torch.device, timeout: timedelta) -> None:
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    absent = [name for name in needed if name not in os.environ]
    if absent:
        raise LayoutError(
            f"no process group and no {', '.join(absent)} in the environment: "
            "start the ranks with torchrun"
        )
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    except RuntimeError as error:
        store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise CollectiveError(
            f"rank {os.environ['RANK']} did not meet the others of {os.environ['WORLD_SIZE']} at "
            f"{store} within {timeout.total_seconds():g} s: one did not start, or the address is "
            f"wrong ({backend_text(error)})"
        ) from error


def _create_groups(
    layout: ParallelLayout, timeout: timedelta
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """One group per set of ranks; equal sets (tp and tp_cp when cp is 1) share it."""
    wanted = dict.fromkeys(
        ranks for name in layout.group_names for ranks in layout.groups(name) if len(ranks) > 1
    )
    try:
        return _compat.new_groups(list(wanted), timeout)
    except RuntimeError as error:
        raise CollectiveError(
            f"not all of {layout.world_size} ranks created the process groups within "
            f"{timeout.total_seconds():g} s: see their own output ({backend_text(error)})"
        ) from error
