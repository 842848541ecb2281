"""Which gradient is not a finite number, and which rank it came from: one line for all ranks."""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_parallel import _compat
from megatron_parallel.collective_failure import naming_failures
from megatron_parallel.errors import rank_list
from megatron_parallel.mesh import Mesh


class NotFinite(NamedTuple):
    """A gradient, summed over ranks, that is not finite.

    Attributes:
        where: Which bucket it lies in.
        parameter: Global name.
        nan: Whether it is NaN somewhere; otherwise infinite.
        own: Whether this rank's own share of the bucket was not finite; None if nobody looked.
    """

    where: str
    parameter: str
    nan: bool
    own: bool | None


def describe_not_finite(found: Sequence[NotFinite], mesh: Mesh) -> str:
    """Say which gradient is not finite, and by which ranks; empty if none is.

    Every rank of the mesh calls this and gets the same line, whatever it found itself.
    """
    world = mesh.axis("world")
    everybody: list[Sequence[NotFinite]] = [found]
    if world.size > 1:
        with naming_failures(world, "telling where a gradient is not finite"):
            everybody = _compat.gather_objects(list(found), world.bound)
    by_rank = zip(world.ranks, everybody, strict=True)
    told = [(item, rank) for rank, items in by_rank for item in items]
    if not told:
        return ""
    first = told[0][0]
    what = "NaN" if first.nan else "infinite"
    alike = [(item, rank) for item, rank in told if item[:2] == first[:2]]
    makers = sorted({rank for item, rank in alike if item.own})
    others = len({item.parameter for item, _ in told}) - 1
    line = f"the gradient of {first.parameter!r} ({first.where}) is {what}"
    if makers and world.size > 1:
        line += f", and so it was on {rank_list(makers)} before it was summed"
    return line + (f", and so are those of {others} more parameters" if others else "")
