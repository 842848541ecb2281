"""Collectives over one axis of a mesh, and differentiable region mappings.

The collectives are those of torch, with an `Axis` instead of a process group. Over an axis of size
1 they return their input without copying. They support every dtype of the backend, including
float64 (Gloo on CPUs, NCCL on GPUs). `send` and `receive` move a tensor from one rank of the axis
to another. Ranks are given by their index on the axis.

If a rank does not take part within the time-out of the mesh, a `CollectiveError` names the rank,
the axis and the operation in one line. `Mesh.counting` counts all of this. `purpose` describes the
message in both. In code compiled by `torch.compile`, collectives are part of the graph, and the
error of the backend is raised.

A region mapping is a pair of a forward operation and its transpose in the backward pass. The
mappings are the borders between regions where all ranks of an axis hold the same activations and
regions where each rank holds a part (Shoeybi et al. 2019, section 3; Korthikanti et al. 2022 for
sequence parallelism). They can be differentiated once.

| mapping | forward | backward |
|---|---|---|
| `copy_to_axis` | identity | all-reduce |
| `reduce_from_axis` | all-reduce | identity |
| `gather_from_axis` | all-gather along `dim` | this rank's part |
| `scatter_to_axis` | this rank's part along `dim` | all-gather |
| `gather_sequence` | all-gather along dim 0 | reduce-scatter |
| `scatter_sequence` | reduce-scatter along dim 0 | all-gather |
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.autograd import Function

from megatron_parallel import _compat
from megatron_parallel.collectives.extremes import from_ordered, to_ordered
from megatron_parallel.collectives.failure import raise_collective_errors
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.axes import Axis

ReduceOp = Literal["sum", "max", "min"]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(
    t: Shaped[Tensor, "*shape"],
    axis: Axis,
    op: ReduceOp = "sum",
    *,
    purpose: str = "",
    keeps_nan: bool = True,
) -> Shaped[Tensor, "*shape"]:
    """Reduces `t` over the axis in place and returns it.

    Args:
        t: Numbers or integers.
        axis: The axis.
        op: How the values of ranks are combined.
        purpose: Describes the message.
        keeps_nan: Whether the maximum or minimum of numbers is NaN where a rank has NaN. Otherwise
            it depends on the backend, which may lose a NaN, but no operation is added to the
            collective.
    """
    if axis.size == 1:
        return t
    if op != "sum" and keeps_nan and t.is_floating_point():
        ordered = all_reduce(to_ordered(t, op), axis, op, purpose=purpose)
        return t.copy_(from_ordered(ordered, op, t.dtype))
    with _collective(axis, "all_reduce", t, purpose):
        dist.all_reduce(t, _OPS[op], group=axis.process_group)
    return t


def all_gather(
    t: Shaped[Tensor, "..."], axis: Axis, dim: int = 0, *, purpose: str = ""
) -> Shaped[Tensor, "..."]:
    """Concatenates the tensors of all ranks along `dim`, in the order of the axis.

    The tensors must have equal shapes.
    """
    if axis.size == 1:
        return t
    part = t.movedim(dim, 0).contiguous()
    whole = part.new_empty((axis.size * part.shape[0], *part.shape[1:]))
    with _collective(axis, "all_gather", part, purpose):
        _compat.all_gather(whole, part, axis.process_group)
    return whole.movedim(0, dim)


def reduce_scatter(
    t: Shaped[Tensor, "..."],
    axis: Axis,
    dim: int = 0,
    op: ReduceOp = "sum",
    *,
    purpose: str = "",
) -> Shaped[Tensor, "..."]:
    """Reduces `t` over the axis and returns this rank's part along `dim`.

    A maximum or minimum of numbers may lose a NaN, unlike that of `all_reduce`.

    Raises:
        LayoutError: The axis size does not divide the size of `dim`.
    """
    if axis.size == 1:
        return t
    whole = t.movedim(dim, 0).contiguous()
    part = whole.new_empty((_part_length(t, axis, dim), *whole.shape[1:]))
    with _collective(axis, "reduce_scatter", whole, purpose):
        _compat.reduce_scatter(part, whole, _OPS[op], axis.process_group)
    return part.movedim(0, dim)


def all_to_all(
    t: Shaped[Tensor, "ranks ..."], axis: Axis, *, purpose: str = ""
) -> Shaped[Tensor, "ranks ..."]:
    """Sends row `i` of `t` to the rank with index `i`; row `i` of the result is from that rank."""
    if axis.size == 1:
        return t
    t = t.contiguous()
    received = torch.empty_like(t)
    with _collective(axis, "all_to_all", t, purpose):
        dist.all_to_all_single(received, t, group=axis.process_group)
    return received


def broadcast(
    t: Shaped[Tensor, "*shape"], axis: Axis, source: int = 0, *, purpose: str = ""
) -> Shaped[Tensor, "*shape"]:
    """Overwrites `t` with the tensor of the rank with index `source` on the axis and returns it."""
    if axis.size > 1:
        with _collective(axis, "broadcast", t, purpose):
            dist.broadcast(t, axis.ranks[source], group=axis.process_group)
    return t


def send(t: Shaped[Tensor, "..."], axis: Axis, destination: int, *, purpose: str = "") -> None:
    """Sends `t` to the rank with index `destination` on the axis, which must call `receive`.

    Returns when `t` may be overwritten, which can be before it has arrived.

    Raises:
        LayoutError: `destination` is this rank or not an index of the axis.
    """
    peer = _peer(axis, destination, "sent to")
    t = t.contiguous()
    with _point_to_point(axis, "send", f"to rank {peer}", t, purpose, axis.ranks[axis.index], peer):
        dist.send(t, peer, group=axis.process_group)


def receive(
    t: Shaped[Tensor, "*shape"], axis: Axis, source: int, *, purpose: str = ""
) -> Shaped[Tensor, "*shape"]:
    """Overwrites `t` with the tensor sent by the rank with index `source` and returns it.

    Shape and dtype must be those of the sent tensor; backends do not compare them.

    Raises:
        LayoutError: `source` is this rank or not an index of the axis.
    """
    peer = _peer(axis, source, "received from")
    buffer = t if t.is_contiguous() else torch.empty_like(t, memory_format=torch.contiguous_format)
    with _point_to_point(
        axis, "receive", f"from rank {peer}", t, purpose, peer, axis.ranks[axis.index]
    ):
        dist.recv(buffer, peer, group=axis.process_group)
    return t if buffer is t else t.copy_(buffer)


def _peer(axis: Axis, index: int, what: str) -> int:
    if index == axis.index or not 0 <= index < axis.size:
        raise LayoutError(
            f"nothing can be {what} index {index} of axis {axis.name!r}, which has {axis.size} "
            f"ranks; this rank has index {axis.index}"
        )
    return axis.ranks[index]


def _collective(
    axis: Axis, operation: str, payload: Tensor, purpose: str
) -> raise_collective_errors:
    """Counts a collective and returns the context for it."""
    operation = f"{operation} of {purpose}" if purpose else operation
    axis.count(operation, payload)
    return raise_collective_errors(axis, operation, payload)


def _point_to_point(
    axis: Axis, verb: str, whom: str, payload: Tensor, purpose: str, source: int, target: int
) -> raise_collective_errors:
    """Counts a point-to-point message and returns the context for it."""
    operation = f"{verb} of {purpose}" if purpose else verb
    axis.count(operation, payload)
    return raise_collective_errors(
        axis,
        f"{operation} {whom}",
        payload,
        ranks=(source, target),
        match=f"{source} to {target} on axis {axis.name!r}",
    )


def copy_to_axis(x: Float[Tensor, "*shape"], axis: Axis) -> Float[Tensor, "*shape"]:
    """Enters a parallel region. Returns `x`; the backward pass sums the gradients of all ranks."""
    return x if axis.size == 1 else _apply(_CopyTo, x, axis)


def reduce_from_axis(x: Float[Tensor, "*shape"], axis: Axis) -> Float[Tensor, "*shape"]:
    """Leaves a parallel region. Sums `x` over the ranks; the gradient passes unchanged."""
    return x if axis.size == 1 else _apply(_ReduceFrom, x, axis)


def gather_from_axis(x: Float[Tensor, "..."], axis: Axis, dim: int = -1) -> Float[Tensor, "..."]:
    """Concatenates the parts of all ranks along `dim`.

    The gradient of a rank is its part of the output gradient, which is the same on all ranks.
    """
    return x if axis.size == 1 else _apply(_GatherFrom, x, axis, dim)


def scatter_to_axis(x: Float[Tensor, "..."], axis: Axis, dim: int = -1) -> Float[Tensor, "..."]:
    """Returns this rank's part along `dim`. The gradients of all ranks are concatenated."""
    return x if axis.size == 1 else _apply(_ScatterTo, x, axis, dim)


