"""Grids of ranks with named axes, in pure Python.

A `ParallelLayout` is two such grids. A `Grid` can be used directly where other axes are needed::

    >>> grid = Grid.of(patch=2, replica=3)
    >>> grid.groups(("patch",))
    [(0, 1), (2, 3), (4, 5)]
    >>> grid.groups(("replica",))
    [(0, 2, 4), (1, 3, 5)]

Nothing here imports torch.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from operator import mul

from megatron_parallel.errors import LayoutError


@dataclass(frozen=True)
class Grid:
    """A grid of consecutive ranks. The first axis varies fastest.

    Args:
        names: Names of the axes.
        sizes: Number of ranks along each axis.
        first_rank: Lowest rank of the grid.
        joint_axes: Sets of axes that form groups together, in addition to each axis alone and all
            axes together.

    Raises:
        LayoutError: A name is not an identifier or not unique, or a size is below 1.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    first_rank: int = 0
    joint_axes: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes):
            raise LayoutError(
                f"{len(self.names)} axis names were given for {len(self.sizes)} sizes"
            )
        for name in self.names:
            if not name.isidentifier():
                raise LayoutError(
                    f"axis {name!r} is not an identifier: use letters, digits and '_'"
                )
            if self.names.count(name) > 1:
                raise LayoutError(f"axis {name!r} is named twice")
        for name, size in zip(self.names, self.sizes, strict=True):
            if size < 1:
                raise LayoutError(f"{name}={size} is not a size: give a whole number >= 1")
        for axes in self.joint_axes:
            self._check(axes)
        if self.first_rank < 0:
            raise LayoutError(f"first_rank={self.first_rank} is not a rank")

    @classmethod
    def of(cls, **sizes: int) -> "Grid":
        """Returns a grid from rank 0 on, with axes from the fastest to the slowest varying."""
        return cls(tuple(sizes), tuple(sizes.values()))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.sizes)

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.first_rank, self.first_rank + self.world_size)

    @property
    def named_groups(self) -> dict[str, tuple[str, ...]]:
        """Axes of each group by its name: single axes, `joint_axes` joined by `_`, and `world`."""
        single = {name: (name,) for name in self.names}
        return single | {"_".join(axes): axes for axes in self.joint_axes} | {"world": self.names}

    @cached_property
    def strides(self) -> dict[str, int]:
        """Difference between ranks whose coordinates on an axis differ by one, by axis."""
        return dict(zip(self.names, accumulate((1, *self.sizes), mul), strict=False))

    def size(self, name: str) -> int:
        """Returns the number of ranks along an axis."""
        return self.sizes[self.names.index(name)]

    def coordinate(self, name: str, rank: int) -> int:
        """Returns the coordinate of a rank on an axis."""
        return (rank - self.first_rank) // self.strides[name] % self.size(name)

    def groups(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Returns the groups of ranks that differ only along `axes`, each ascending."""
        self._check(axes)
        offsets = self._span(axes)
        bases = self._span([name for name in self.names if name not in axes])
        return [tuple([self.first_rank + base + offset for offset in offsets]) for base in bases]

    def group_of(self, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
        """Returns the group along `axes` that contains `rank`."""
        self._check(axes)
        if rank not in self.ranks:
            raise LayoutError(f"rank {rank} is not on the grid {self}")
        base = rank - sum(self.coordinate(name, rank) * self.strides[name] for name in axes)
        return tuple(base + offset for offset in self._span(axes))

    def _span(self, axes: tuple[str, ...] | list[str]) -> list[int]:
        """Returns the offsets of all ranks whose coordinates outside `axes` are zero."""
        strides, chosen = self.strides, set(axes)
        ranks = [0]
        for name, size in zip(self.names, self.sizes, strict=True):
            if name in chosen:
                ranks = [rank + i * strides[name] for i in range(size) for rank in ranks]
        return ranks

    def _check(self, axes: tuple[str, ...]) -> None:
        for name in axes:
            if name not in self.names:
                raise LayoutError(f"no axis is called {name!r}: there are {', '.join(self.names)}")

    def __str__(self) -> str:
        text = " x ".join(
            f"{name} {size}" for name, size in zip(self.names, self.sizes, strict=True)
        )
        return f"{text} from rank {self.first_rank}" if self.first_rank else text
