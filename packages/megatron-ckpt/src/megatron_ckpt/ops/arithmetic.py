"""Operations on the numbers in tensors: constants, scales of blocks, and copies."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ckpt.ops.op import ManyToOne, OneToOne, ReadBox, Shape, covering_blocks
from megatron_ckpt.views import Box


@dataclass(frozen=True)
class AddConstant(OneToOne):
    """Adds ``value``: a gain that is stored as its distance from 1, as Gemma's, is 1 + theirs.

    The dtype stays. Sums are rounded to it once in each direction, so what comes back may differ by
    the rounding of the sum.
    """

    value: float

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Adds."""
        return [(tensor.double() + self.value).to(tensor.dtype) for tensor in tensors]

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Subtracts."""
        return [(tensor.double() - self.value).to(tensor.dtype) for tensor in tensors]

    def read_box(self, at: int, box: Box, shapes: Sequence[Shape], get: ReadBox) -> Tensor:
        """Reads the same box."""
        return self.forward([get(at, box)])[0]


@dataclass(frozen=True)
class BlockScale(ManyToOne):
    """Multiplies out a matrix that is stored as numbers and a scale for each block of them.

    Theirs are the matrix ``[m, n]``, in float8 for one, and its scales
    ``[ceil(m / rows), ceil(n / columns)]``, whose dtype the product has. It has no inverse: how
    scales are chosen is not said by their product.
    """

    rows: int
    columns: int

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Multiplies."""
        self._check([tuple(tensor.shape) for tensor in tensors])
        return [self._product(tensors[0], tensors[1], 0, 0)]

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Refuses."""
        raise ValueError("block_scale cannot be undone: export in another format")

    def read_box(self, at: int, box: Box, shapes: Sequence[Shape], get: ReadBox) -> Tensor:
        """Reads the box, and the scales of the blocks that it touches."""
        self._check(shapes)
        spans = [
            covering_blocks(offset, end, size)
            for offset, end, size in zip(
                box.offsets, box.ends, (self.rows, self.columns), strict=True
            )
        ]
        scales = Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
        skipped = (
            box.offsets[0] - spans[0][0] * self.rows,
            box.offsets[1] - spans[1][0] * self.columns,
        )
        return self._product(get(0, box), get(1, scales), *skipped)

    def _product(self, numbers: Tensor, scales: Tensor, down: int, right: int) -> Tensor:
        m, n = numbers.shape
        wide = scales.repeat_interleave(self.rows, 0).repeat_interleave(self.columns, 1)
        return numbers.to(scales.dtype) * wide[down : down + m, right : right + n]

    def _check(self, shapes: Sequence[Shape]) -> None:
        if len(shapes) != 2 or any(len(shape) != 2 for shape in shapes):
            raise ValueError("block_scale takes a matrix and its scales")
        (m, n), scales = shapes
        wanted = (-(-m // self.rows), -(-n // self.columns))
        if scales != wanted:
            raise ValueError(f"scales have shape {scales}, expected {wanted}")


@dataclass(frozen=True)
class Tie:
    """Copies of one tensor: several of theirs are one of ours, or one is ``copies`` of ours.

    In the direction in which copies become one they have to be equal.
    """

    copies: int | None = None

    def num_outputs(self, count: int) -> int:
        """Returns the number of ours."""
        return self.copies or 1

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies, or takes the one that all are."""
        return [_one(tensors)] * (self.copies or 1)

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Takes the one that all are, or copy."""
        return [_one(tensors)] * count

    def read_box(self, at: int, box: Box, shapes: Sequence[Shape], get: ReadBox) -> Tensor:
        """Reads the box of each copy."""
        return _one([get(i, box) for i in range(len(shapes))])


def _one(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    for other in tensors[1:]:
        same = other.shape == first.shape and other.dtype == first.dtype
        if not same or not (first.is_meta or torch.equal(first, other)):
            raise ValueError("tensors that are tied differ")
    return first
