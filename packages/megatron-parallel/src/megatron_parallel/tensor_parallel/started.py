"""Collectives of layers that are started now and waited for later, with work in between."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from megatron_parallel import _compat
from megatron_parallel.axes import Axis
from megatron_parallel.collective_failure import naming_failures
from megatron_parallel.errors import LayoutError


@runtime_checkable
class Work(Protocol):
    """What torch gives for a collective that runs by itself."""

    def wait(self) -> object:
        """Return when it is there; raises what the backend raises."""


class Started:
    """A collective on its way; nothing may touch its tensors before `wait`."""

    __slots__ = ("_axis", "_operation", "_payload", "_result", "_work")

    def __init__(
        self, axis: Axis, operation: str, payload: Tensor, result: Tensor, work: Work
    ) -> None:
        self._axis = axis
        self._operation = operation
        self._payload = payload
        self._result = result
        self._work = work

    def wait(self) -> Tensor:
        """The result, once it is there; a rank that is missing is a `CollectiveError`."""
        with naming_failures(self._axis, self._operation, self._payload):
            self._work.wait()
        return self._result


def start_all_reduce(t: Tensor, axis: Axis) -> Started:
    """Start summing `t` over the axis, in place."""
    axis.count("all_reduce", t)
    with naming_failures(axis, "all_reduce", t):
        work = _compat.start_all_reduce(t, axis.bound)
    return Started(axis, "all_reduce", t, t, work)


def start_all_gather(part: Tensor, axis: Axis) -> Started:
    """Start concatenating the parts of all ranks along dim 0."""
    part = part.contiguous()
    whole = part.new_empty((axis.size * part.shape[0], *part.shape[1:]))
    axis.count("all_gather", part)
    with naming_failures(axis, "all_gather", part):
        work = _compat.start_all_gather(whole, part, axis.bound)
    return Started(axis, "all_gather", part, whole, work)


def start_reduce_scatter(whole: Tensor, axis: Axis) -> Started:
    """Start summing over the axis; the result is this rank's part along dim 0."""
    if whole.shape[0] % axis.size:
        raise LayoutError(
            f"dim 0 of shape {tuple(whole.shape)} cannot be cut into {axis.size} equal parts "
            f"over axis {axis.name!r}"
        )
    whole = whole.contiguous()
    part = whole.new_empty((whole.shape[0] // axis.size, *whole.shape[1:]))
    axis.count("reduce_scatter", whole)
    with naming_failures(axis, "reduce_scatter", whole):
        work = _compat.start_reduce_scatter(part, whole, axis.bound)
    return Started(axis, "reduce_scatter", whole, part, work)
