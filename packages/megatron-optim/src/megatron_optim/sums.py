"""Sums over rows, columns and whole matrices of parameters that ranks share.

A parameter is one matrix, or a matrix for each expert and each fused weight (gate and up). Rows are
all dims but the last. Tensors of sums have the dims of the rank's tensor, of size 1 where they are
summed, so that they broadcast with it: `slice_of` returns the part that belongs to a box.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import Any, Literal

import torch
from jaxtyping import Float
from megatron_parallel import Axis, Mesh, Sharding, all_reduce
from megatron_parallel.sharding import Box, Region
from torch import Tensor

PURPOSE = "sums of optimizer state"
"""Purpose of the messages, as reported in `Traffic`."""

Over = Literal["columns", "rows", "all"]
"""The dims that are summed: the last one, all others, or both; never those that enumerate."""


class Sums:
    """The parameters of a group, for sums over all ranks that share them.

    Args:
        names: The parameters of the group, equal on all ranks that share them.
        table: The sharding of every parameter.
        mesh: The mesh of the model.
        regions: The part of each parameter that this rank updates. Parameters without an entry are
            updated by every rank.
        dtype: The dtype of main parameters.

    Attributes:
        names: The parameters, sorted.
        local_names: Those of which this rank updates a part.
        table: Their sharding.
        mesh: The mesh of the model.
        dtype: The dtype of main parameters.
    """

    def __init__(
        self,
        names: Iterable[str],
        table: Mapping[str, Sharding],
        mesh: Mesh,
        regions: Mapping[str, Region],
        dtype: torch.dtype,
    ) -> None:
        self.names = tuple(sorted(names))
        self.table = {name: table[name] for name in self.names}
        self.mesh, self.dtype = mesh, dtype
        self._shapes = {name: table[name].local_shape(mesh) for name in self.names}
        self._regions = {
            name: regions.get(name) or Region(None, (_whole(self._shapes[name]),))
            for name in self.names
        }
        self.local_names = tuple(name for name in self.names if self._regions[name].boxes)

    def pieces(
        self, shards: Sequence[Float[Tensor, "..."]]
    ) -> list[tuple[str, Float[Tensor, "..."], Box]]:
        """Returns name, tensor and box of each piece of shards in the order of `local_names`."""
        return [
            (name, piece, box)
            for name, shard in zip(self.local_names, shards, strict=True)
            for piece, box in self._regions[name].pieces(shard)
        ]

    def shape(self, name: str, over: Over) -> tuple[int, ...]:
        """Returns the shape of a sum of a parameter on this rank."""
        summed = summed_dims(self.table[name], over)
        return tuple(1 if d in summed else n for d, n in enumerate(self._shapes[name]))

    def zeros(self, over: Over) -> dict[str, Float[Tensor, "..."]]:
        """Returns a sum of each parameter that is 0."""
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.mesh.device}
        return {name: torch.zeros(self.shape(name, over), **options) for name in self.names}

    def count(self, name: str, over: Over) -> int:
        """Returns how many elements of the global parameter a sum has."""
        return prod(self.table[name].shape[d] for d in summed_dims(self.table[name], over))

    def total(
        self, pieces: Iterable[tuple[str, Float[Tensor, "..."], Box]], over: Over
    ) -> dict[str, Float[Tensor, "..."]]:
        """Returns the sum of the squares of all pieces on all ranks."""
        found = self.zeros(over)
        for name, piece, box in pieces:
            dims = summed_dims(self.table[name], over)
            square = piece.square().sum(dims, keepdim=True) if dims else piece.square()
            slice_of(found[name], box).add_(square)
        self._reduce(found, {name: self._regions[name].axis for name in self.names})
        return self.total_over_tensor_ranks(found, over)

    def total_over_tensor_ranks(
        self, sums: Mapping[str, Float[Tensor, "..."]], over: Over
    ) -> dict[str, Float[Tensor, "..."]]:
        """Adds sums over the dims that tensor-parallel ranks cut, in place; returns them."""
        axes: dict[str, Axis] = {}
        for name, cut in self.table.items():
            # Ranks that share an entry of `dim` cut `spill_dim`, which is a dim of rows as well.
            if cut.axis is not None and cut.dim in summed_dims(cut, over):
                axes[name] = self.mesh.axis(cut.axis)
        self._reduce(sums, axes)
        return dict(sums)

    def _reduce(self, tensors: Mapping[str, Tensor], axes: Mapping[str, Axis | None]) -> None:
        """Sums tensors in place, with one all-reduce for each axis."""
        over = [(axis, name) for name, axis in axes.items() if axis is not None and axis.size > 1]
        over.sort(key=lambda pair: (pair[0].name, pair[1]))
        for _, group in groupby(over, lambda pair: pair[0].name):
            chosen = list(group)
            flat = torch.cat([tensors[name].reshape(-1) for _, name in chosen])
            all_reduce(flat, chosen[0][0], purpose=PURPOSE)
            parts = torch.split(flat, [tensors[name].numel() for _, name in chosen])
            for (_, name), part in zip(chosen, parts, strict=True):
                tensors[name].copy_(part.view(tensors[name].shape))


def summed_dims(sharding: Sharding, over: Over) -> tuple[int, ...]:
    """Returns the dims of a parameter that are summed."""
    last = len(sharding.shape) - 1
    dims = [d for d in range(sharding.experts, last + 1) if d != sharding.fused_dim]
    wanted = {"columns": [last], "rows": [d for d in dims if d != last], "all": dims}[over]
    return tuple(d for d in wanted if d in dims)


def summed_sharding(sharding: Sharding, over: Over) -> Sharding:
    """Returns the sharding of a sum, without the dims that are summed."""
    summed = summed_dims(sharding, over)
    dims = [d for d in range(len(sharding.shape)) if d not in summed]

    def moved(dim: int | None) -> int | None:
        return dims.index(dim) if dim in dims else None

    dim = moved(sharding.dim)
    return replace(
        sharding,
        shape=tuple(sharding.shape[d] for d in dims),
        axis=None if dim is None else sharding.axis,
        dim=dim,
        padded=None if dim is None else sharding.padded,
        spill_dim=None if dim is None else moved(sharding.spill_dim),
        fused_dim=moved(sharding.fused_dim),
        fused_sizes=(),
        matrix=None,
        weight_decay=False,
        vector=True,
        partial=None,
    )


def slice_of(sums: Float[Tensor, "..."], box: Box) -> Float[Tensor, "..."]:
    """Returns the part of a tensor of sums that broadcasts with a box."""
    pairs = zip(sums.shape, box.slices, strict=True)
    return sums[tuple(slice(0, 1) if size == 1 else part for size, part in pairs)]


def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)
