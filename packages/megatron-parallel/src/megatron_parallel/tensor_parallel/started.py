"""Collectives of layers that are started now and waited for later."""

from torch import Tensor

from megatron_parallel import _compat
from megatron_parallel.axes import Axis
from megatron_parallel.errors import LayoutError
from megatron_parallel.started import Started


def start_all_reduce(t: Tensor, axis: Axis) -> Started:
    """Starts summing `t` over the axis, in place."""
    return Started(axis, "all_reduce", t, t, lambda: _compat.start_all_reduce(t, axis.bound))


def start_all_gather(part: Tensor, axis: Axis) -> Started:
    """Starts concatenating the parts of all ranks along dim 0."""
    own = part.contiguous()
    whole = own.new_empty((axis.size * own.shape[0], *own.shape[1:]))
    return Started(
        axis, "all_gather", own, whole, lambda: _compat.start_all_gather(whole, own, axis.bound)
    )


def start_reduce_scatter(whole: Tensor, axis: Axis) -> Started:
    """Starts summing over the axis; the result is this rank's part along dim 0."""
    if whole.shape[0] % axis.size:
        raise LayoutError(
            f"dim 0 of shape {tuple(whole.shape)} cannot be cut into {axis.size} equal parts "
            f"over axis {axis.name!r}"
        )
    given = whole.contiguous()
    part = given.new_empty((given.shape[0] // axis.size, *given.shape[1:]))
    return Started(
        axis,
        "reduce_scatter",
        given,
        part,
        lambda: _compat.start_reduce_scatter(part, given, axis.bound),
    )
