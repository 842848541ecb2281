"""A collective that is started now and waited for later, with work in between."""

import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor

from megatron_parallel.axes import Axis
from megatron_parallel.collective_failure import naming_failures
from megatron_parallel.stall import Stall


@runtime_checkable
class Work(Protocol):
    """What torch gives for a collective that runs by itself."""

    def wait(self) -> object:
        """Returns when it is there; raises what the backend raises."""

    def is_completed(self) -> bool:
        """Returns whether it is there."""


class Started:
    """A collective on its way; nothing may touch its tensors before `wait`.

    Attributes:
        axis: Who takes part.
        operation: What `Traffic` calls it.
        nbytes: Bytes handed in.
        since: When it started (`time.perf_counter`).
        stall: How long the device waited for it.
    """

    __slots__ = ("_naming", "_result", "_work", "axis", "nbytes", "operation", "since", "stall")

    def __init__(
        self,
        axis: Axis,
        operation: str,
        payload: Tensor,
        result: Tensor,
        collective: Callable[[], Work],
        *,
        told: str = "",
    ) -> None:
        """Starts it.

        Args:
            axis: Who takes part.
            operation: What `Traffic` calls it.
            payload: What is handed in.
            result: What `wait` returns.
            collective: Starts it.
            told: What an error calls it; by default operation, shape and dtype.
        """
        axis.count(operation, payload)
        self.axis, self.operation, self.nbytes = axis, operation, payload.nbytes
        self.stall = Stall(payload.device)
        self._result = result
        self._naming = (
            naming_failures(axis, told) if told else naming_failures(axis, operation, payload)
        )
        self.since = time.perf_counter()
        with self._naming.starting():
            self._work = collective()

    @property
    def waited(self) -> float:
        """Seconds that the device waited; on CUDA devices, reading them waits for the stream."""
        return self.stall.seconds

    @property
    def done(self) -> bool:
        """Whether it is there."""
        return self._work.is_completed()

    def wait(self) -> Tensor:
        """Returns the result, once it is there; a rank that is missing is a `CollectiveError`."""
        with self._naming, self.stall.waiting():
            self._work.wait()
        return self._result
