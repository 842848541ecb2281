"""Views: the boxes of global tensors that local tensors hold, and operations on boxes.

Checkpoints are independent of tensor, pipeline and data parallelism. Each rank describes what it
holds as views. The views of replica 0 on all ranks together must cover every global tensor exactly
once. A load requests other boxes of the same global tensors, so every layout loads from every
layout.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self

from megatron_ckpt.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


MOST_CUT_DIMS: Final = 8
"""Maximum number of dims along which a tensor is cut; each doubles the time of `tiles`."""


class Box(NamedTuple):
    """A rectangular region of a tensor: ``length`` elements from ``offset`` along each dim."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """The first index past the box along each dim."""
        return tuple(o + n for o, n in zip(self.offsets, self.lengths, strict=True))

    @property
    def numel(self) -> int:
        """The number of elements; 1 for the box of a scalar."""
        return math.prod(self.lengths)

    def slices_in(self, outer: "Box") -> tuple[slice, ...]:
        """Returns the slices that select this box from a tensor that holds the box ``outer``."""
        return tuple(
            slice(o - base, o - base + n)
            for o, n, base in zip(self.offsets, self.lengths, outer.offsets, strict=True)
        )

    def __str__(self) -> str:
        inside = ",".join(f"{o}:{e}" for o, e in zip(self.offsets, self.ends, strict=True))
        return f"[{inside}]"


class ViewLike(Protocol):
    """The attributes that a view needs; any object with them is a view."""

    @property
    def tensor(self) -> "Tensor":
        """The local tensor, of shape ``lengths``."""

    @property
    def global_shape(self) -> Sequence[int]:
        """The shape of the global tensor, without padding."""

    @property
    def offsets(self) -> Sequence[int]:
        """The first index of the local tensor in the global tensor, along each dim."""

    @property
    def lengths(self) -> Sequence[int]:
        """The shape of the local tensor."""

    @property
    def replica(self) -> int:
        """The index of this copy among equal copies. Copy 0 is written."""


class View(NamedTuple):
    """A local tensor and the box of the global tensor that it holds."""

    tensor: "Tensor"
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    replica: int = 0

    @classmethod
    def whole(cls, tensor: "Tensor") -> Self:
        """Returns the view of a tensor that is not sharded and has one copy."""
        shape = tuple(tensor.shape)
        return cls(tensor, shape, (0,) * len(shape), shape)


def box_of(name: str, view: ViewLike) -> Box:
    """Returns the box of ``view`` after checking it against its tensor and the global shape.

    Raises:
        CheckpointError: The box does not match the tensor or exceeds the global shape, or the
            replica is negative.
    """
    shape, box = tuple(view.global_shape), Box(tuple(view.offsets), tuple(view.lengths))
    local = tuple(view.tensor.shape)
    if not len(shape) == len(box.offsets) == len(box.lengths):
        raise CheckpointError(
            f"view of {name!r}: global shape {shape}, offsets {box.offsets} and lengths "
            f"{box.lengths} must have the same number of dims"
        )
    if local != box.lengths:
        raise CheckpointError(
            f"view of {name!r}: the tensor has shape {local} but the lengths are {box.lengths}"
        )
    if any(o < 0 or e > n for o, e, n in zip(box.offsets, box.ends, shape, strict=True)):
        raise CheckpointError(f"view of {name!r}: box {box} lies outside the global shape {shape}")
    if view.replica < 0:
        raise CheckpointError(f"view of {name!r}: replica must not be negative, got {view.replica}")
    return box


def intersect(a: Box, b: Box) -> Box | None:
    """Returns the intersection of two boxes of one tensor, or None if it is empty."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    lengths = tuple(min(ea, eb) - o for ea, eb, o in zip(a.ends, b.ends, offsets, strict=True))
    return Box(offsets, lengths) if all(n > 0 for n in lengths) else None


def cut_dims(shape: tuple[int, ...], boxes: Iterable[Box]) -> list[int]:
    """Returns the dims along which a box that is not empty has a part of the tensor only."""
    lengths = [box.lengths for box in boxes if box.numel]
    return [d for d, size in enumerate(shape) if any(each[d] != size for each in lengths)]


