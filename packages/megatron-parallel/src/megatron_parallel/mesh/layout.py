"""Parallel layouts: the coordinates of each rank and the process groups, in pure Python.

A layout arranges the ranks of a job on a grid with one axis for each kind of parallelism. A process
group is a set of ranks that differ only along some of these axes. The same ranks form two grids:
the dense grid `(tp, cp, dp, pp)`, and the expert grid `(etp, ep, expert dp, pp)` for the experts of
mixture-of-experts layers. `order` lists the axes from the fastest to the slowest varying::

    >>> layout = ParallelLayout(tp=2, pp=2).resolve(8)
    >>> layout.groups("tp")
    [(0, 1), (2, 3), (4, 5), (6, 7)]
    >>> layout.groups("pp")
    [(0, 4), (1, 5), (2, 6), (3, 7)]

Ranks are numbered and grouped as in Megatron-Core (`megatron.core.parallel_state.RankGenerator`).
This module does not import torch, so layouts can be planned, checked and drawn on a login node.
"""

from dataclasses import dataclass, field, replace
from typing import Final

from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.coordinates import (
    Coordinates,
    ExpertCoordinates,
    StageMapping,
    stages_of,
)
from megatron_parallel.mesh.grid import Grid
from megatron_parallel.mesh.group_names import (
    GROUPS,
    NESTED,
    GroupKind,
    group_kind,
    pool_group_name,
)
from megatron_parallel.nearest import nearest_divisors, nearest_multiples

AXES: Final = ("tp", "cp", "ep", "dp", "pp")


def _degree(text: str, flag: str | None) -> dict[str, object]:
    return {"help": text, "flag": flag, "unit": "ranks"}


