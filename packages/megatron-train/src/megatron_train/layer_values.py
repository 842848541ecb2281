"""Values that layers report of a step, combined over the ranks."""

from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Float64
from megatron_parallel import Mesh
from megatron_parallel.collectives import all_reduce
from torch import Tensor


def over_all_ranks(
    mesh: Mesh,
    held: Mapping[str, Float64[Tensor, " values"] | None],
    sizes: Mapping[str, int],
    op: Literal["sum", "max"],
) -> dict[str, Float64[Tensor, " values"]]:
    """Returns the sum or the maximum of each value over all ranks, with one collective.

    Args:
        mesh: The mesh.
        held: What this rank has, by name. None, as for layers of other stages, changes no result.
        sizes: Numbers of values by name, equal on all ranks.
        op: How the values of ranks are combined.
    """
    if not sizes:
        return {}
    neutral = 0.0 if op == "sum" else -torch.inf
    filler = torch.full((1,), neutral, dtype=torch.float64, device=mesh.device)
    own = [
        filler.expand(size) if (values := held[name]) is None else values
        for name, size in sizes.items()
    ]
    combined = torch.cat(own)
    all_reduce(combined, mesh.axis("world"), op=op, purpose="values of layers")
    return dict(zip(sizes, torch.split(combined, [*sizes.values()]), strict=True))
