"""What an operation is, and parts of boxes that several operations need."""

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from megatron_ckpt.views import Box

Shape: TypeAlias = tuple[int, ...]

ReadBox: TypeAlias = Callable[[int, Box], Tensor]
"""Returns a box of the input with a number."""


class Op(Protocol):
    """An operation with its arguments, from the tensors of theirs at its place in a row to ours."""

    def num_outputs(self, count: int) -> int:
        """Returns how many tensors ``count`` become."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Their tensors in, ours out."""

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Our tensors in, ``count`` of theirs out.

        Raises:
            ValueError: shapes that do not fit, or an operation that cannot be undone.
        """

    def read_box(self, at: int, box: Box, shapes: Sequence[Shape], get: ReadBox) -> Tensor:
        """Returns a box of what `forward` gives, from the boxes of theirs that it needs.

        Args:
            at: number of the output.
            box: of that output.
            shapes: of the inputs.
            get: called with the number of an input and the box of it that is needed.
        """


class OneToOne:
    """Mixed into an operation that gives as many tensors as it takes."""

    def num_outputs(self, count: int) -> int:
        """Returns ``count``."""
        return count


class ManyToOne:
    """Mixed into an operation that makes one tensor."""

    def num_outputs(self, count: int) -> int:
        """Returns 1."""
        return 1


def with_span(box: Box, dim: int, start: int, stop: int) -> Box:
    """Returns ``box`` with ``start`` to ``stop`` along ``dim``."""
    offsets, lengths = list(box.offsets), list(box.lengths)
    offsets[dim], lengths[dim] = start, stop - start
    return Box(tuple(offsets), tuple(lengths))


def span_of(box: Box, dim: int) -> tuple[int, int]:
    """Returns where a box begins and ends along ``dim``."""
    return box.offsets[dim], box.ends[dim]


def split_dim(tensor: Tensor, dim: int, blocks: int) -> Tensor:
    """Returns a tensor with ``dim`` as two: ``blocks`` and what is in each."""
    shape = tuple(tensor.shape)
    return tensor.reshape(*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :])


def covering_blocks(start: int, stop: int, size: int) -> tuple[int, int]:
    """Returns the first block of ``size`` that a span touches, and the first behind it."""
    return start // size, -(-stop // size)


def read_reshaped_box(box: Box, old: Shape, new: Shape, get: Callable[[Box], Tensor]) -> Tensor:
    """Returns a box of a tensor of shape ``old`` that was given the shape ``new``.

    Of dimensions that both shapes end with, only the box is read; of those before, the rows of the
    first one that hold an element of the box.
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