def gather_sequence(x: Float[Tensor, "part ..."], axis: Axis) -> Float[Tensor, "sequence ..."]:
    """Gathers `[s/n, ...]` to `[s, ...]`, on entering a tensor-parallel region."""
    return x if axis.size == 1 else _apply(_GatherSequence, x, axis)


def scatter_sequence(x: Float[Tensor, "sequence ..."], axis: Axis) -> Float[Tensor, "part ..."]:
    """Reduces and scatters partial sums `[s, ...]` to `[s/n, ...]`, on leaving such a region."""
    return x if axis.size == 1 else _apply(_ScatterSequence, x, axis)


def _part_length(t: Tensor, axis: Axis, dim: int) -> int:
    if t.shape[dim] % axis.size:
        raise LayoutError(
            f"dim {dim} of shape {tuple(t.shape)} cannot be cut into {axis.size} equal parts "
            f"over axis {axis.name!r}"
        )
    return t.shape[dim] // axis.size


def _own_part(t: Tensor, axis: Axis, dim: int) -> Tensor:
    length = _part_length(t, axis, dim)
    return t.narrow(dim, axis.index * length, length).contiguous()


def _sum(t: Tensor, axis: Axis) -> Tensor:
    """Returns the sum over the axis in new memory: autograd may pass views of other tensors."""
    return all_reduce(t.clone(memory_format=torch.contiguous_format), axis)


def _apply(function: type[Function], *args: object) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


class _CopyTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0], ctx.axis), None


class _ReduceFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return _sum(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _own_part(grads[0], ctx.axis, ctx.dim), None, None


class _ScatterTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _own_part(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grads[0], ctx.axis, ctx.dim), None, None


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grads[0], ctx.axis), None


class _ScatterSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0], ctx.axis), None