def tiles(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Returns whether boxes inside of a tensor hold each of its elements exactly once.

    A box adds 1 to its elements: signs at its corners, which are added up along each dim. All
    elements get 1 exactly if the signs of all boxes are those of the whole tensor. This takes
    ``O(n 2**d)`` for n boxes and d cut dims, also where the sweep of `find_overlap`, which names
    the boxes, compares each box with all others.
    """
    cut = cut_dims(shape, boxes)
    signs: Counter[tuple[int, ...]] = Counter()
    tensor_box = Box((0,) * len(shape), shape)
    for box, factor in [(tensor_box, -1), *((box, 1) for box in boxes)]:
        if box.numel:
            sides = [((box.offsets[d], 1), (box.ends[d], -1)) for d in cut]
            for corner in itertools.product(*sides):
                sign = math.prod(side for _, side in corner)
                signs[tuple(at for at, _ in corner)] += factor * sign
    return not any(signs.values())


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Returns the indices of two boxes that share elements, or None.

    Sweeps along the dim with the most distinct offsets. A tensor that is split along one dim over
    ``n`` ranks therefore takes ``O(n log n)``.
    """
    filled = [i for i, box in enumerate(boxes) if box.numel]
    if len(filled) < 2:
        return None
    if not boxes[filled[0]].offsets:
        return filled[0], filled[1]
    dims = range(len(boxes[filled[0]].offsets))
    dim = max(dims, key=lambda d: len({boxes[i].offsets[d] for i in filled}))
    filled.sort(key=lambda i: boxes[i].offsets[dim])
    for at, i in enumerate(filled):
        end = boxes[i].ends[dim]
        for j in filled[at + 1 :]:
            if boxes[j].offsets[dim] >= end:
                break
            if intersect(boxes[i], boxes[j]):
                return min(i, j), max(i, j)
    return None


def find_uncovered(region: Box, boxes: Iterable[Box]) -> Box | None:
    """Returns a box of ``region`` that none of ``boxes`` covers, or None."""
    if not region.numel:
        return None
    inside = [common for box in boxes if (common := intersect(region, box))]
    if not inside:
        return region
    first, rest = inside[0], inside[1:]
    offsets, lengths = list(region.offsets), list(region.lengths)
    for dim, (low, high) in enumerate(zip(first.offsets, first.ends, strict=True)):
        # Search before and after `first` along this dim, then narrow the region to its extent.
        for start, stop in ((offsets[dim], low), (high, offsets[dim] + lengths[dim])):
            o, n = [*offsets], [*lengths]
            o[dim], n[dim] = start, stop - start
            if stop > start and (hole := find_uncovered(Box(tuple(o), tuple(n)), rest)):
                return hole
        offsets[dim], lengths[dim] = low, high - low
    return None


def check_tiling(name: str, shape: tuple[int, ...], owners: Sequence[tuple[int, int, Box]]) -> None:
    """Checks that ``(rank, replica, box)`` triples describe one whole tensor.

    Boxes of the same replica must not overlap, and the boxes of replica 0 must leave no gap.

    Raises:
        CheckpointError: Names the tensor and either the overlap with its two ranks or the gap, or
            the tensor is cut along more than `MOST_CUT_DIMS` dims.
    """
    if len(cut := cut_dims(shape, [box for _, _, box in owners])) > MOST_CUT_DIMS:
        raise CheckpointError(
            f"tensor {name!r} of shape {shape} is cut along {len(cut)} dims, and at most "
            f"{MOST_CUT_DIMS} can be; gather some of them before the save"
        )
    for replica in sorted({replica for _, replica, _ in owners}):
        equal = [(rank, box) for rank, r, box in owners if r == replica]
        if pair := find_overlap([box for _, box in equal]):
            (rank_a, a), (rank_b, b) = equal[pair[0]], equal[pair[1]]
            raise CheckpointError(
                f"tensor {name!r}: ranks {rank_a} and {rank_b} both hold {intersect(a, b)} as "
                f"replica {replica}; give each copy its own replica number"
            )
    written = [box for _, replica, box in owners if replica == 0]
    if sum(box.numel for box in written) != math.prod(shape):
        hole = find_uncovered(Box((0,) * len(shape), shape), written)
        raise CheckpointError(
            f"tensor {name!r} of shape {shape}: no rank holds {hole} as replica 0"
        )
