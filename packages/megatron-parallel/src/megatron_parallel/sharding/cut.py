"""Tensors that lie in boxes on several ranks, and functions of whole tensors.

    cut = tensor_parallel_cut(sharding, mesh)
    (result,) = map_whole([box], [cut], lambda indices, wholes: [f(whole) for whole in wholes])

Every rank gets its box of the result. Each tensor is sent to one rank, its owner, which calls the
function and sends the boxes of the result back: two all-to-alls for all tensors together. Owners
are chosen by cost, so that the ranks share the work.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Shaped
from torch import Tensor

from megatron_parallel.collectives.operations import all_gather, all_to_all
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.axes import Axis
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.sharding.sharding import AxisLike, Box, MeshLike, Sharding

WholeFunction = Callable[[Sequence[int], list[Tensor]], Sequence[Tensor]]
"""Function of the indices of some tensors and these tensors; returns tensors of equal shapes."""


@dataclass(frozen=True)
class Cut:
    """How the boxes of one tensor lie on the ranks of an axis.

    Attributes:
        axis: The axis.
        shape: Shape of the whole tensor.
        boxes: The box of each rank, in the order of the axis. The boxes do not overlap, and some
            may be empty.
    """

    axis: Axis
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def own(self) -> Box:
        """The box of this rank."""
        return self.boxes[self.axis.index]


def tensor_parallel_cut(sharding: Sharding, mesh: Mesh) -> Cut | None:
    """Returns how a parameter is cut over `Sharding.axis`; None if every rank holds it whole.

    The whole tensor of a parameter of experts has the experts of this rank only.

    Raises:
        LayoutError: The parameter is padded.
    """
    if sharding.axis is None or mesh.axis(sharding.axis).size == 1:
        return None
    if sharding.padded is not None:
        raise LayoutError(f"shape {sharding.shape} is padded, so its boxes are not equal")
    axis = mesh.axis(sharding.axis)
    first = (sharding.expert_indices(mesh).start if sharding.experts else 0,)
    corner = (*first, *(0,) * (len(sharding.shape) - 1))
    shape = list(sharding.shape)
    if sharding.experts:
        shape[0] = len(sharding.expert_indices(mesh))
    boxes = (sharding.box(_Coordinate(mesh, axis.name, index)) for index in range(axis.size))
    to_local = tuple(-offset for offset in corner)
    return Cut(axis, tuple(shape), tuple(box.shifted(to_local) for box in boxes))


def map_whole(
    boxes: Sequence[Shaped[Tensor, "..."]],
    cuts: Sequence[Cut],
    function: WholeFunction,
    *,
    costs: Sequence[float] | None = None,
    everywhere: bool = False,
    purpose: str = "",
) -> list[Shaped[Tensor, "..."]]:
    """Returns this rank's boxes of a function of whole tensors.

    All ranks of the axis call it with the same cuts in the same order.

    Args:
        boxes: This rank's box of each tensor, all of one dtype. An empty box has any shape.
        cuts: How each tensor is cut, all over one axis.
        function: Called once, with the tensors that this rank owns.
        costs: Work of the function for each tensor. Defaults to its number of elements.
        everywhere: Whether every rank gets all tensors with one all-gather and calls the function
            for all of them, instead of sharing the work.
        purpose: Description of the tensors for `Mesh.counting` and for errors.
    """
    if not cuts:
        return []
    axis = cuts[0].axis
    if everywhere:
        length = max(sum(cut.boxes[r].numel for cut in cuts) for r in range(axis.size))
        rows = all_gather(_row(boxes, length)[None], axis, purpose=purpose)
        results = function(range(len(cuts)), _wholes(rows, cuts))
        return [result[cut.own.slices] for result, cut in zip(results, cuts, strict=True)]
    owners = _owners(costs or [prod(cut.shape) for cut in cuts], axis.size)
    owned = [[i for i, owner in enumerate(owners) if owner == r] for r in range(axis.size)]
    length = max(
        sum(cuts[i].boxes[r].numel for i in indices) for r in range(axis.size) for indices in owned
    )
    sent = torch.stack([_row([boxes[i] for i in indices], length, boxes[0]) for indices in owned])
    mine = owned[axis.index]
    rows = all_to_all(sent, axis, purpose=purpose)
    results = function(mine, _wholes(rows, [cuts[i] for i in mine]))
    back = torch.stack(
        [
            _row(
                [result[cuts[i].boxes[r].slices] for i, result in zip(mine, results, strict=True)],
                length,
                boxes[0],
            )
            for r in range(axis.size)
        ]
    )
    received = all_to_all(back, axis, purpose=f"changed {purpose}" if purpose else "")
    found: dict[int, Tensor] = {}
    for indices, row in zip(owned, received, strict=True):
        found |= dict(zip(indices, _split(row, [cuts[i].own for i in indices]), strict=True))
    return [found[i] for i in range(len(cuts))]


class _Coordinate:
    """A mesh with another coordinate on one axis."""

    def __init__(self, mesh: MeshLike, name: str, index: int) -> None:
        self._mesh, self._name, self._index = mesh, name, index

    def axis(self, name: str) -> AxisLike:
        axis = self._mesh.axis(name)
        return _At(axis.size, self._index) if name == self._name else axis

    def has_axis(self, name: str) -> bool:
        return self._mesh.has_axis(name)


@dataclass(frozen=True)
class _At:
    size: int
    index: int


def _owners(costs: Sequence[float], ranks: int) -> list[int]:
    """Returns the owner of each tensor: the largest first, each to the rank with least work."""
    work, owners = [0.0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[index] = work.index(min(work))
        work[owners[index]] += costs[index]
    return owners


def _row(boxes: Sequence[Tensor], length: int, like: Tensor | None = None) -> Tensor:
    """Returns the elements of several boxes, with zeros up to `length`."""
    row = (boxes[0] if like is None else like).new_zeros(length)
    end = 0
    for box in boxes:
        row[end : end + box.numel()] = box.reshape(-1)
        end += box.numel()
    return row


def _split(row: Tensor, boxes: Sequence[Box]) -> list[Tensor]:
    """Returns the tensors of boxes whose elements follow one another in a row."""
    sizes = [box.numel for box in boxes]
    parts = torch.split(row[: sum(sizes)], sizes)
    return [part.view(box.lengths) for part, box in zip(parts, boxes, strict=True)]


def _wholes(rows: Tensor, cuts: Sequence[Cut]) -> list[Tensor]:
    """Returns whole tensors from the boxes that each rank sent in its row."""
    wholes = [rows.new_zeros(cut.shape) for cut in cuts]
    for rank, row in enumerate(rows):
        parts = _split(row, [cut.boxes[rank] for cut in cuts])
        for whole, cut, part in zip(wholes, cuts, parts, strict=True):
            whole[cut.boxes[rank].slices] = part
    return wholes
