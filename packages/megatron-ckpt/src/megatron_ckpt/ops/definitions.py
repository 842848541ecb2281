"""The closed list of operations, which convert their tensors to ours and back.

An operation maps the tensors at its index in a row to those at the next index. Its inverse takes
the number of tensors to return. Its shard rule (`Op.read_box`) determines which boxes of their
tensors a box of ours needs. This module has the operations that move whole rows and dims; the
others are in `interleaving` and `arithmetic`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_ckpt.ops.arithmetic import AddConstant, BlockScale, Tie
from megatron_ckpt.ops.interleaving import Deinterleave, Interleave, Segments
from megatron_ckpt.ops.op import (
    ManyToOne,
    OneToOne,
    Op,
    ReadBox,
    Shape,
    covering_blocks,
    read_reshaped_box,
    span_of,
    split_dim,
    with_span,
)
from megatron_ckpt.views import Box


@dataclass(frozen=True)
class Transpose(OneToOne):
    """Permutes dims: dim ``i`` of ours is dim ``dims[i]`` of theirs.

    The default swaps the dims of a matrix: ``[m, n]`` to ``[n, m]``.
    """

    dims: tuple[int, ...] = (1, 0)

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Permutes the dims of each tensor."""
        self._check()
        return [_of_rank(tensor, len(self.dims)).permute(self.dims) for tensor in tensors]

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Permutes the dims of each tensor back."""
        self._check()
        back = [self.dims.index(dim) for dim in range(len(self.dims))]
        return [_of_rank(tensor, len(self.dims)).permute(back) for tensor in tensors]

    def read_box(self, index: int, box: Box, shapes: Sequence[Shape], get: ReadBox) -> Tensor:
        """Reads the box with its dims in their order and permutes it."""
        self._check()
        back = [self.dims.index(dim) for dim in range(len(self.dims))]
        offsets, lengths = ((tuple(each[dim] for dim in back)) for each in box)
        return get(index, Box(offsets, lengths)).permute(self.dims)

    def _check(self) -> None:
        if sorted(self.dims) != list(range(len(self.dims))):
            raise ValueError(
                f"dims {list(self.dims)} are not a permutation of {len(self.dims)} dims"
            )


@dataclass(frozen=True)
class Concat(ManyToOne):
    """Concatenates tensors along ``dim``.

    ``sizes`` are their sizes along it. Defaults to equal sizes.
    """

    dim: int
    sizes: tuple[int, ...] | None = None

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Concatenates the tensors."""
        extents = [tensor.shape[self.dim] for tensor in tensors]
        expected = list(self.sizes or extents[:1] * len(extents))
        if extents != expected:
            raise ValueError(f"sizes along dim {self.dim} are {extents}, expected {expected}")
        return [torch.cat(list(tensors), self.dim)]

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Splits the tensor."""
        extent = tensors[0].shape[self.dim]
        if self.sizes is None and extent % count:
            raise ValueError(f"size {extent} along dim {self.dim} is not divisible by {count}")
        sizes = list(self.sizes or [extent // count] * count)
        if len(sizes) != count or sum(sizes) != extent:
            raise ValueError(f"sizes {sizes} do not split {extent} into {count} tensors")
        return list(torch.split(tensors[0], sizes, self.dim))

    def read_box(self, index: int, box: Box, shapes: Sequence[Shape], get: ReadBox) -> Tensor:
        """Reads the part of the box that lies in each tensor."""
        start, stop = span_of(box, self.dim)
        parts, begin = [], 0
        for i, shape in enumerate(shapes):
            low, high = max(start - begin, 0), min(stop - begin, shape[self.dim])
            begin += shape[self.dim]
            if low < high:
                parts.append(get(i, with_span(box, self.dim, low, high)))
        return torch.cat(parts, self.dim) if parts else get(0, with_span(box, self.dim, 0, 0))


@dataclass(frozen=True)
class Reshape(OneToOne):
    """Reshapes a tensor of shape ``source`` to ``shape``; each may have one entry of -1."""

    shape: tuple[int, ...]
    source: tuple[int, ...]

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Reshapes each tensor to ``shape``."""
        return [_reshape(tensor, self.source, self.shape) for tensor in tensors]

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Reshapes each tensor to ``source``."""
        return [_reshape(tensor, self.shape, self.source) for tensor in tensors]

    def read_box(self, index: int, box: Box, shapes: Sequence[Shape], get: ReadBox) -> Tensor:
        """Reads the rows that hold the box."""
        count = math.prod(shapes[index])
        known = math.prod(extent for extent in self.shape if extent != -1)
        new = tuple(count // known if extent == -1 else extent for extent in self.shape)
        return read_reshaped_box(box, tuple(shapes[index]), new, lambda part: get(index, part))


@dataclass(frozen=True)
class Stack(ManyToOne):
    """Stacks tensors of one shape along a new ``dim``, such as gate and up to ``[2, f, h]``."""

    dim: int

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Stacks the tensors."""
        return [torch.stack(list(tensors), self.dim)]

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Unbinds the dim."""
        if tensors[0].shape[self.dim] != count:
            raise ValueError(f"size along dim {self.dim} is not {count}")
        return list(tensors[0].unbind(self.dim))

    def read_box(self, index: int, box: Box, shapes: Sequence[Shape], get: ReadBox) -> Tensor:
        """Reads the box of each tensor that it includes."""
        inner = Box(*(tuple(each[: self.dim]) + tuple(each[self.dim + 1 :]) for each in box))
        return torch.stack([get(i, inner) for i in range(*span_of(box, self.dim))], self.dim)


@dataclass(frozen=True)
class InterleaveQKV(ManyToOne):
    """Joins queries, keys and values to one tensor ordered by query group.

    Theirs is one tensor ``[q; k; v]`` of ``(heads + 2 groups) * head_dim`` rows, or three tensors.
    Ours is ``[groups, (heads / groups + 2) * head_dim, ...]``: for each group its query heads, key
    and value. A rank that holds whole groups therefore holds heads that belong together.

    Each head of their queries may have ``parts``: with two, the rows of its gate follow its own.
    Ours has the first part of all heads of a group, then the second.
    """

    heads: int
    groups: int
    head_dim: int
    parts: int = 1

    @property
    def _rows(self) -> list[int]:
        queries = self.parts * self.heads * self.head_dim
        return [queries, *[self.groups * self.head_dim] * 2]

    def _of_group(self, part: Tensor, i: int, *, back: bool = False) -> Tensor:
        """Returns rows ``[groups, rows, ...]`` of part ``i`` in our order, or back in theirs."""
        if i or self.parts == 1:
            return part
        cuts = (self.parts, -1) if back else (-1, self.parts)
        cut = part.reshape(len(part), *cuts, self.head_dim, *part.shape[2:])
        return cut.transpose(1, 2).reshape(part.shape)

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Orders the rows by group."""
        parts = list(tensors)
        if len(parts) == 1 and len(parts[0]) == sum(self._rows):
            parts = list(torch.split(parts[0], self._rows))
        if [len(part) for part in parts] != self._rows:
            raise ValueError(f"rows are {[len(part) for part in parts]}, expected {self._rows}")
        ordered = [
            self._of_group(part.reshape(self.groups, -1, *part.shape[1:]), i)
            for i, part in enumerate(parts)
        ]
        return [torch.cat(ordered, 1)]

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Splits the groups; ``count`` 1 gives ``[q; k; v]``, 3 gives three tensors."""
        each = [rows // self.groups for rows in self._rows]
        (tensor,) = tensors
        if tuple(tensor.shape[:2]) != (self.groups, sum(each)):
            raise ValueError(f"shape is {tuple(tensor.shape)}, expected {self.groups, sum(each)}")
        parts = [
            self._of_group(part, i, back=True).flatten(0, 1)
            for i, part in enumerate(torch.split(tensor, each, 1))
        ]
        return [torch.cat(parts)] if count == 1 else parts

    def read_box(self, index: int, box: Box, shapes: Sequence[Shape], get: ReadBox) -> Tensor:
        """Reads the rows of queries, keys and values that the box overlaps."""
        (first, last), (start, stop) = span_of(box, 0), span_of(box, 1)
        rest = Box(box.offsets[1:], box.lengths[1:])
        parts, begin = [], 0
        before = [0, self._rows[0], sum(self._rows[:2])]
        for i, rows in enumerate(self._rows):
            each = rows // self.groups
            low, high = max(start - begin, 0), min(stop - begin, each)
            begin += each
            if low >= high:
                continue
            source, skip = (i, 0) if len(shapes) > 1 else (0, before[i])
            held = get(source, with_span(rest, 0, skip + first * each, skip + last * each))
            held = self._of_group(split_dim(held, 0, last - first), i)
            parts.append(held[:, low:high])
        return torch.cat(parts, 1)


@dataclass(frozen=True)
class RopePermute(OneToOne):
    """Reorders the rows of each head from neighbouring rotary pairs to two halves.

    Meta and GGUF store pairs, ours are halves. Row ``2 j + k`` of a head goes to row ``k * head_dim
    / 2 + j``. ``only`` is the index of the one tensor that is reordered in a row with several:
    queries and keys differ in their heads, values are not reordered.
    """

    heads: int
    head_dim: int
    only: int | None = None

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Reorders pairs to halves."""
        return self._permute(tensors, (self.heads, self.head_dim // 2, 2))

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Reorders halves to pairs."""
        return self._permute(tensors, (self.heads, 2, self.head_dim // 2))

    def read_box(self, index: int, box: Box, shapes: Sequence[Shape], get: ReadBox) -> Tensor:
        """Reads the whole heads that the box overlaps."""
        if self.only not in (None, index):
            return get(index, box)
        start, stop = span_of(box, 0)
        first, last = covering_blocks(start, stop, self.head_dim)
        held = get(index, with_span(box, 0, first * self.head_dim, last * self.head_dim))
        turned = RopePermute(last - first, self.head_dim).forward([held])[0]
        return turned.narrow(0, start - first * self.head_dim, stop - start)

    def _permute(self, tensors: Sequence[Tensor], shape: tuple[int, int, int]) -> list[Tensor]:
        def one(tensor: Tensor) -> Tensor:
            rows = self.heads * self.head_dim
            if self.head_dim % 2 or tensor.ndim < 1 or len(tensor) != rows:
                raise ValueError(
                    f"shape is {tuple(tensor.shape)}, expected {rows} rows and an even head_dim"
                )
            return tensor.reshape(*shape, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

        chosen = range(len(tensors)) if self.only is None else (self.only,)
        if max(chosen) >= len(tensors):
            raise ValueError(f"only={self.only}, but there are {len(tensors)} tensors")
        return [one(tensor) if i in chosen else tensor for i, tensor in enumerate(tensors)]


@dataclass(frozen=True)
class SliceRows(OneToOne):
    """Drops the rows after the first ``rows``, such as padding of a foreign vocabulary.

    The inverse returns the tensor without the padding.
    """

    rows: int

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Slices each tensor."""
        for tensor in tensors:
            if tensor.ndim < 1 or len(tensor) < self.rows:
                raise ValueError(f"shape is {tuple(tensor.shape)}, expected {self.rows} rows")
        return [tensor[: self.rows] for tensor in tensors]

    def inverse(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Returns the tensors unchanged."""
        return self.forward(tensors)

    def read_box(self, index: int, box: Box, shapes: Sequence[Shape], get: ReadBox) -> Tensor:
        """Reads the same box."""
        return get(index, box)


OPS: Mapping[str, type[Op]] = MappingProxyType(
    {
        "transpose": Transpose,
        "concat": Concat,
        "reshape": Reshape,
        "stack": Stack,
        "interleave_qkv": InterleaveQKV,
        "rope_permute": RopePermute,
        "slice_rows": SliceRows,
        "segments": Segments,
        "interleave": Interleave,
        "deinterleave": Deinterleave,
        "add_constant": AddConstant,
        "block_scale": BlockScale,
        "tie": Tie,
    }
)


def _of_rank(tensor: Tensor, ndim: int) -> Tensor:
    if tensor.ndim != ndim:
        raise ValueError(f"shape is {tuple(tensor.shape)}, expected {ndim} dims")
    return tensor


def _reshape(tensor: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor:
    fits = len(old) == tensor.ndim and all(
        wanted in (-1, extent) for wanted, extent in zip(old, tensor.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"shape is {tuple(tensor.shape)}, expected {tuple(old)}")
    return tensor.reshape(tuple(new))
