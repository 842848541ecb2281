"""Operations that split a tensor into segments or blocks, and that interleave tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ckpt.ops.op import (
    ManyToOne,
    ReadBox,
    Shape,
    covering_blocks,
    span_of,
    split_dim,
    with_span,
)
from megatron_ckpt.views import Box


@dataclass(frozen=True)
class Segments:
    """Splits a tensor along ``dim`` into consecutive segments of ``sizes``."""

    dim: int
    sizes: tuple[int, ...]

    def num_outputs(self, count: int) -> int:
        """Returns the number of segments."""
        return len(self.sizes)

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Splits the tensor."""
        (tensor,) = tensors
        if tensor.shape[self.dim] != sum(self.sizes):
            raise ValueError(f"size {tensor.shape[self.dim]} is not the sum of {self.sizes}")
        return list(torch.split(tensor, list(self.sizes), self.dim))

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Concatenates the segments."""
        extents = tuple(tensor.shape[self.dim] for tensor in tensors)
        if extents != self.sizes:
            raise ValueError(f"sizes along dim {self.dim} are {extents}, expected {self.sizes}")
        return [torch.cat(list(tensors), self.dim)]

    def read_box(self, index: int, box: Box, shapes: Sequence[Shape], get: ReadBox) -> Tensor:
        """Reads the box, offset by the segments before it."""
        start, stop = span_of(box, self.dim)
        before = sum(self.sizes[:index])
        return get(0, with_span(box, self.dim, before + start, before + stop))


@dataclass(frozen=True)
class Interleave(ManyToOne):
    """Interleaves the blocks of tensors along ``dim``.

    The result has the first block of each tensor, then the second block of each, and so on. Each
    tensor has ``blocks`` blocks. ``sizes`` are the sizes of a block of each tensor; defaults to
    equal sizes. Gate and up projections with alternating rows are two tensors with as many blocks
    as rows.
    """

    dim: int
    blocks: int
    sizes: tuple[int, ...] | None = None

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Interleaves the tensors."""
        self._sizes([tuple(tensor.shape) for tensor in tensors])
        parts = [split_dim(tensor, self.dim, self.blocks) for tensor in tensors]
        return [torch.cat(parts, self.dim + 1).flatten(self.dim, self.dim + 1)]

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Splits the tensor."""
        (tensor,) = tensors
        extent = tensor.shape[self.dim]
        sizes = list(self.sizes or [extent // (self.blocks * count)] * count)
        if len(sizes) != count or sum(sizes) * self.blocks != extent:
            raise ValueError(
                f"size {extent} along dim {self.dim} is not {self.blocks} blocks of {sizes}"
            )
        parts = torch.split(split_dim(tensor, self.dim, self.blocks), sizes, self.dim + 1)
        return [part.flatten(self.dim, self.dim + 1) for part in parts]

    def read_box(self, index: int, box: Box, shapes: Sequence[Shape], get: ReadBox) -> Tensor:
        """Reads the blocks of each tensor that the box overlaps."""
        sizes = self._sizes(shapes)
        start, stop = span_of(box, self.dim)
        first, last = covering_blocks(start, stop, sum(sizes))
        held = [
            get(i, with_span(box, self.dim, first * size, last * size))
            for i, size in enumerate(sizes)
        ]
        joined = Interleave(self.dim, last - first, tuple(sizes)).forward(held)[0]
        return joined.narrow(self.dim, start - first * sum(sizes), stop - start)

    def _sizes(self, shapes: Sequence[Shape]) -> list[int]:
        extents = [shape[self.dim] for shape in shapes]
        sizes = list(self.sizes or [extents[0] // self.blocks] * len(extents))
        if [size * self.blocks for size in sizes] != extents:
            raise ValueError(
                f"sizes along dim {self.dim} are {extents}, not {self.blocks} blocks of {sizes}"
            )
        return sizes


@dataclass(frozen=True)
class Deinterleave:
    """Splits a tensor of interleaved blocks along ``dim``; the inverse of `Interleave`."""

    dim: int
    blocks: int
    sizes: tuple[int, ...]

    @property
    def _back(self) -> Interleave:
        return Interleave(self.dim, self.blocks, self.sizes)

    def num_outputs(self, count: int) -> int:
        """Returns the number of tensors."""
        return len(self.sizes)

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Splits the tensor."""
        return self._back.inverse(tensors, len(self.sizes))

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Interleaves the tensors."""
        return self._back.forward(tensors)

    def read_box(self, index: int, box: Box, shapes: Sequence[Shape], get: ReadBox) -> Tensor:
        """Reads the blocks that the box overlaps."""
        start, stop = span_of(box, self.dim)
        first, last = covering_blocks(start, stop, self.sizes[index])
        each = sum(self.sizes)
        held = get(0, with_span(box, self.dim, first * each, last * each))
        part = Deinterleave(self.dim, last - first, self.sizes).forward([held])[index]
        return part.narrow(self.dim, start - first * self.sizes[index], stop - start)
