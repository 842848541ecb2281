"""Collectives that run asynchronously: started now, waited for later, with work in between."""

import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor

from megatron_parallel import _compat
from megatron_parallel.collectives.exposed_time import ExposedTime
from megatron_parallel.collectives.failure import raise_collective_errors
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.axes import Axis
from megatron_parallel.side_stream import SideStream


@runtime_checkable
class Work(Protocol):
    """Handle that torch returns for an asynchronous collective."""

    def wait(self) -> object:
        """Blocks until the collective is complete; raises the error of the backend."""

    def is_completed(self) -> bool:
        """Returns whether the collective is complete."""


class AsyncCollective:
    """An asynchronous collective. Its tensors must not be used before `wait`.

    Attributes:
        axis: Axis of the collective.
        operation: Name of the operation in `Traffic`.
        nbytes: Size of the payload in bytes.
        start_time: When the collective was started, by `time.perf_counter`.
        exposed: How long the device waited for it.
    """

    __slots__ = (
        "_naming",
        "_result",
        "_work",
        "axis",
        "exposed",
        "nbytes",
        "operation",
        "start_time",
    )

    def __init__(
        self,
        axis: Axis,
        operation: str,
        payload: Tensor,
        result: Tensor,
        collective: Callable[[], Work],
        *,
        description: str = "",
    ) -> None:
        """Starts the collective.

        Args:
            axis: Axis of the collective.
            operation: Name of the operation in `Traffic`.
            payload: Input of the collective.
            result: Output of the collective, which `wait` returns.
            collective: Starts the collective.
            description: Name of the collective in errors. Defaults to operation, shape and dtype.
        """
        axis.count(operation, payload)
        self.axis, self.operation, self.nbytes = axis, operation, payload.nbytes
        self.exposed = ExposedTime(payload.device)
        self._result = result
        self._naming = (
            raise_collective_errors(axis, description)
            if description
            else raise_collective_errors(axis, operation, payload)
        )
        self.start_time = time.perf_counter()
        with self._naming.for_launch():
            self._work = collective()

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the device waited. On a CUDA device, blocks until the wait is over."""
        return self.exposed.seconds

    @property
    def is_completed(self) -> bool:
        """Whether the collective is complete."""
        return self._work.is_completed()

    def wait(self, side: SideStream | None = None) -> Tensor:
        """Waits for the collective and returns its result.

        Args:
            side: The stream on which `wait_on_stream` was called, if it was.

        Raises:
            CollectiveError: A rank does not take part.
        """
        if side is None:
            with self._naming, self.exposed.measure():
                self._work.wait()
        else:
            with self.exposed.measure():
                side.join()
        return self._result

    def wait_on_stream(self) -> None:
        """Lets the current stream, a side stream, wait for the collective.

        Raises:
            CollectiveError: A rank does not take part.
        """
        with self._naming:
            self._work.wait()


def start_all_reduce(t: Tensor, axis: Axis) -> AsyncCollective:
    """Starts an in-place sum of `t` over the axis."""
    return AsyncCollective(
        axis, "all_reduce", t, t, lambda: _compat.start_all_reduce(t, axis.process_group)
    )


def start_all_gather(part: Tensor, axis: Axis) -> AsyncCollective:
    """Starts an all-gather along dim 0."""
    shard = part.contiguous()
    gathered = shard.new_empty((axis.size * shard.shape[0], *shard.shape[1:]))
    return AsyncCollective(
        axis,
        "all_gather",
        shard,
        gathered,
        lambda: _compat.start_all_gather(gathered, shard, axis.process_group),
    )


def start_reduce_scatter(whole: Tensor, axis: Axis) -> AsyncCollective:
    """Starts a reduce-scatter along dim 0.

    Raises:
        LayoutError: The axis size does not divide dim 0.
    """
    if whole.shape[0] % axis.size:
        raise LayoutError(
            f"dim 0 of shape {tuple(whole.shape)} cannot be cut into {axis.size} equal parts "
            f"over axis {axis.name!r}"
        )
    given = whole.contiguous()
    part = given.new_empty((given.shape[0] // axis.size, *given.shape[1:]))
    return AsyncCollective(
        axis,
        "reduce_scatter",
        given,
        part,
        lambda: _compat.start_reduce_scatter(part, given, axis.process_group),
    )
