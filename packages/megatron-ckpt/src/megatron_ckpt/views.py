"""Views: which box of a global tensor a local tensor holds; planning and intersecting them.

A checkpoint knows nothing of tensor, pipeline or data parallelism. Each rank says what it holds
as views; together the views of replica 0 have to cover every global tensor exactly once. Loading
asks for other boxes of the same global tensors, so every layout loads from every layout.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from megatron_ckpt.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


class Box(NamedTuple):
    """A part of a tensor: along each dimension ``length`` elements that begin at ``offset``."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """First index past the box, per dimension."""
        return tuple(o + n for o, n in zip(self.offsets, self.lengths, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for the box of a scalar."""
        return math.prod(self.lengths)

    def slices_in(self, outer: "Box") -> tuple[slice, ...]:
        """Slices that cut this box out of a tensor that holds ``outer``."""
        return tuple(
            slice(o - base, o - base + n)
            for o, n, base in zip(self.offsets, self.lengths, outer.offsets, strict=True)
        )

    def __str__(self) -> str:
        inside = ",".join(f"{o}:{e}" for o, e in zip(self.offsets, self.ends, strict=True))
        return f"[{inside}]"


class ViewLike(Protocol):
    """What is needed of a view; any object with these attributes will do."""

    @property
    def tensor(self) -> "Tensor":
        """Local tensor of shape ``lengths``."""

    @property
    def global_shape(self) -> Sequence[int]:
        """Shape of the whole tensor, unpadded."""

    @property
    def offsets(self) -> Sequence[int]:
        """Where the local tensor begins in the whole one."""

    @property
    def lengths(self) -> Sequence[int]:
        """Extent of the local tensor."""

    @property
    def replica(self) -> int:
        """Which of several equal copies this is; number 0 is the one that is written."""


class View(NamedTuple):
    """A local tensor and the box of the global tensor it holds."""

    tensor: "Tensor"
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    replica: int = 0

    @classmethod
    def whole(cls, tensor: "Tensor") -> Self:
        """Returns the view of a tensor that is not split and has one copy."""
        shape = tuple(tensor.shape)
        return cls(tensor, shape, (0,) * len(shape), shape)


def box_of(name: str, view: ViewLike) -> Box:
    """Returns the box of ``view`` after checking that it fits its tensor and the global shape."""
    shape, box = tuple(view.global_shape), Box(tuple(view.offsets), tuple(view.lengths))
    local = tuple(view.tensor.shape)
    if not len(shape) == len(box.offsets) == len(box.lengths):
        raise CheckpointError(
            f"view of {name!r}: global shape {shape}, offsets {box.offsets} and lengths "
            f"{box.lengths} differ in their number of dimensions"
        )
    if local != box.lengths:
        raise CheckpointError(
            f"view of {name!r}: the tensor has shape {local} but the lengths are {box.lengths}"
        )
    if any(o < 0 or e > n for o, e, n in zip(box.offsets, box.ends, shape, strict=True)):
        raise CheckpointError(f"view of {name!r}: box {box} reaches out of global shape {shape}")
    if view.replica < 0:
        raise CheckpointError(f"view of {name!r}: replica {view.replica} is negative")
    return box


def intersect(a: Box, b: Box) -> Box | None:
    """Returns the common part of two boxes of one tensor, or None where they share no element."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    lengths = tuple(min(ea, eb) - o for ea, eb, o in zip(a.ends, b.ends, offsets, strict=True))
    return Box(offsets, lengths) if all(n > 0 for n in lengths) else None


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Returns the positions of two boxes that share elements, or None.

    Sweeps along the dimension with most distinct offsets, so a tensor cut along one dimension
    costs ``n log n`` however many ranks it is cut over.
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
    """Returns a part of ``region`` that none of ``boxes`` covers, or None."""
    if not region.numel:
        return None
    inside = [common for box in boxes if (common := intersect(region, box))]
    if not inside:
        return region
    first, rest = inside[0], inside[1:]
    offsets, lengths = list(region.offsets), list(region.lengths)
    for dim, (low, high) in enumerate(zip(first.offsets, first.ends, strict=True)):
        # What lies before and behind `first` along this dimension; then narrow to its extent.
        for start, stop in ((offsets[dim], low), (high, offsets[dim] + lengths[dim])):
            o, n = [*offsets], [*lengths]
            o[dim], n[dim] = start, stop - start
            if stop > start and (hole := find_uncovered(Box(tuple(o), tuple(n)), rest)):
                return hole
        offsets[dim], lengths[dim] = low, high - low
    return None


def check_tiling(name: str, shape: tuple[int, ...], owners: Sequence[tuple[int, int, Box]]) -> None:
    """Checks that ``(rank, replica, box)`` triples describe one whole tensor.

    Boxes of equal replica may not overlap and the boxes of replica 0 leave no gap.

    Raises:
        CheckpointError: names the tensor and the overlap with its two ranks, or the hole.
    """
    for replica in sorted({replica for _, replica, _ in owners}):
        equal = [(rank, box) for rank, r, box in owners if r == replica]
        if pair := find_overlap([box for _, box in equal]):
            (rank_a, a), (rank_b, b) = equal[pair[0]], equal[pair[1]]
            raise CheckpointError(
                f"tensor {name!r}: ranks {rank_a} and {rank_b} both hold {intersect(a, b)} as "
                f"replica {replica}: give equal copies different replica numbers"
            )
    written = [box for _, replica, box in owners if replica == 0]
    if sum(box.numel for box in written) != math.prod(shape):
        hole = find_uncovered(Box((0,) * len(shape), shape), written)
        raise CheckpointError(
            f"tensor {name!r} of shape {shape}: no rank holds {hole} as replica 0"
        )
