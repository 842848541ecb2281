"""A rank's place in a layout, in pure Python: what a mesh knows, without processes or torch."""

from dataclasses import dataclass

from megatron_parallel.group_names import canonical_group_name
from megatron_parallel.layout import ParallelLayout


@dataclass(frozen=True)
class SeatAxis:
    """Size of an axis, and this rank's index on it."""

    size: int
    index: int


@dataclass(frozen=True)
class Seat:
    """Rank `rank` of a resolved layout, as `Sharding` asks for it.

    `sharding.local_shape(Seat(layout, rank))` is what that rank will hold, so that the memory of a
    thousand ranks is counted on a laptop.

        >>> Seat(ParallelLayout(tp=2, pp=2, dp=4), rank=5).axis("tp")
        SeatAxis(size=2, index=1)
    """

    layout: ParallelLayout
    rank: int = 0

    def axis(self, name: str) -> SeatAxis:
        """The place on the axis of that name; raises `LayoutError` if the layout has none."""
        members = self.layout.group_of(canonical_group_name(name), self.rank)
        return SeatAxis(len(members), members.index(self.rank) if members else 0)

    def has_axis(self, name: str) -> bool:
        """Returns whether the rank is on an axis of that name."""
        canonical = canonical_group_name(name)
        return canonical in self.layout.group_names and bool(
            self.layout.group_of(canonical, self.rank)
        )
