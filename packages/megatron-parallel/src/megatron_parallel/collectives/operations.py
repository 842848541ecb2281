"""Communication over one axis of the mesh.

The plain collectives are torch's with an `Axis` in place of a group. Over an axis of size 1 they
return the tensor they were given, so nothing is copied and nothing waits. They work in every dtype
the backend knows, float64 included (Gloo on CPUs, NCCL on GPUs). `send` and `receive` move a tensor
from one rank of the axis to another; ranks are given by their index on the axis.

A rank that never arrives is a `CollectiveError` after the time-out the mesh was bound with: one
line that names the rank, the axis and the operation. All of this is counted (`Mesh.counting`);
`purpose` says in words what a message is for, and appears in both. In code that `torch.compile` has
turned into a graph, collectives are part of the graph: there the backend's own error is raised.

The region mappings are pairs: what happens in the forward pass, and its transpose in the backward
pass. They mark the borders between a region where all ranks of an axis hold the same activations
and one where each holds its part (Shoeybi et al. 2019, section 3; Korthikanti et al. 2022 for the
sequence-parallel pair). They can be differentiated once.

| mapping | forward | backward |
|---|---|---|
| `copy_to_axis` | identity | all-reduce |
| `reduce_from_axis` | all-reduce | identity |
| `gather_from_axis` | all-gather along `dim` | own part |
| `scatter_to_axis` | own part along `dim` | all-gather |
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
from megatron_parallel.collectives.failure import raise_collective_errors
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.axes import Axis

ReduceOp = Literal["sum", "max", "min"]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(
    t: Shaped[Tensor, "*shape"], axis: Axis, op: ReduceOp = "sum", *, purpose: str = ""
) -> Shaped[Tensor, "*shape"]:
    """Reduces `t` over the axis, in place, and returns it."""
    if axis.size > 1:
        with _communicating(axis, "all_reduce", t, purpose):
            dist.all_reduce(t, _OPS[op], group=axis.process_group)
    return t


def all_gather(
    t: Shaped[Tensor, "..."], axis: Axis, dim: int = 0, *, purpose: str = ""
) -> Shaped[Tensor, "..."]:
    """Concatenates the equal parts of all ranks along `dim`, in the order of the axis."""
    if axis.size == 1:
        return t
    part = t.movedim(dim, 0).contiguous()
    whole = part.new_empty((axis.size * part.shape[0], *part.shape[1:]))
    with _communicating(axis, "all_gather", part, purpose):
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
    """Reduces over the axis and keeps this rank's part along `dim`, which the size must divide."""
    if axis.size == 1:
        return t
    whole = t.movedim(dim, 0).contiguous()
    part = whole.new_empty((_part_length(t, axis, dim), *whole.shape[1:]))
    with _communicating(axis, "reduce_scatter", whole, purpose):
        _compat.reduce_scatter(part, whole, _OPS[op], axis.process_group)
    return part.movedim(0, dim)


def broadcast(
    t: Shaped[Tensor, "*shape"], axis: Axis, source: int = 0, *, purpose: str = ""
) -> Shaped[Tensor, "*shape"]:
    """Overwrites `t` with that of the member whose index on the axis is `source`; return it."""
    if axis.size > 1:
        with _communicating(axis, "broadcast", t, purpose):
            dist.broadcast(t, axis.ranks[source], group=axis.process_group)
    return t


def send(t: Shaped[Tensor, "..."], axis: Axis, to: int, *, purpose: str = "") -> None:
    """Sends `t` to the member whose index on the axis is `to`, which must `receive` it.

    Returns when `t` may be overwritten, which can be before it has arrived. Raises `LayoutError` if
    there is no such other member.
    """
    peer = _peer(axis, to, "sent to")
    t = t.contiguous()
    with _between(axis, "send", f"to rank {peer}", t, purpose, axis.ranks[axis.index], peer):
        dist.send(t, peer, group=axis.process_group)


def receive(
    t: Shaped[Tensor, "*shape"], axis: Axis, source: int, *, purpose: str = ""
) -> Shaped[Tensor, "*shape"]:
    """Overwrites `t` with what the member whose index is `source` sends; return it.

    Both must have the same shape and dtype: backends do not compare them. Raises `LayoutError` if
    there is no such other member.
    """
    peer = _peer(axis, source, "received from")
    buffer = t if t.is_contiguous() else torch.empty_like(t, memory_format=torch.contiguous_format)
    with _between(axis, "receive", f"from rank {peer}", t, purpose, peer, axis.ranks[axis.index]):
        dist.recv(buffer, peer, group=axis.process_group)
    return t if buffer is t else t.copy_(buffer)


def _peer(axis: Axis, index: int, what: str) -> int:
    if index == axis.index or not 0 <= index < axis.size:
        raise LayoutError(
            f"nothing can be {what} index {index} of axis {axis.name!r}: it has {axis.size} ranks, "
            f"of which this is index {axis.index}"
        )
    return axis.ranks[index]


def _communicating(
    axis: Axis, operation: str, payload: Tensor, purpose: str
) -> raise_collective_errors:
    """Around a collective: it is counted, and its failure is named."""
    operation = f"{operation} of {purpose}" if purpose else operation
    axis.count(operation, payload)
    return raise_collective_errors(axis, operation, payload)


def _between(
    axis: Axis, verb: str, whom: str, payload: Tensor, purpose: str, source: int, target: int
) -> raise_collective_errors:
    """Around one end of a message from one rank to another."""
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
    """Enters a parallel region: identity; the gradients of all ranks are summed."""
    return x if axis.size == 1 else _apply(_CopyTo, x, axis)


def reduce_from_axis(x: Float[Tensor, "*shape"], axis: Axis) -> Float[Tensor, "*shape"]:
    """Leaves a parallel region: partial sums of all ranks are added; the gradient is identity."""
    return x if axis.size == 1 else _apply(_ReduceFrom, x, axis)


def gather_from_axis(x: Float[Tensor, "..."], axis: Axis, dim: int = -1) -> Float[Tensor, "..."]:
    """Concatenates parts along `dim`; a rank's gradient is its part of the (common) gradient."""
    return x if axis.size == 1 else _apply(_GatherFrom, x, axis, dim)


def scatter_to_axis(x: Float[Tensor, "..."], axis: Axis, dim: int = -1) -> Float[Tensor, "..."]:
    """Keeps this rank's part along `dim`; the gradient parts are concatenated."""
    return x if axis.size == 1 else _apply(_ScatterTo, x, axis, dim)


def gather_sequence(x: Float[Tensor, "part ..."], axis: Axis) -> Float[Tensor, "sequence ..."]:
    """Parts `[s/n, ...]` to all of `[s, ...]`, on entering a tensor-parallel region."""
    return x if axis.size == 1 else _apply(_GatherSequence, x, axis)


def scatter_sequence(x: Float[Tensor, "sequence ..."], axis: Axis) -> Float[Tensor, "part ..."]:
    """Partial sums `[s, ...]` to their sum's part `[s/n, ...]`, on leaving the region again."""
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
    """Sums over the axis in memory of its own: autograd may hand out views of others' tensors."""
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
