"""The protocol of operations, and functions on boxes that several operations share."""

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from megatron_ckpt.views import Box

Shape: TypeAlias = tuple[int, ...]

ReadBox: TypeAlias = Callable[[int, Box], Tensor]
"""Returns a box of the input with the given index."""


class Op(Protocol):
    """An operation of a row with its arguments; it converts their tensors to ours."""

    def num_outputs(self, count: int) -> int:
        """Returns the number of tensors that ``count`` input tensors become."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Converts their tensors to ours."""

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Converts our tensors to ``count`` tensors of theirs.

        Raises:
            ValueError: The shapes do not fit, or the operation has no inverse.
        """

    def read_box(self, index: int, box: Box, shapes: Sequence[Shape], get: ReadBox) -> Tensor:
        """Returns a box of an output of `forward`, computed from the boxes of theirs that it needs.

        Args:
            index: The index of the output.
            box: The box of that output.
            shapes: The shapes of the inputs.
            get: Called with the index of an input and the box of it that is needed.
        """


class OneToOne:
    """A mix-in for operations that return as many tensors as they take."""

    def num_outputs(self, count: int) -> int:
        """Returns ``count``."""
        return count


class ManyToOne:
    """A mix-in for operations that return one tensor."""

    def num_outputs(self, count: int) -> int:
        """Returns 1."""
        return 1


def with_span(box: Box, dim: int, start: int, stop: int) -> Box:
    """Returns ``box`` with the range from ``start`` to ``stop`` along ``dim``."""
    offsets, lengths = list(box.offsets), list(box.lengths)
    offsets[dim], lengths[dim] = start, stop - start
    return Box(tuple(offsets), tuple(lengths))


def span_of(box: Box, dim: int) -> tuple[int, int]:
    """Returns the start and end of a box along ``dim``."""
    return box.offsets[dim], box.ends[dim]


def split_dim(tensor: Tensor, dim: int, blocks: int) -> Tensor:
    """Returns a tensor with ``dim`` split in two: ``blocks`` and the size of a block."""
    shape = tuple(tensor.shape)
    return tensor.reshape(*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :])


def covering_blocks(start: int, stop: int, size: int) -> tuple[int, int]:
    """Returns the first block of ``size`` that a range overlaps, and the first after the range."""
    return start // size, -(-stop // size)


def read_reshaped_box(box: Box, old: Shape, new: Shape, get: Callable[[Box], Tensor]) -> Tensor:
    """Returns a box of a tensor of shape ``old`` that is reshaped to ``new``.

    Along dims that both shapes have at the end, only the box is read. Before these, all rows of the
    first dim that hold an element of the box are read.
    """
    if not box.numel:
        return get(Box((0,) * len(old), (0,) * len(old))).reshape(box.lengths)
    tail = 0
    while tail < min(len(old), len(new)) - 1 and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    front, ours = len(old) - tail, len(new) - tail
    flat = torch.zeros((), dtype=torch.int64)
    for offset, length, extent in zip(box.offsets[:ours], box.lengths[:ours], new, strict=False):
        flat = flat.unsqueeze(-1) * extent + torch.arange(offset, offset + length)
    inner = math.prod(old[1:front])
    rows = covering_blocks(int(flat.min()), int(flat.max()) + 1, inner) if front else (0, 0)
    wanted = Box(
        (rows[0], *(0,) * (front - 1), *box.offsets[ours:]) if front else box.offsets[ours:],
        (rows[1] - rows[0], *old[1:front], *box.lengths[ours:]) if front else box.lengths[ours:],
    )
    held = get(wanted).reshape(-1, *box.lengths[ours:])
    return held[(flat - rows[0] * inner).flatten()].reshape(box.lengths)
