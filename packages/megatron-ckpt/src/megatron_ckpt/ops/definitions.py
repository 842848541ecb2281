"""The closed list of operations. Each works from their tensors to ours and back, without loss.

An operation takes the tensors that stand at its place in a row and gives those for the next place:
one for one (`Transpose`, `Reshape`, `RopePermute`, `SliceRows`), or several to one (`Concat`,
`Stack`, `InterleaveQKV`). The inverse is told how many there were.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Protocol

import torch
from torch import Tensor


class Op(Protocol):
    """An operation with its arguments."""

    joins: ClassVar[bool]
    """Whether several tensors become one."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Their tensors in, ours out."""

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Our tensors in, ``count`` of theirs out."""


@dataclass(frozen=True)
class Transpose:
    """Swaps the dimensions of matrices: ``[m, n]`` to ``[n, m]``."""

    joins: ClassVar[bool] = False

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Transpose each."""
        return [_of_rank(tensor, 2).t() for tensor in tensors]

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Transpose each back."""
        return self.forward(tensors)


@dataclass(frozen=True)
class Concat:
    """Joins tensors along ``dim``, one behind the other.

    ``sizes`` are their extents along it; equal ones need not be given.
    """

    dim: int
    sizes: tuple[int, ...] | None = None
    joins: ClassVar[bool] = True

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Concatenate."""
        extents = [tensor.shape[self.dim] for tensor in tensors]
        expected = list(self.sizes or extents[:1] * len(extents))
        if extents != expected:
            raise ValueError(f"extents along dim {self.dim} are {extents}, sizes say {expected}")
        return [torch.cat(list(tensors), self.dim)]

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Split."""
        extent = tensors[0].shape[self.dim]
        if self.sizes is None and extent % count:
            raise ValueError(f"extent {extent} along dim {self.dim} is not {count} equal parts")
        sizes = list(self.sizes or [extent // count] * count)
        if len(sizes) != count or sum(sizes) != extent:
            raise ValueError(f"sizes {sizes} do not split {extent} into {count} parts")
        return list(torch.split(tensors[0], sizes, self.dim))


@dataclass(frozen=True)
class Reshape:
    """Gives ``shape`` to a tensor that has shape ``source``; one entry of each may be -1."""

    shape: tuple[int, ...]
    source: tuple[int, ...]
    joins: ClassVar[bool] = False

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Reshape each to ``shape``."""
        return [_reshape(tensor, self.source, self.shape) for tensor in tensors]

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Reshape each to ``source``."""
        return [_reshape(tensor, self.shape, self.source) for tensor in tensors]


@dataclass(frozen=True)
class Stack:
    """Joins tensors of one shape along a new ``dim``: gate and up to ``[2, f, h]``."""

    dim: int
    joins: ClassVar[bool] = True

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Stack."""
        return [torch.stack(list(tensors), self.dim)]

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Unstack."""
        if tensors[0].shape[self.dim] != count:
            raise ValueError(f"extent along dim {self.dim} is not {count}")
        return list(tensors[0].unbind(self.dim))


@dataclass(frozen=True)
class InterleaveQKV:
    """Queries, keys and values to one tensor ordered by query group.

    Theirs is one tensor ``[q; k; v]`` of ``(heads + 2 groups) * head_dim`` rows, or the three;
    ours is ``[groups, (heads / groups + 2) * head_dim, ...]``, by group: query heads, key,
    value. Whoever gets whole groups has heads that belong together.
    """

    heads: int
    groups: int
    head_dim: int
    joins: ClassVar[bool] = True

    @property
    def _rows(self) -> list[int]:
        return [self.heads * self.head_dim, *[self.groups * self.head_dim] * 2]

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Interleave."""
        parts = list(tensors)
        if len(parts) == 1 and len(parts[0]) == sum(self._rows):
            parts = list(torch.split(parts[0], self._rows))
        if [len(part) for part in parts] != self._rows:
            raise ValueError(f"rows are {[len(part) for part in parts]}, expected {self._rows}")
        return [torch.cat([p.reshape(self.groups, -1, *p.shape[1:]) for p in parts], 1)]

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Take apart; ``count`` 1 gives ``[q; k; v]``, 3 gives the three."""
        each = [self.heads // self.groups * self.head_dim, self.head_dim, self.head_dim]
        (tensor,) = tensors
        if tuple(tensor.shape[:2]) != (self.groups, sum(each)):
            raise ValueError(f"shape is {tuple(tensor.shape)}, expected {self.groups, sum(each)}")
        parts = [part.flatten(0, 1) for part in torch.split(tensor, each, 1)]
        return [torch.cat(parts)] if count == 1 else parts


@dataclass(frozen=True)
class RopePermute:
    """Rows of each head from neighbouring rotary pairs (Meta, GGUF) to two halves (ours).

    Row ``2 j + k`` of a head goes to row ``k * head_dim / 2 + j``. ``only`` names the one tensor it
    is for where a row has several (queries and keys differ in their heads, values stay).
    """

    heads: int
    head_dim: int
    only: int | None = None
    joins: ClassVar[bool] = False

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Pairs to halves."""
        return self._permute(tensors, (self.heads, self.head_dim // 2, 2))

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Halves to pairs."""
        return self._permute(tensors, (self.heads, 2, self.head_dim // 2))

    def _permute(self, tensors: Sequence[Tensor], shape: tuple[int, int, int]) -> list[Tensor]:
        def one(tensor: Tensor) -> Tensor:
            rows = self.heads * self.head_dim
            if self.head_dim % 2 or tensor.ndim < 1 or len(tensor) != rows:
                raise ValueError(
                    f"shape is {tuple(tensor.shape)}, expected {rows} rows, even heads"
                )
            return tensor.reshape(*shape, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

        chosen = range(len(tensors)) if self.only is None else (self.only,)
        if max(chosen) >= len(tensors):
            raise ValueError(f"only={self.only}, but there are {len(tensors)} tensors")
        return [one(tensor) if i in chosen else tensor for i, tensor in enumerate(tensors)]


@dataclass(frozen=True)
class SliceRows:
    """Drops rows behind the first ``rows``: padding of a foreign vocabulary.

    Padding carries nothing, so the inverse gives the tensor without it.
    """

    rows: int
    joins: ClassVar[bool] = False

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Slice each."""
        for tensor in tensors:
            if tensor.ndim < 1 or len(tensor) < self.rows:
                raise ValueError(f"shape is {tuple(tensor.shape)}, expected {self.rows} rows")
        return [tensor[: self.rows] for tensor in tensors]

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Give back as they are."""
        return self.forward(tensors)


OPS: Mapping[str, type[Op]] = MappingProxyType(
    {
        "transpose": Transpose,
        "concat": Concat,
        "reshape": Reshape,
        "stack": Stack,
        "interleave_qkv": InterleaveQKV,
        "rope_permute": RopePermute,
        "slice_rows": SliceRows,
    }
)


def _of_rank(tensor: Tensor, ndim: int) -> Tensor:
    if tensor.ndim != ndim:
        raise ValueError(f"shape is {tuple(tensor.shape)}, expected {ndim} dimensions")
    return tensor


def _reshape(tensor: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor:
    fits = len(old) == tensor.ndim and all(
        wanted in (-1, extent) for wanted, extent in zip(old, tensor.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"shape is {tuple(tensor.shape)}, expected {tuple(old)}")
    return tensor.reshape(*new)