@dataclass(frozen=True)
class ParallelLayout:
    """The degree of each kind of parallelism, and the order of the axes.

    `dp` may be omitted: `resolve` derives it from the world size. If it is given, it must match.
    `vpp` is the number of model chunks on each pipeline rank and does not change the world size.
    `etp` is the tensor-parallel degree inside experts and defaults to `tp`. The data-parallel
    degree of experts follows as `world_size / (etp * ep * pp)`.

    `stage_mapping` maps stages to pipeline ranks. With "loop", pipeline rank `r` holds every
    `pp`-th stage from `r` on. With "v" it holds two stages, `r` and `2 pp - 1 - r`, so that
    pipeline rank 0 holds both the first and the last one (schedules ZB-V and DualPipeV).

    Raises:
        LayoutError: The degrees cannot form the two grids.
    """

    tp: int = field(
        default=1, metadata=_degree("tensor-parallel degree", "--tensor-model-parallel-size")
    )
    cp: int = field(
        default=1, metadata=_degree("context-parallel degree", "--context-parallel-size")
    )
    ep: int = field(
        default=1, metadata=_degree("expert-parallel degree", "--expert-model-parallel-size")
    )
    dp: int | None = field(
        default=None,
        metadata=_degree("data-parallel degree; derived from the world size if absent", None),
    )
    pp: int = field(
        default=1, metadata=_degree("pipeline-parallel degree", "--pipeline-model-parallel-size")
    )
    vpp: int = field(
        default=1,
        metadata={
            "help": "model chunks per pipeline rank (interleaved schedules)",
            "flag": "--num-virtual-stages-per-pipeline-rank",
            "unit": "chunks",
        },
    )
    etp: int | None = field(
        default=None,
        metadata=_degree(
            "tensor-parallel degree inside experts; defaults to tp",
            "--expert-tensor-parallel-size",
        ),
    )
    hierarchical_cp: tuple[int, ...] | None = field(
        default=None,
        metadata={
            "help": "sizes of the two levels of context parallelism: all-to-all inside a group of "
            "nearby ranks, ring between groups",
            "flag": "--hierarchical-context-parallel-sizes",
            "unit": "ranks",
        },
    )
    hybrid_cp: bool = field(
        default=False,
        metadata={
            "help": "use data- and context-parallel ranks as one pool, in which each document has "
            "its own context-parallel size, a power of two that depends on its length",
            "flag": "--hybrid-context-parallel",
        },
    )
    dp_outer: int = field(
        default=1,
        metadata={
            "help": "instances of the sharded optimizer: gradients are summed inside an instance "
            "of near ranks, then across instances; each instance holds all shards",
            "flag": "--num-distributed-optimizer-instances",
            "unit": "instances",
        },
    )
    order: str = field(
        default="tp-cp-ep-dp-pp",
        metadata={"help": "axes from fastest to slowest varying rank", "flag": None},
    )
    stage_mapping: StageMapping = field(
        default="loop",
        metadata={"help": "mapping of stages to pipeline ranks", "flag": None},
    )

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "ep", "dp", "pp", "vpp", "etp", "dp_outer"):
            degree = getattr(self, name)
            optional = name in ("dp", "etp")
            if degree is None and optional:
                continue
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise LayoutError(
                    f"{{{name}:=}} is not a degree: give a whole number >= 1", vars(self)
                )
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(
                "{vpp:=} needs pipeline parallelism, but {pp:=}; use at least 2 pipeline ranks",
                vars(self),
            )
        if self.stage_mapping not in ("loop", "v"):
            raise LayoutError("{stage_mapping:=} is neither 'loop' nor 'v'", vars(self))
        if self.stage_mapping == "v" and self.vpp != 2:
            raise LayoutError(
                "{stage_mapping:=} has 2 chunks per rank, but {vpp:=}: use 2", vars(self)
            )
        self._check_order()
        self._check_hierarchy()
        self._check_pool()
        if self.dp is not None and self.dp * self.cp % self.dp_outer:
            raise LayoutError(
                f"{{dp_outer:=}} does not divide dp {self.dp} x cp {self.cp} = "
                f"{self.dp * self.cp} data-parallel ranks: use "
                f"{nearest_divisors(self.dp * self.cp, self.dp_outer)}",
                vars(self),
            )
        if self.dp is not None and self.has_expert_parallelism:
            self._expert()

    def _check_order(self) -> None:
        names = self.order.split("-")
        for name in names:
            if name not in AXES:
                known = "-".join(AXES)
                raise LayoutError(f"order={self.order!r}: unknown axis {name!r}; use {known}")
            if names.count(name) > 1:
                raise LayoutError(f"order={self.order!r} names {name!r} twice")
        for name in AXES:
            degree = getattr(self, name)
            if name not in names and degree is not None and degree > 1:
                raise LayoutError(f"order={self.order!r} leaves out {name!r}, but {name}={degree}")

    def _check_hierarchy(self) -> None:
        sizes = self.hierarchical_cp
        if sizes is None:
            return
        if len(sizes) != 2 or min(sizes) < 1 or sizes[0] * sizes[1] != self.cp:
            raise LayoutError(
                "{hierarchical_cp:=} must be two sizes, inner and outer, whose product is {cp:=}, "
                f"such as {_two_sizes(self.cp)}",
                vars(self),
            )

    def _check_pool(self) -> None:
        if not self.hybrid_cp:
            return
        if self.hierarchical_cp is not None:
            raise LayoutError(
                "{hybrid_cp:name} cannot be combined with {hierarchical_cp:=}: "
                "leave out one of them",
                vars(self),
            )
        if self.dp is not None and self.pool & (self.pool - 1):
            raise LayoutError(
                f"{{hybrid_cp:name}} needs a power of two of data- and context-parallel ranks, "
                f"not dp {self.dp} x cp {self.cp} = {self.pool}: change a degree or the number of "
                "ranks",
                vars(self),
            )

    # -- sizes ---------------------------------------------------------------------------------

    def resolve(self, world_size: int) -> "ParallelLayout":
        """Returns the layout with `dp` set for `world_size` ranks.

        Raises:
            LayoutError: The world size does not fit the degrees.
        """
        if world_size < 1:
            raise LayoutError(f"world size {world_size} is not a whole number >= 1")
        model = self.tp * self.cp * self.pp
        product = f"tp {self.tp} x cp {self.cp} x pp {self.pp} = {model}"
        if world_size % model:
            raise LayoutError(
                f"world size {world_size} is not a multiple of {product}: "
                f"use {nearest_multiples(world_size, model)} ranks or change a degree"
            )
        dp = world_size // model
        if self.dp is not None and self.dp != dp:
            raise LayoutError(
                f"dp={self.dp} does not fit: world size {world_size} / ({product}) gives dp={dp}"
            )
        return replace(self, dp=dp)

    @property
    def world_size(self) -> int:
        """Number of ranks. The layout must be resolved."""
        return self.tp * self.cp * self._dp * self.pp

    @property
    def pool(self) -> int:
        """Number of data- and context-parallel ranks together, `dp * cp`."""
        return self._dp * self.cp

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel degree inside experts. Defaults to `tp`."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        """Number of copies of every expert."""
        return self._expert().size("dp")

    @property
    def has_expert_parallelism(self) -> bool:
        """Whether the layout of experts differs from that of the dense layers."""
        return self.ep > 1 or self.expert_tp != self.tp

    @property
    def _dp(self) -> int:
        if self.dp is None:
            raise LayoutError("dp is not set: call resolve(world_size) first")
        return self.dp

    @property
    def _names(self) -> tuple[str, ...]:
        named = self.order.split("-")
        return (*named, *(name for name in AXES if name not in named))

    def _dense(self) -> Grid:
        sizes = {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self._dp, "pp": self.pp}
        return Grid(self._names, tuple(sizes[name] for name in self._names))

    def _expert(self) -> Grid:
        experts = self.expert_tp * self.ep * self.pp
        product = f"etp {self.expert_tp} x ep {self.ep} x pp {self.pp} = {experts}"
        if self.world_size % experts:
            raise LayoutError(
                f"world size {self.world_size} is not a multiple of {product}: "
                f"use {nearest_multiples(self.world_size, experts)} ranks or change a degree"
            )
        sizes = {"tp": self.expert_tp, "cp": 1, "ep": self.ep, "pp": self.pp}
        sizes["dp"] = self.world_size // experts
        grid = Grid(self._names, tuple(sizes[name] for name in self._names))
        strides = self._dense().strides["pp"], grid.strides["pp"]
        if self.pp > 1 and strides[0] != strides[1]:
            raise LayoutError(
                f"order={self.order!r} puts pipeline ranks {strides[0]} ranks apart for dense "
                f"layers but {strides[1]} apart for experts ({product}): put pp last"
            )
        return grid

    # -- groups --------------------------------------------------------------------------------

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of all groups of this layout, in the order in which a mesh creates them.

        `cp_inner` and `cp_outer` need `hierarchical_cp`, `dp_cp_inner` and `dp_cp_outer` need
        several instances (`dp_outer`), `hybrid_cp_1`, `hybrid_cp_2`, `hybrid_cp_4` and so on need
        `hybrid_cp`. If `order` would place experts in other pipeline groups than the dense layers,
        there are no expert groups. With expert parallelism this raises `LayoutError`.
        """
        absent = {"nested cp"} if self.hierarchical_cp is None else set()
        if self.dp_outer == 1:
            absent.add("nested dp")
        try:
            self._expert()
        except LayoutError:
            absent.add("expert")
        names = [name for name, kind in GROUPS.items() if kind.grid not in absent]
        if self.hybrid_cp:
            names += [pool_group_name(1 << power) for power in range(self.pool.bit_length())]
        return tuple(names)

    def groups(self, name: str) -> list[tuple[int, ...]]:
        """Returns all groups of one name, each a tuple of ascending ranks.

        Each rank is in exactly one of them, except for `embedding`, `position_embedding` and the
        groups of a model (`Mesh.add_stage_group`), which contain only the pipeline ranks that hold
        these parameters.

        Raises:
            LayoutError: The layout has no group of that name.
        """
        kind = group_kind(name)
        if kind.grid == "stages":
            return [self._holders(ranks, kind.axes) for ranks in self._dense().groups(("pp",))]
        if kind.grid in NESTED:
            wholes = self._dense().groups(NESTED[kind.grid])
            return [part for ranks in wholes for part in self._nested(kind, ranks)]
        return self._grid(kind.grid).groups(kind.axes)

    def group_of(self, name: str, rank: int) -> tuple[int, ...]:
        """Returns the group of that name that contains `rank`; `()` if there is none."""
        self._check_rank(rank)
        kind = group_kind(name)
        if kind.grid == "stages":
            holders = self._holders(self._dense().group_of(("pp",), rank), kind.axes)
            return holders if rank in holders else ()
        if kind.grid in NESTED:
            whole = self._dense().group_of(NESTED[kind.grid], rank)
            return next(part for part in self._nested(kind, whole) if rank in part)
        return self._grid(kind.grid).group_of(kind.axes, rank)

    def coordinates(self, rank: int) -> Coordinates:
        """Returns the coordinates of `rank` on the dense grid."""
        self._check_rank(rank)
        grid = self._dense()
        return Coordinates(*(grid.coordinate(name, rank) for name in Coordinates._fields))

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        """Returns the coordinates of `rank` on the expert grid."""
        self._check_rank(rank)
        grid = self._expert()
        names = ExpertCoordinates._fields
        return ExpertCoordinates(*(grid.coordinate(name, rank) for name in names))

    def ranks_of_pipeline_rank(self, index: int) -> tuple[int, ...]:
        """Returns the ranks with coordinate `index` on the axis `pp`, ascending."""
        if not 0 <= index < self.pp:
            raise LayoutError(f"pipeline rank {index} does not exist: pp={self.pp}")
        offset = index * self._dense().strides["pp"]
        return tuple(rank + offset for rank in self._dense().group_of(("tp", "cp", "dp"), 0))

    def stages(self, index: int) -> tuple[int, ...]:
        """Returns the stages of pipeline rank `index`, one for each of its model chunks."""
        return stages_of(self.stage_mapping, self.pp, self.vpp, index)

    def pipeline_rank_of(self, stage: int) -> int:
        """Returns the pipeline rank that holds a stage."""
        if not 0 <= stage < self.pp * self.vpp:
            raise LayoutError(f"stage {stage} does not exist: there are {self.pp} x {self.vpp}")
        index = stage % self.pp
        return self.pp - 1 - index if self.stage_mapping == "v" and stage >= self.pp else index

    def _grid(self, kind: str) -> Grid:
        return self._expert() if kind == "expert" else self._dense()

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside a world of {self.world_size} ranks")

    def _nested(self, kind: GroupKind, whole: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Splits one group into the smaller groups of a kind."""
        if kind.grid == "pool":
            inner = kind.size
            if not self.hybrid_cp or inner > self.pool:
                raise LayoutError(
                    f"there is no pool group of {inner} ranks: "
                    + (f"the pool has {self.pool} ranks" if self.hybrid_cp else "set hybrid_cp")
                )
        elif kind.grid == "nested dp":
            inner = len(whole) // self.dp_outer
        elif self.hierarchical_cp is not None:
            inner = self.hierarchical_cp[0]
        else:
            raise LayoutError(
                f"there is no 'cp_{kind.axes[0]}' group: set hierarchical_cp to two sizes"
            )
        parts = [whole[i : i + inner] for i in range(0, len(whole), inner)]
        return list(zip(*parts, strict=True)) if kind.axes == ("outer",) else parts

    def _holders(self, pipeline: tuple[int, ...], which: tuple[str, ...]) -> tuple[int, ...]:
        last = self.pipeline_rank_of(self.pp * self.vpp - 1)
        ends = {"first": 0, "last": last}
        numbers = [ends[name] if name in ends else int(name) for name in which]
        if max(numbers) >= self.pp:
            raise LayoutError(f"pipeline rank {max(numbers)} does not exist: pp={self.pp}")
        return tuple(dict.fromkeys(pipeline[number] for number in numbers))

    # -- text ----------------------------------------------------------------------------------

    def __str__(self) -> str:
        degrees = [f"tp {self.tp}", f"cp {self.cp}", f"dp {self.dp or '?'}", f"pp {self.pp}"]
        text = " x ".join(degrees)
        if self.has_expert_parallelism:
            text += f", experts etp {self.expert_tp} x ep {self.ep}"
        if self.hierarchical_cp is not None:
            text += ", cp {} inside x {} outside".format(*self.hierarchical_cp)
        if self.hybrid_cp:
            text += ", hybrid cp"
        if self.dp_outer > 1:
            text += f", {self.dp_outer} instances"
        if self.vpp > 1:
            text += f", {self.vpp} chunks per pipeline rank"
        if self.stage_mapping == "v":
            text += " in a V"
        return f"{text}, order {self.order}"


def _two_sizes(cp: int) -> str:
    """Returns two sizes of context parallelism with a product, for an error."""
    inner = next((size for size in range(2, cp) if cp % size == 0), 1)
    return f"{inner} {cp // inner}"
