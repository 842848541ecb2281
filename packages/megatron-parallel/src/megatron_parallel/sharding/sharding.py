"""The sharding table: which part of which parameter a rank holds.

Every module that owns parameters, or state that is not a parameter, has an attribute `sharding`, a
dict from their local names to `Sharding`. `collect_shardings` gathers them into one table keyed by
global name. Initialisation, weight-decay groups, gradient norms, checkpoints and conversion read
that table; there is no second one.

A `Sharding` describes the *global* parameter, as a checkpoint stores it, and which mesh axis cuts
which dim. It is the same for every layout; only `shard_boxes(mesh)` depends on the coordinates of
the rank. All offsets are global and unpadded unless they are called local.

Nothing here imports torch: the parameters of a model are planned and counted without it. `View`,
which has a tensor, is in `megatron_parallel.sharding.views`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple, Protocol, cast

from megatron_parallel.errors import LayoutError


class AxisLike(Protocol):
    """One axis as a rank sees it."""

    @property
    def size(self) -> int:
        """Number of ranks of the axis."""

    @property
    def index(self) -> int:
        """Coordinate of this rank on the axis."""


class MeshLike(Protocol):
    """A rank's coordinates on all axes: a `Mesh`, or an `AbstractMesh` without processes."""

    def axis(self, name: str) -> AxisLike:
        """Returns the rank's axis of that name.

        Raises:
            LayoutError: The rank is in no group of that name.
        """

    def has_axis(self, name: str) -> bool:
        """Returns whether the rank is in a group of that name."""


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: `offsets[i] <= index[i] < offsets[i] + lengths[i]`."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 0 for an empty box, 1 for a scalar's."""
        return prod(self.lengths)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index: `tensor[box.slices]`."""
        pairs = zip(self.offsets, self.lengths, strict=True)
        return tuple(slice(offset, offset + length) for offset, length in pairs)

    def shifted(self, by: tuple[int, ...]) -> "Box":
        """Returns the same box moved by `by`."""
        moved = tuple(offset + step for offset, step in zip(self.offsets, by, strict=True))
        return Box(moved, self.lengths)

    def intersection(self, other: "Box") -> "Box":
        """Returns the part both cover; of zero `numel` where they do not meet."""
        offsets, lengths = [], []
        mine = zip(self.offsets, self.lengths, strict=True)
        theirs = zip(other.offsets, other.lengths, strict=True)
        for (a, length_a), (b, length_b) in zip(mine, theirs, strict=True):
            start = max(a, b)
            offsets.append(start)
            lengths.append(max(0, min(a + length_a, b + length_b) - start))
        return Box(tuple(offsets), tuple(lengths))


class ShardBox(NamedTuple):
    """One box of the global tensor and where it lies in the local one; lengths are equal."""

    box: Box
    local: Box


@dataclass(frozen=True)
class Init:
    """How a parameter starts: drawn with standard deviation or bound `scale`, or filled with it."""

    kind: Literal["normal", "uniform", "constant"] = "normal"
    scale: float = 0.02


DEFAULT_INIT = Init()
ZEROS = Init("constant", 0.0)
ONES = Init("constant", 1.0)


# Who holds the same part, by the axis that cuts it and whether it is one of experts.
class _Holders(NamedTuple):
    """Axes whose ranks hold the same: all of it, or the same data-parallel shard of it."""

    whole: tuple[str, ...]
    shard: tuple[str, ...]


_HOLDERS = {
    ("tp", False): _Holders(("dp_cp",), ("dp_cp_outer",)),
    (None, False): _Holders(("tp_dp_cp",), ("dp_cp_outer", "tp")),
    ("expert_tp", True): _Holders(("expert_dp",), ()),
    (None, True): _Holders(("expert_tp", "expert_dp"), ("expert_tp",)),
}

_DERIVED = None  # stands for "worked out in __post_init__", so that readers see a plain bool


@dataclass(frozen=True)
class Sharding:
    """How one parameter is cut over the mesh.

    Attributes:
        shape: Global shape as stored, without padding.
        axis: Mesh axis that cuts `dim` into equal parts; without one, every rank holds all.
        dim: The dim that is cut.
        padded: Size of `dim` in memory, when it is padded (vocabulary). Padding is never stored.
            Parts are `ceil(padded / axis size)` long, so that any axis size will do.
        spill_dim: Dim that is cut too where the axis has more ranks than `dim` has entries: those
            that share an entry cut it there into equal parts (query groups fewer than ranks).
        fused_dim: Dim that only enumerates fused weights (gate and up), which nobody may cut.
        experts: Whether dim 0 numbers the experts of a layer. Axis `ep` cuts it into equal parts,
            whatever `axis` does within each expert (`expert_tp`). Every expert starts from values
            of its own, and its gradient is summed over `expert_dp`.
        matrix: The parameter, or that of one expert, as a matrix, for optimizers that orthogonalise
            (Muon); by default all dims but the last, times the last. A parameter of fewer than two
            true dims has none, and a `vector` has none.
        weight_decay: Whether weight decay applies; by default to whatever has a matrix.
        init: How the parameter starts.
        tied: The first and the last pipeline stage both hold it (tied embeddings): its gradient is
            the sum over both, and it counts once.
        partial: Axis whose ranks all hold the parameter but see different parts of the same
            samples, so that a local gradient is only its part of a sum over the axis: norms and
            biases in sequence-parallel regions. `GradientBuffers` adds the parts up, nobody else.
        vocabulary: Whether `dim` numbers the tokens of a vocabulary: a token embedding or an output
            matrix. These may have a learning rate of their own, and an update rule that needs
            matrices does not take them.
        vector: Whether it has one number for each output, whatever its dims: a bias `[g, width]`.
        reduce: For state that is not a parameter (`megatron_parallel.StepState`), how what ranks
            and micro-batches have observed is combined. Defaults to None, a parameter.

    Raises:
        LayoutError: These contradict one another.
    """

    shape: tuple[int, ...]
    axis: str | None = None
    dim: int | None = None
    padded: int | None = None
    fused_dim: int | None = None
    experts: bool = False
    matrix: tuple[int, int] | None = None
    weight_decay: bool = cast(bool, _DERIVED)
    init: Init = DEFAULT_INIT
    tied: bool = False
    partial: str | None = None
    spill_dim: int | None = None
    vocabulary: bool = False
    reduce: Literal["sum", "max"] | None = None
    vector: bool = False

    def __post_init__(self) -> None:
        if (self.axis is None) != (self.dim is None):
            raise LayoutError(f"axis={self.axis!r} and dim={self.dim} must be given together")
        for name in ("dim", "fused_dim", "spill_dim"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < len(self.shape):
                raise LayoutError(f"{name}={value} is not a dim of shape {self.shape}")
        if self.dim is not None and self.dim == self.fused_dim:
            raise LayoutError(f"dim={self.dim} of shape {self.shape} is fused and cannot be cut")
        if self.spill_dim is not None and (
            self.dim is None or self.padded is not None or self.spill_dim == self.dim
        ):
            raise LayoutError(
                f"spill_dim={self.spill_dim} of shape {self.shape} needs another dim that is cut, "
                "without padding"
            )
        if self.padded is not None and (self.dim is None or self.padded < self.shape[self.dim]):
            raise LayoutError(f"padded={self.padded} does not cover dim={self.dim} of {self.shape}")
        if self.partial is not None and self.partial == self.axis:
            raise LayoutError(
                f"shape {self.shape} is cut over axis {self.axis!r}: its gradient cannot be "
                "partial over that axis too"
            )
        if self.experts and (0 in (self.dim, self.fused_dim) or not self.shape):
            raise LayoutError(f"dim 0 of shape {self.shape} numbers experts: cut another one")
        shape = self.shape[1:] if self.experts else self.shape
        true_dims = len(shape) - (self.fused_dim is not None)
        if self.matrix is None and true_dims > 1 and not self.vector:
            object.__setattr__(self, "matrix", (prod(shape[:-1]), shape[-1]))
        if self.matrix is not None and prod(self.matrix) != prod(shape):
            raise LayoutError(f"matrix={self.matrix} does not hold shape {shape}")
        if self.weight_decay is cast(bool, _DERIVED):
            object.__setattr__(self, "weight_decay", self.matrix is not None)

    @property
    def block_dim(self) -> int:
        """The dim along which initialisation draws blocks: the cut one, else the first unfused."""
        return self.fully_shard_dim if self.dim is None else self.dim

    @property
    def fully_shard_dim(self) -> int:
        """The dim that fully sharded data parallelism may cut: the first of one matrix.

        Neither a fused dim nor the numbers of experts, of which a rank may have fewer than ranks.
        """
        kept = [d for d in range(self.experts, len(self.shape)) if d != self.fused_dim]
        return kept[0] if kept else 0

    @property
    def hidden_matrix(self) -> bool:
        """Whether it is a matrix between token embedding and output matrix."""
        return self.matrix is not None and not self.vocabulary

    @property
    def single_expert(self) -> "Sharding":
        """The sharding of the parameter of a single expert, without dim 0."""
        return replace(
            self,
            shape=self.shape[1:],
            dim=None if self.dim is None else self.dim - 1,
            fused_dim=None if self.fused_dim is None else self.fused_dim - 1,
            experts=False,
        )

    def local_length(self, mesh: MeshLike) -> int:
        """Local length of the cut dim, with padding."""
        if self.axis is None or self.dim is None:
            raise LayoutError(f"shape {self.shape} is not cut")
        size, parts = self.shape[self.dim], mesh.axis(self.axis).size
        if self.padded is not None:
            return -(-self.padded // parts)
        if self.ranks_per_entry(mesh) > 1:
            return 1
        if size % parts:
            raise LayoutError(
                f"dim {self.dim} of shape {self.shape} cannot be cut into {parts} equal parts "
                f"over axis {self.axis!r}: choose a degree that divides {size}"
            )
        return size // parts

    def ranks_per_entry(self, mesh: MeshLike) -> int:
        """Ranks that share an entry of `dim` and cut `spill_dim`; 1 where there are enough."""
        if self.axis is None or self.dim is None or self.spill_dim is None:
            return 1
        entries, ranks = self.shape[self.dim], mesh.axis(self.axis).size
        if ranks <= entries:
            return 1
        if ranks % entries or self.shape[self.spill_dim] % (ranks // entries):
            raise LayoutError(
                f"{ranks} ranks of axis {self.axis!r} cannot share the {entries} entries of dim "
                f"{self.dim} of shape {self.shape} equally, nor dim {self.spill_dim} of them"
            )
        return ranks // entries

    def local_shape(self, mesh: MeshLike) -> tuple[int, ...]:
        """Shape of this rank's tensor, with padding."""
        shape = list(self.shape)
        if self.dim is not None:
            shape[self.dim] = self.local_length(mesh)
        if self.spill_dim is not None:
            shape[self.spill_dim] //= self.ranks_per_entry(mesh)
        if self.experts:
            shape[0] = self.expert_indices(mesh).stop - self.expert_indices(mesh).start
        return tuple(shape)

    def local_matrix(self, mesh: MeshLike) -> tuple[int, ...]:
        """This rank's part as a matrix `(rows, columns)`, or `(experts, rows, columns)`.

        Raises `LayoutError` if there is no matrix, or it does not follow from where dims are split.
        """
        shape, local = self.shape[self.experts :], self.local_shape(mesh)[self.experts :]
        for split in range(len(shape) - 1, 0, -1):
            if (prod(shape[:split]), prod(shape[split:])) == self.matrix:
                of_one = (prod(local[:split]), prod(local[split:]))
                return (len(self.expert_indices(mesh)), *of_one) if self.experts else of_one
        raise LayoutError(f"shape {self.shape} cannot be split into the dims of {self.matrix}")

    def expert_indices(self, mesh: MeshLike) -> range:
        """Returns the experts this rank holds."""
        count, ep = self.shape[0], mesh.axis("ep")
        if count % ep.size:
            raise LayoutError(
                f"{count} experts cannot be cut into {ep.size} equal parts over axis 'ep': "
                f"choose a degree that divides {count}"
            )
        length = count // ep.size
        return range(ep.index * length, (ep.index + 1) * length)

    def shard_boxes(self, mesh: MeshLike) -> tuple[ShardBox, ...]:
        """The boxes this rank holds and where they lie locally; none if it holds only padding."""
        whole = Box((0,) * len(self.shape), self.shape)
        corner, lengths = list(whole.offsets), self.local_shape(mesh)
        if self.axis is not None and self.dim is not None:
            entry, share = divmod(mesh.axis(self.axis).index, self.ranks_per_entry(mesh))
            corner[self.dim] = self.local_length(mesh) * entry
            if self.spill_dim is not None:
                corner[self.spill_dim] = lengths[self.spill_dim] * share
        if self.experts:
            corner[0] = self.expert_indices(mesh).start
        box = Box(tuple(corner), lengths).intersection(whole)
        if box.numel == 0:
            return ()
        return (ShardBox(box, Box(whole.offsets, box.lengths)),)

    def boxes(self, mesh: MeshLike) -> tuple[Box, ...]:
        """Returns the boxes of the global tensor this rank holds; none if it holds only padding."""
        return tuple(piece.box for piece in self.shard_boxes(mesh))

    def box(self, mesh: MeshLike) -> Box:
        """Returns the one box this rank holds, of zero `numel` if it holds only padding."""
        boxes = self.boxes(mesh)
        if not boxes:
            return Box(self.shape, (0,) * len(self.shape))
        if len(boxes) > 1:
            raise LayoutError(f"shape {self.shape} is held as {len(boxes)} boxes: ask for boxes()")
        return boxes[0]

    def replica(self, mesh: MeshLike, *, sharded: bool = False) -> int:
        """Number of this rank's copy among those that hold the same boxes; 0 is the one written.

        `sharded`: among those that hold the same shard of them, of data-parallel ranks that keep a
        shard each.
        """
        holders = _HOLDERS.get((self.axis, self.experts))
        if holders is None:
            kind = "experts" if self.experts else "a parameter"
            raise LayoutError(f"copies of {kind} cut over axis {self.axis!r} are not numbered")
        names = holders.shard if sharded else holders.whole
        copies = [mesh.axis(name) for name in names if mesh.has_axis(name)]
        if self.tied and mesh.has_axis("embedding"):
            copies.insert(0, mesh.axis("embedding"))
        number = 0
        for axis in copies:
            number = number * axis.size + axis.index
        return number


# -- flat ranges -------------------------------------------------------------------------------


def flat_range_boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """Boxes that cover elements `start <= i < stop` of a row-major tensor, in order.

    Each box is contiguous in memory and they follow one another; there are at most `2n - 1` of
    them for `n` dims.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise LayoutError(
            f"range {start}:{stop} is outside shape {shape} of {prod(shape)} elements"
        )
    return tuple(_flat_boxes(shape, start, stop)) if start < stop else ()


def _flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])

    def inside(index: int, first: int, last: int) -> Iterator[Box]:
        for box in _flat_boxes(shape[1:], first, last):
            yield Box((index, *box.offsets), (1, *box.lengths))

    head, tail = divmod(start, row), divmod(stop, row)
    if head[0] == tail[0]:  # within one row
        yield from inside(head[0], head[1], tail[1])
        return
    first_whole = head[0]
    if head[1]:
        yield from inside(head[0], head[1], row)
        first_whole += 1
    if first_whole < tail[0]:
        zeros = (0,) * (len(shape) - 1)
        yield Box((first_whole, *zeros), (tail[0] - first_whole, *shape[1:]))
    if tail[1]:
        yield from inside(tail[0], 0, tail[1])
