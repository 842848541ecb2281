"""Reports which gradient is not finite and on which rank it arose, in one line for all ranks."""

import json
from collections.abc import Sequence
from typing import Final, NamedTuple

from megatron_parallel.collectives.packed import all_gather_texts
from megatron_parallel.errors import rank_list
from megatron_parallel.mesh.mesh import Mesh

_PURPOSE: Final = "where a gradient is not finite"


class NonFiniteGradient(NamedTuple):
    """A gradient, summed over ranks, that is not finite.

    Attributes:
        where: The bucket that it belongs to.
        parameter: Global name.
        nan: Whether an element is NaN; otherwise elements are infinite.
        own: Whether this rank's own gradients in the bucket were not finite; None if not checked.
    """

    where: str
    parameter: str
    nan: bool
    own: bool | None


def describe_nonfinite_gradients(found: Sequence[NonFiniteGradient], mesh: Mesh) -> str:
    """Describes which gradient is not finite, and on which ranks; empty if all are finite.

    Every rank of the mesh calls this with its own findings and gets the same line.
    """
    world = mesh.axis("world")
    texts = all_gather_texts(json.dumps(found), world, device=mesh.device, purpose=_PURPOSE)
    by_rank = zip(world.ranks, map(json.loads, texts), strict=True)
    items = [(NonFiniteGradient(*item), rank) for rank, each in by_rank for item in each]
    if not items:
        return ""
    first = items[0][0]
    what = "NaN" if first.nan else "infinite"
    alike = [(item, rank) for item, rank in items if item[:2] == first[:2]]
    makers = sorted({rank for item, rank in alike if item.own})
    others = len({item.parameter for item, _ in items}) - 1
    line = f"the gradient of {first.parameter!r} ({first.where}) is {what}"
    if makers and world.size > 1:
        line += f", and so it was on {rank_list(makers)} before it was summed"
    return line + (f", and so are those of {others} more parameters" if others else "")
