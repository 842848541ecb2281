"""A mesh without processes, devices or torch: the coordinates of one rank of a layout."""

from dataclasses import dataclass

from megatron_parallel.mesh.group_names import canonical_group_name, group_kind
from megatron_parallel.mesh.layout import ParallelLayout


@dataclass(frozen=True)
class AbstractAxis:
    """Size of an axis and the rank's coordinate on it."""

    size: int
    index: int


@dataclass(frozen=True)
class AbstractMesh:
    """Rank `rank` of a resolved layout, for planning without processes or devices.

    A `Sharding` accepts it in place of a `Mesh`: `sharding.local_shape(AbstractMesh(layout, rank))`
    is the shape that the rank will hold, so the memory of a thousand ranks can be computed on a
    laptop.

        >>> AbstractMesh(ParallelLayout(tp=2, pp=2, dp=4), rank=5).axis("tp")
        AbstractAxis(size=2, index=1)
    """

    layout: ParallelLayout
    rank: int = 0

    def axis(self, name: str) -> AbstractAxis:
        """Returns the rank's axis of that name.

        Raises:
            LayoutError: The layout has no group of that name.
        """
        members = self.layout.group_of(canonical_group_name(name), self.rank)
        return AbstractAxis(len(members), members.index(self.rank) if members else 0)

    def has_axis(self, name: str) -> bool:
        """Returns whether the rank is in a group of that name."""
        canonical = canonical_group_name(name)
        known = canonical in self.layout.group_names or group_kind(canonical).grid == "stages"
        return known and bool(self.layout.group_of(canonical, self.rank))
