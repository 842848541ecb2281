"""One bucket: flat storage, a view of it for each parameter, and a reduction in flight."""

import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.nn import Parameter

from megatron_parallel.collective_failure import naming_failures
from megatron_parallel.data_parallel.plan import BucketPlan
from megatron_parallel.mesh import Axis

OPERATION: Final = "all_reduce of gradients"
"""What the sum of a bucket is called in `Traffic`."""


class Reduction(NamedTuple):
    """What one sum over an axis did in the last step.

    Attributes:
        axis: Name of the axis.
        parameters: Names of the parameters in the bucket, in backward order.
        nbytes: Size of the bucket.
        launched: When the sum started (`time.perf_counter`).
        waited: Seconds that `finish` waited for it: communication that nothing hid.
    """

    axis: str
    parameters: tuple[str, ...]
    nbytes: int
    launched: float
    waited: float


class Bucket:
    """Gradients of a few parameters, and their sum over an axis, then over `further` ones.

    Of a parameter in full precision, `.grad` is the gradient: the first micro-batch's is copied
    into the bucket, `.grad` becomes the view of it, and autograd adds the others in place. Of a
    parameter in low precision, `.grad` is what has not been added to the bucket yet.

    A bucket that neither sums nor widens anything has no storage (`flat` is None): the gradients
    stay where autograd puts them.
    """

    def __init__(
        self,
        label: str,
        plan: BucketPlan,
        parameters: Mapping[str, Parameter],
        axis: Axis,
        further: Sequence[Axis],
    ) -> None:
        self.label = label
        self.plan = plan
        self.axis = axis
        self.further = tuple(other for other in further if other.size > 1)
        self.parameters = {slot.name: parameters[slot.name] for slot in plan.slots}
        self.awaited: set[str] = set()
        self.launched = False
        self.reductions: list[Reduction] = []
        self._work: tuple[dist.Work, float] | None = None
        self._widened = {n for n, p in self.parameters.items() if p.dtype != plan.dtype}
        self._empty = set(self._widened)  # of those, whose views hold nothing of this step yet
        self.flat: Tensor | None = None
        self.views: dict[str, Tensor] = {}
        if axis.size > 1 or self.further or self._widened:
            self.flat = torch.zeros(plan.numel, dtype=plan.dtype, device=plan.device)
            self.views = {
                slot.name: self.flat[slot.start : slot.stop].view(slot.shape) for slot in plan.slots
            }

    @torch.no_grad()
    def absorb(self, name: str) -> None:
        """Bring what autograd left on `.grad` into the bucket."""
        parameter, view = self.parameters[name], self.views[name]
        gradient = parameter.grad
        if gradient is None or gradient is view:
            return
        if name not in self._widened:
            view.copy_(gradient)
            parameter.grad = view
            return
        if name in self._empty:
            view.copy_(gradient)
            self._empty.remove(name)
        else:
            view.add_(gradient)
        parameter.grad = None

    def launch(self) -> None:
        """Start the sum over the axis; nothing may be added from now on."""
        self.launched = True
        if self.flat is None:
            return
        for name, view in self.views.items():
            self.absorb(name)
            self._fill_if_empty(name, view)
        if self.axis.size > 1:
            start = time.perf_counter()
            self.axis.count(OPERATION, self.flat)
            with naming_failures(self.axis, self.operation):
                work = dist.all_reduce(self.flat, group=self.axis.bound, async_op=True)
            if work is not None:
                self._work = work, start

    def _fill_if_empty(self, name: str, view: Tensor) -> None:
        """Zero the gradient of a parameter that no backward pass of the step reached."""
        if name in self._empty:
            view.zero_()
            self._empty.remove(name)
        elif name not in self._widened and self.parameters[name].grad is None:
            self.parameters[name].grad = view.zero_()

    @property
    def done(self) -> bool:
        """Whether the sum over the axis was started and is there."""
        return self.launched and (self._work is None or self._work[0].is_completed())

    def wait(self) -> None:
        """Return when the sum is there."""
        if self._work is None:
            return
        work, launched = self._work
        start = time.perf_counter()
        with naming_failures(self.axis, self.operation):
            work.wait()
        self._work = None
        self._record(self.axis, launched, start)

    def sum_further(self) -> None:
        """Sum over the further axes, after `wait`: partial gradients, then twins of a tied weight.

        The ranks of such an axis have summed over their own data-parallel ranks by then, in buckets
        of equal length, so whatever shard of the bucket a rank keeps, the others keep the same.
        """
        if self.flat is None:
            return
        for axis in self.further:
            start = time.perf_counter()
            axis.count(OPERATION, self.flat)
            with naming_failures(axis, self.operation):
                dist.all_reduce(self.flat, group=axis.bound)
            self._record(axis, start, start)

    def gradients(self) -> dict[str, Float[Tensor, "..."]]:
        """By name, in main precision; zero where the backward pass came to nothing."""
        if self.flat is not None:
            return dict(self.views)
        return {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self.parameters.items()
        }

    def clear(self) -> None:
        """Forget all gradients. Nothing is written: the next ones overwrite the old."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self._empty = set(self._widened)
        self.awaited = set()
        self.launched = False
        self.reductions = []

    @property
    def operation(self) -> str:
        """What it does on an axis, in words for errors."""
        return f"all_reduce of gradient bucket {self.label} ({self.plan.slots[0].name!r} ...)"

    def _record(self, axis: Axis, launched: float, waiting_since: float) -> None:
        nbytes = 0 if self.flat is None else self.flat.nbytes
        waited = time.perf_counter() - waiting_since
        self.reductions.append(
            Reduction(axis.name, tuple(self.parameters), nbytes, launched, waited)
        )
