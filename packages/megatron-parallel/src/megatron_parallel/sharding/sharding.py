"""The sharding table: which part of which parameter a rank holds.

Every module with parameters, or with state that is not a parameter, has an attribute `sharding`: a
dict of `Sharding` by local name. `collect_shardings` collects these dicts into one table by global
name. Initialisation, weight-decay groups, gradient norms, checkpoints and conversion all read this
table.

A `Sharding` describes the *global* parameter, as a checkpoint stores it, and which mesh axis cuts
which dim. Shape and cut are the same for every layout; `shard_boxes(mesh)` combines them with the
coordinates of a rank. Two fields depend on how a model is run: `tied` on pipeline parallelism, and
`partial` on sequence parallelism. A pipeline rank has only the rows of its stages. All offsets are
global and unpadded unless they are called local.

This module does not import torch, so the parameters of a model can be planned and counted without
it. `View`, which has a tensor, is in `megatron_parallel.sharding.views`.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Final, Literal, NamedTuple, Protocol, cast

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
    """A rectangular region of a tensor: `offsets[i] <= index[i] < offsets[i] + lengths[i]`."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements: 0 for an empty box, 1 for the box of a scalar."""
        return prod(self.lengths)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index: `tensor[box.slices]`."""
        pairs = zip(self.offsets, self.lengths, strict=True)
        return tuple(slice(offset, offset + length) for offset, length in pairs)

    def shifted(self, by: tuple[int, ...]) -> "Box":
        """Returns the box with `by` added to its offsets."""
        moved = tuple(offset + step for offset, step in zip(self.offsets, by, strict=True))
        return Box(moved, self.lengths)

    def intersection(self, other: "Box") -> "Box":
        """Returns the intersection of two boxes, with `numel` 0 if they are disjoint."""
        offsets, lengths = [], []
        mine = zip(self.offsets, self.lengths, strict=True)
        theirs = zip(other.offsets, other.lengths, strict=True)
        for (a, length_a), (b, length_b) in zip(mine, theirs, strict=True):
            start = max(a, b)
            offsets.append(start)
            lengths.append(max(0, min(a + length_a, b + length_b) - start))
        return Box(tuple(offsets), tuple(lengths))


class ShardBox(NamedTuple):
    """A box of the global tensor and the box of equal lengths that holds it in the local tensor."""

    box: Box
    local: Box


@dataclass(frozen=True)
class Init:
    """Initial values of a parameter.

    Attributes:
        kind: Normal with standard deviation `scale`, uniform in `[-scale, scale)`, or the constant
            `scale`. `log_uniform` is the logarithm of a uniform number in `[low, scale)`.
            `inverse_softplus` is the number whose softplus is in `[low, scale)`, with a uniform
            logarithm: decays and time steps of recurrent layers (Gu and Dao 2023).
        scale: See `kind`.
        low: See `kind`. Other kinds do not read it.
    """

    kind: Literal["normal", "uniform", "constant", "log_uniform", "inverse_softplus"] = "normal"
    scale: float = 0.02
    low: float = 0.0


DEFAULT_INIT = Init()
ZEROS = Init("constant", 0.0)
ONES = Init("constant", 1.0)


class _ReplicaAxes(NamedTuple):
    """Axes whose ranks hold the same data.

    Attributes:
        whole: Axes whose ranks hold the same part of a parameter.
        shard: The same, if each data-parallel rank holds one shard of that part.
    """

    whole: tuple[str, ...]
    shard: tuple[str, ...]


# By the axis that cuts the parameter, and whether it is a parameter of experts.
_REPLICA_AXES = {
    ("tp", False): _ReplicaAxes(("dp_cp",), ("dp_cp_outer",)),
    (None, False): _ReplicaAxes(("tp_dp_cp",), ("dp_cp_outer", "tp")),
    ("expert_tp", True): _ReplicaAxes(("expert_dp",), ()),
    (None, True): _ReplicaAxes(("expert_tp", "expert_dp"), ("expert_tp",)),
}

_DERIVED: Final = None  # computed in __post_init__, so that the field has the type bool


@dataclass(frozen=True)
class Sharding:
    """How one parameter is cut over the mesh.

    Attributes:
        shape: Global shape as stored, without padding.
        axis: Mesh axis that cuts `dim` into equal parts. None means that every rank holds the whole
            parameter. Defaults to None.
        dim: The dim that is cut.
        padded: Size of `dim` in memory if it is padded (vocabulary). Padding is never stored. Each
            part has length `ceil(padded / axis size)`, so any axis size is possible.
        spill_dim: Second dim to cut. Used only if the axis has more ranks than `dim` has entries
            (fewer query groups than ranks): the ranks that share an entry split it along this dim.
        fused_dim: Dim that enumerates fused weights (gate and up) and must not be cut.
        fused_sizes: Sizes of the weights that the last dim but one concatenates, such as queries,
            key and value of a group of heads. Optimizers that orthogonalise treat them, and those
            that `fused_dim` enumerates, as separate matrices. Defaults to a single weight.
        experts: Whether dim 0 enumerates the experts of a layer. Axis `ep` cuts it into equal
            parts, and `axis` (`expert_tp`) cuts each expert. Each expert has initial values of its
            own, and its gradient is summed over `expert_dp`.
        matrix: 2-D shape in which optimizers that orthogonalise, such as Muon, view the parameter
            (of experts: one expert). Defaults to the product of all dims but the last, and the
            last. A `vector` and a parameter with fewer than two dims, not counting `fused_dim`,
            have none.
        weight_decay: Whether weight decay applies. Defaults to whether there is a `matrix`.
        init: Initial values.
        tied: Axis of the pipeline ranks whose stages all hold the parameter: `embedding` for the
            first and the last stage, or one of `Mesh.add_stage_group`. Its gradient is the sum over
            the axis, and it counts once.
        partial: Axis whose ranks all hold the parameter but see different parts of the same
            samples, so that the gradient is the sum over the axis (norms and biases in
            sequence-parallel regions). `GradientBuffers` computes this sum.
        vocabulary: Whether `dim` enumerates the tokens of a vocabulary: a token embedding or an
            output matrix. These may have a learning rate of their own, and are not updated by rules
            that need matrices.
        vector: Whether the parameter has one number for each output, such as a bias `[g, width]`.
        reduce: For state that is not a parameter (`megatron_parallel.StepState`), how observations
            of ranks and micro-batches are combined. Defaults to None, a parameter.

    Raises:
        LayoutError: The values contradict one another.
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
    tied: str | None = None
    partial: str | None = None
    spill_dim: int | None = None
    vocabulary: bool = False
    reduce: Literal["sum", "max"] | None = None
    vector: bool = False
    fused_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if (self.axis is None) != (self.dim is None):
            raise LayoutError(f"axis={self.axis!r} and dim={self.dim} must be given together")
        for name in ("dim", "fused_dim", "spill_dim"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < len(self.shape):
                raise LayoutError(f"{name}={value} is not a dim of shape {self.shape}")
        if self.dim is not None and self.dim == self.fused_dim:
            raise LayoutError(f"dim={self.dim} of shape {self.shape} is fused and cannot be cut")
        if self.fused_sizes and sum(self.fused_sizes) != prod(self.shape[-2:-1]):
            raise LayoutError(
                f"fused_sizes={self.fused_sizes} do not add up to the last dim but one of shape "
                f"{self.shape}"
            )
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
            raise LayoutError(f"dim 0 of shape {self.shape} enumerates experts: cut another dim")
        shape = self.shape[1:] if self.experts else self.shape
        true_dims = len(shape) - (self.fused_dim is not None)
        if self.matrix is None and true_dims > 1 and not self.vector:
            object.__setattr__(self, "matrix", (prod(shape[:-1]), shape[-1]))
        if self.matrix is not None and prod(self.matrix) != prod(shape):
            raise LayoutError(
                f"matrix={self.matrix} and shape {shape} have different numbers of elements"
            )
        if self.weight_decay is cast(bool, _DERIVED):
            object.__setattr__(self, "weight_decay", self.matrix is not None)

    @property
    def block_dim(self) -> int:
        """Dim along which initial values are drawn in blocks: `dim`, else `fully_shard_dim`."""
        return self.fully_shard_dim if self.dim is None else self.dim

    @property
    def fully_shard_dim(self) -> int:
        """Dim that fully sharded data parallelism may cut: the first dim of a matrix.

        It is neither the fused dim nor the dim of experts, which may have fewer entries than ranks.
        """
        dims = [d for d in range(self.experts, len(self.shape)) if d != self.fused_dim]
        return dims[0] if dims else 0

    @property
    def hidden_matrix(self) -> bool:
        """Whether the parameter is a matrix, but neither token embedding nor output matrix."""
        return self.matrix is not None and not self.vocabulary

    @property
    def single_expert(self) -> "Sharding":
        """Sharding of the parameter of a single expert, without dim 0."""
        return replace(
            self,
            shape=self.shape[1:],
            dim=None if self.dim is None else self.dim - 1,
            fused_dim=None if self.fused_dim is None else self.fused_dim - 1,
            experts=False,
        )

    def local_length(self, mesh: MeshLike) -> int:
        """Returns the local length of the cut dim, with padding.

        Raises:
            LayoutError: The parameter is not cut, or cannot be cut into equal parts.
        """
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
        """Returns how many ranks share an entry of `dim` and cut `spill_dim`.

        Raises:
            LayoutError: The ranks cannot share the entries equally.
        """
        if self.axis is None or self.dim is None or self.spill_dim is None:
            return 1
        entries, ranks = self.shape[self.dim], mesh.axis(self.axis).size
        if ranks <= entries:
            return 1
        if ranks % entries or self.shape[self.spill_dim] % (ranks // entries):
            raise LayoutError(
                f"{ranks} ranks of axis {self.axis!r} cannot share the {entries} entries of dim "
                f"{self.dim} of shape {self.shape} equally, with dim {self.spill_dim} cut too"
            )
        return ranks // entries

    def local_shape(self, mesh: MeshLike) -> tuple[int, ...]:
        """Returns the shape of this rank's tensor, with padding."""
        shape = list(self.shape)
        if self.dim is not None:
            shape[self.dim] = self.local_length(mesh)
        if self.spill_dim is not None:
            shape[self.spill_dim] //= self.ranks_per_entry(mesh)
        if self.experts:
            shape[0] = self.expert_indices(mesh).stop - self.expert_indices(mesh).start
        return tuple(shape)

    def local_matrix(self, mesh: MeshLike) -> tuple[int, ...]:
        """Returns this rank's part as a matrix `(rows, columns)`, or `(experts, rows, columns)`.

        Raises:
            LayoutError: There is no matrix, or its rows and columns are not products of dims.
        """
        shape, local = self.shape[self.experts :], self.local_shape(mesh)[self.experts :]
        for split in range(len(shape) - 1, 0, -1):
            if (prod(shape[:split]), prod(shape[split:])) == self.matrix:
                of_expert = (prod(local[:split]), prod(local[split:]))
                return (len(self.expert_indices(mesh)), *of_expert) if self.experts else of_expert
        raise LayoutError(f"shape {self.shape} cannot be split into the dims of {self.matrix}")

    def expert_indices(self, mesh: MeshLike) -> range:
        """Returns the indices of the experts that this rank holds.

        Raises:
            LayoutError: The size of axis `ep` does not divide the number of experts.
        """
        count, ep = self.shape[0], mesh.axis("ep")
        if count % ep.size:
            raise LayoutError(
                f"{count} experts cannot be cut into {ep.size} equal parts over axis 'ep': "
                f"choose a degree that divides {count}"
            )
        length = count // ep.size
        return range(ep.index * length, (ep.index + 1) * length)

    def shard_boxes(self, mesh: MeshLike) -> tuple[ShardBox, ...]:
        """Returns the boxes that this rank holds; none if it holds only padding."""
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
        """Returns the boxes of the global tensor that this rank holds; none if only padding."""
        return tuple(piece.box for piece in self.shard_boxes(mesh))

    def box(self, mesh: MeshLike) -> Box:
        """Returns the box that this rank holds, with `numel` 0 if it holds only padding."""
        boxes = self.boxes(mesh)
        return boxes[0] if boxes else Box(self.shape, (0,) * len(self.shape))

    def replica(self, mesh: MeshLike, *, sharded: bool = False) -> int:
        """Returns the replica number of this rank; a checkpoint stores replica 0.

        Ranks that hold the same boxes have different replica numbers.

        Args:
            mesh: Mesh of this rank.
            sharded: Whether data-parallel ranks hold one shard each. Replicas are then ranks with
                the same shard. Defaults to False.

        Raises:
            LayoutError: Replicas of a parameter cut over this axis have no numbers.
        """
        axes = _REPLICA_AXES.get((self.axis, self.experts))
        if axes is None:
            kind = "experts" if self.experts else "a parameter"
            raise LayoutError(f"replicas of {kind} cut over axis {self.axis!r} have no numbers")
        names = axes.shard if sharded else axes.whole
        replica_axes = [mesh.axis(name) for name in names if mesh.has_axis(name)]
        if self.tied is not None and mesh.has_axis(self.tied):
            replica_axes.insert(0, mesh.axis(self.tied))
        number = 0
        for axis in replica_axes:
            number = number * axis.size + axis.index
        return number
