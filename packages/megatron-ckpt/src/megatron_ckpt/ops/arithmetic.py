"""Operations on the values of tensors: constants, block scales and copies."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ckpt.ops.op import ManyToOne, OneToOne, ReadBox, Shape, covering_blocks
from megatron_ckpt.views import Box


@dataclass(frozen=True)
class AddConstant(OneToOne):
    """Adds ``value`` to each element.

    Gemma, for example, stores a gain as its difference from 1; ours is 1 + theirs. The dtype does
    not change. Sums are rounded once in each direction, so a round trip may differ by the rounding
    of the sum.
    """

    value: float

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Adds the value."""
        return [(tensor.double() + self.value).to(tensor.dtype) for tensor in tensors]

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Subtracts the value."""
        return [(tensor.double() - self.value).to(tensor.dtype) for tensor in tensors]

    def read_box(self, index: int, box: Box, shapes: Sequence[Shape], get: ReadBox) -> Tensor:
        """Reads the same box."""
        return self.forward([get(index, box)])[0]


@dataclass(frozen=True)
class BlockScale(ManyToOne):
    """Multiplies a matrix by one scale for each block of its elements.

    Theirs are the matrix ``[m, n]``, for example in float8, and its scales ``[ceil(m / rows),
    ceil(n / columns)]``. The product has the dtype of the scales. There is no inverse, because the
    product does not determine the scales.
    """

    rows: int
    columns: int

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Multiplies the matrix by its scales."""
        self._check([tuple(tensor.shape) for tensor in tensors])
        return [self._product(tensors[0], tensors[1], 0, 0)]

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Raises ValueError, since the operation has no inverse."""
        raise ValueError("block_scale has no inverse; export in another format")

    def read_box(self, index: int, box: Box, shapes: Sequence[Shape], get: ReadBox) -> Tensor:
        """Reads the box and the scales of the blocks that it overlaps."""
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
            raise ValueError("block_scale needs a matrix and its scales")
        (m, n), scales = shapes
        wanted = (-(-m // self.rows), -(-n // self.columns))
        if scales != wanted:
            raise ValueError(f"scales have shape {scales}, expected {wanted}")


@dataclass(frozen=True)
class Tie:
    """Maps equal copies to one tensor, or one tensor to ``copies`` equal ones of ours.

    Tensors that become one must be equal.
    """

    copies: int | None = None

    def num_outputs(self, count: int) -> int:
        """Returns the number of our tensors."""
        return self.copies or 1

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensor, once or ``copies`` times."""
        return [_one(tensors)] * (self.copies or 1)

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Returns the tensor ``count`` times."""
        return [_one(tensors)] * count

    def read_box(self, index: int, box: Box, shapes: Sequence[Shape], get: ReadBox) -> Tensor:
        """Reads the box of each copy and checks that they are equal."""
        return _one([get(i, box) for i in range(len(shapes))])


def _one(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    for other in tensors[1:]:
        same = other.shape == first.shape and other.dtype == first.dtype
        if not same or not (first.is_meta or torch.equal(first, other)):
            raise ValueError("tied tensors differ")
    return first
