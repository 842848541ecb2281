"""One bucket: flat storage, a view of it for each parameter, and a reduction in flight."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import Parameter

from megatron_parallel import _compat
from megatron_parallel.collectives.async_collective import AsyncCollective
from megatron_parallel.collectives.exposed_time import ExposedTime
from megatron_parallel.data_parallel.config import DEFAULT_CONFIG, DataParallelConfig
from megatron_parallel.data_parallel.finite import NonFiniteGradient
from megatron_parallel.data_parallel.plan import BucketPlan
from megatron_parallel.data_parallel.reduction import (
    AsyncCollectives,
    CollectiveSequence,
    ReductionAxes,
    all_reduce_bucket,
    reduce_in_bf16,
    reduce_scatter_bucket,
)
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.axes import Axis
from megatron_parallel.side_stream import SideStream

PURPOSE: Final = "gradients"
"""Purpose of the reductions' collectives, as reported in `Traffic`."""


class BucketCollective(NamedTuple):
    """What one collective of a bucket did in the last step.

    Attributes:
        axis: Name of the axis.
        operation: For example `all_reduce of gradients`.
        parameters: Names of the parameters in the bucket, in backward order.
        nbytes: Bytes of the input.
        launched: When it started (`time.perf_counter`).
        exposed: How long the device waited for it: communication that was not hidden.
    """

    axis: str
    operation: str
    parameters: tuple[str, ...]
    nbytes: int
    launched: float
    exposed: ExposedTime

    @property
    def exposed_seconds(self) -> float:
        """Seconds of `exposed`. On CUDA devices, reading them synchronizes with the stream."""
        return self.exposed.seconds

    @classmethod
    def of(cls, started: AsyncCollective, parameters: Iterable[str]) -> "BucketCollective":
        """Returns the record of a collective that has been waited for."""
        return cls(
            started.axis.name,
            started.operation,
            tuple(parameters),
            started.nbytes,
            started.start_time,
            started.exposed,
        )


class Bucket:
    """Gradients of a few parameters, reduced over `axes`, then over `extra_axes`.

    For a parameter in main precision, `.grad` is the gradient: the first micro-batch's gradient is
    copied into the bucket, `.grad` becomes the view of it, and autograd adds the others in place.
    For a low-precision parameter, `.grad` holds only what has not been added to the bucket yet. A
    fused product adds a gradient itself, into its `accumulation_target`.

    On a CUDA device, the collectives of a reduction and what runs between them are queued at once,
    on a stream of the bucket, and the backward pass continues beside them. On a CPU the host starts
    one after another.

    A sharded bucket reduces each rank's shard only; afterwards the rest of `flat` is undefined, but
    on a CUDA device it keeps this rank's own gradients. A bucket that neither reduces nor has
    low-precision parameters has no storage (`flat` is None): gradients stay where autograd puts
    them.
    """

    def __init__(
        self,
        label: str,
        plan: BucketPlan,
        parameters: Mapping[str, Parameter],
        axes: ReductionAxes,
        extra_axes: Sequence[Axis],
        config: DataParallelConfig = DEFAULT_CONFIG,
    ) -> None:
        sharded = config.use_distributed_optimizer
        self.label = label
        self.plan = plan
        self.collectives = AsyncCollectives(
            PURPOSE, f"gradient bucket {label} ({plan.slots[0].name!r} ...)"
        )
        self.axes = axes
        self.extra_axes = tuple(other for other in extra_axes if other.size > 1)
        self.sharded = sharded
        self.checks_finite = config.check_for_nan_in_loss_and_grad
        self.sends_bf16 = (
            config.ddp_reduce_scatter_with_fp32_accumulation
            and plan.parameter_dtype == torch.bfloat16
        )
        self.parameters = {slot.name: parameters[slot.name] for slot in plan.slots}
        self.pending: set[str] = set()
        self.launched = False
        self._own_largest: Tensor | None = None  # finite only if gradients in `overwritten` are
        self.reductions: list[BucketCollective] = []
        self._sum: CollectiveSequence | None = None
        self._started: AsyncCollective | None = None  # the collective in flight
        self._side = SideStream.of(plan.device)
        self._low_precision = {n for n, p in self.parameters.items() if p.dtype != plan.dtype}
        self._unwritten = set(self._low_precision)  # those without a gradient in this step yet
        self.closed = False
        self.dummy_gradient = torch.zeros((), dtype=plan.parameter_dtype, device=plan.device)
        """Expanded, what autograd gets as the gradient of a weight whose product has added it."""
        self._fused: set[str] = set()
        self._saved_grads: dict[str, Tensor | None] | None = None  # of `_fused`, in a weight half
        self.flat: Tensor | None = None
        self.shard: Tensor | None = None
        self.views: dict[str, Tensor] = {}
        if self._reduces or self._low_precision:
            self.flat = torch.zeros(plan.numel, dtype=plan.dtype, device=plan.device)
            self.shard = self.flat[slice(*plan.shard_range(axes.inner.index))]
            self.views = {
                slot.name: self.flat[slot.start : slot.stop].view(slot.shape) for slot in plan.slots
            }

    @torch.no_grad()
    def collect_gradient(self, name: str) -> None:
        """Moves a gradient that autograd left on `.grad` into the bucket."""
        parameter, view = self.parameters[name], self.views[name]
        gradient = parameter.grad
        if gradient is None or gradient is view:
            return
        if name not in self._low_precision:
            view.copy_(gradient)
            parameter.grad = view
            return
        if name in self._unwritten:
            view.copy_(gradient)
            self._unwritten.remove(name)
        else:
            view.add_(gradient)
        parameter.grad = None

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Moves all gradients that autograd left on `.grad` into the bucket, in one operation."""
        copied: list[tuple[Tensor, Tensor]] = []
        added: list[tuple[Tensor, Tensor]] = []
        for name, view in self.views.items():
            parameter = self.parameters[name]
            gradient = parameter.grad
            if gradient is None or gradient is view:
                continue
            low_precision = name in self._low_precision
            first = not low_precision or name in self._unwritten
            (copied if first else added).append((view, gradient))
            self._unwritten.discard(name)
            parameter.grad = None if low_precision else view
        for pairs, move in ((copied, torch._foreach_copy_), (added, torch._foreach_add_)):
            if pairs:
                views, gradients = zip(*pairs, strict=True)
                move(views, gradients)

    def mark_fused(self, name: str) -> None:
        """Records that products add the gradient of this weight into its `accumulation_target`."""
        self._fused.add(name)

    def accumulation_target(self, name: str) -> tuple[Tensor, bool]:
        """Returns the tensor to which a product adds the gradient of a weight.

        Returns also whether the product is the first one there and overwrites the tensor.

        Raises:
            LayoutError: The bucket's reduction has started.
        """
        if self.launched:
            raise late_gradient_error(name)
        if name in self._low_precision:
            first = name in self._unwritten
            self._unwritten.discard(name)
            return self.views[name], first
        parameter = self.parameters[name]
        if self._saved_grads is None and self.views:
            self.collect_gradient(name)
        held = parameter.grad if self._saved_grads is None else self._saved_grads[name]
        if held is not None:
            return held, False
        held = self.views[name] if self.views else torch.empty_like(parameter, requires_grad=False)
        if self._saved_grads is None:
            parameter.grad = held
        else:
            self._saved_grads[name] = held
        return held, True

    @property
    def in_weight_backward(self) -> bool:
        """Whether the weight half of a split backward pass is running."""
        return self._saved_grads is not None

    def begin_weight_backward(self) -> None:
        """Prepares for the weight half of a split pass, which adds returned gradients to `.grad`.

        The gradient returned for a fused weight is `dummy_gradient`. Its `.grad` is set aside,
        since adding to it would cost the pass over memory that fusion saves.
        """
        self._saved_grads = {name: self.parameters[name].grad for name in self._fused}
        for name in self._fused:
            self.parameters[name].grad = None

    @torch.no_grad()
    def end_weight_backward(self) -> None:
        """Restores `.grad` of fused weights after the weight half; collects the other gradients."""
        aside, self._saved_grads = self._saved_grads or {}, None
        for name, held in aside.items():
            parameter = self.parameters[name]
            left, parameter.grad = parameter.grad, held
            if left is None or _compat.storage_identity(left) == _compat.storage_identity(
                self.dummy_gradient
            ):
                continue
            if held is None:  # a use of the weight that is not fused
                parameter.grad = left
            else:
                held.add_(left)
        self.collect_gradients()

    def complete(self) -> None:
        """Collects all gradients; nothing may be added to the bucket from now on."""
        self.launched = True
        self.collect_gradients()
        for name, view in self.views.items():
            self._fill_if_empty(name, view)

    @property
    def overwritten(self) -> Tensor | None:
        """This rank's own gradients that the reduction overwrites; None without a reduction.

        For a sharded bucket on a CUDA device that is its shard: NCCL only reads the rest of `flat`.
        Gloo may write to it.
        """
        if not self._reduces:
            return None
        return self.shard if self._keeps_rest else self.flat

    @property
    def _reduces(self) -> bool:
        return self.axes.size > 1 or bool(self.extra_axes)

    @property
    def _keeps_rest(self) -> bool:
        return self.sharded and self.plan.device.type == "cuda"

    def launch(self, own_largest: Tensor | None) -> None:
        """Starts the reduction of a complete bucket.

        Args:
            own_largest: Finite only if all of `overwritten` is; None if it is not to be checked.
        """
        if self.flat is None or self.shard is None:
            return
        self._own_largest = own_largest
        operands = (self.flat, self.shard, self.axes, self.collectives)
        if self.sends_bf16:
            self._sum = reduce_in_bf16(*operands, whole=not self.sharded)
        else:
            self._sum = (
                reduce_scatter_bucket(*operands) if self.sharded else all_reduce_bucket(*operands)
            )
        self._begin()

    def _fill_if_empty(self, name: str, view: Tensor) -> None:
        """Sets the gradient of a parameter that no backward pass of the step reached to zero."""
        if name in self._unwritten:
            view.zero_()
        elif name not in self._low_precision and self.parameters[name].grad is None:
            self.parameters[name].grad = view.zero_()

    def _begin(self) -> None:
        """Starts the first collective of the reduction; on a side stream, all of them."""
        if self._side is None:
            self._proceed()
            return
        with self._side.running():
            for started in self._sum or ():
                if self._started is not None:
                    self._record(self._started)
                self._started = started
                started.wait_on_stream()
        self._sum = None

    def _proceed(self) -> None:
        """Starts the next collective of the reduction."""
        self._started = None if self._sum is None else next(self._sum, None)
        if self._started is None:
            self._sum = None

    @property
    def needs_several_collectives(self) -> bool:
        """Whether the host starts several collectives for the reduction, one after another."""
        several = self.axes.outer is not None or (self.sends_bf16 and not self.sharded)
        return several and self._side is None

    @property
    def done(self) -> bool:
        """Whether the reduction has started and none of its collectives is in flight."""
        return self.launched and (self._started is None or self._started.is_completed)

    def advance(self) -> None:
        """Waits for the collective in flight and starts the next one of the reduction."""
        if self._started is not None:
            self._started.wait(self._side)
            self._record(self._started)
            self._proceed()

    def wait(self) -> None:
        """Returns when all sums that were started are complete."""
        while self._started is not None:
            self.advance()

    def reduce_extra_axes(self) -> None:
        """Starts the sums over `extra_axes`: partial gradients, then copies of a tied weight.

        The ranks of such an axis have by then summed over their own data-parallel ranks, in buckets
        of equal length. So all of them hold the same shard of the bucket.
        """
        self.wait()
        local = self.shard if self.sharded else self.flat
        if local is not None and self.extra_axes:
            self._sum = (self.collectives.all_reduce(local, axis) for axis in self.extra_axes)
            self._begin()

    def gradients(self) -> dict[str, Float[Tensor, "..."]]:
        """Returns main gradients by name; zero for a parameter that no backward pass reached.

        For a sharded bucket, returns this rank's ranges of them (`BucketPlan.split_shard`).
        """
        if self.sharded and self.shard is not None:
            return self.plan.split_shard(self.shard, self.axes.inner.index)
        if self.flat is not None:
            return dict(self.views)
        local = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self.parameters.items()
        }
        if self.sharded and not self.plan.whole:  # one rank, whose shard is the whole bucket
            return {name: gradient.view(-1) for name, gradient in local.items()}
        return local

    def shard_gradients(self) -> dict[str, Float[Tensor, "..."]]:
        """Returns the ranges in this rank's shard, also if the rank has whole gradients."""
        if self.shard is None:
            return self.gradients()
        return self.plan.split_shard(self.shard, self.axes.inner.index)

    def nonfinite_gradients(self) -> list[NonFiniteGradient]:
        """Returns summed gradients that are NaN or infinite, and whether this rank's own were."""
        own = self._own_nonfinite
        return [
            NonFiniteGradient(f"bucket {self.label}", name, bool(gradient.isnan().any()), own)
            for name, gradient in self.gradients().items()
            if not bool(gradient.isfinite().all())
        ]

    @property
    def _own_nonfinite(self) -> bool | None:
        """Whether this rank's own gradients were not finite; None if that was not checked."""
        if self.flat is not None and self.checks_finite and not self._reduces:
            return not bool(self.flat.isfinite().all())
        if self._own_largest is None or self.flat is None:
            return None
        found = bool(self._own_largest.isfinite())
        if self._keeps_rest:
            start, end = self.plan.shard_range(self.axes.inner.index)
            found = found and bool(self.flat[:start].isfinite().all())
            found = found and bool(self.flat[end:].isfinite().all())
        return not found

    def clear(self) -> None:
        """Drops all gradients. No memory is written: the next gradients overwrite it."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self._unwritten = set(self._low_precision)
        self.pending = set()
        self.launched = False
        self.reductions = []

    def close(self) -> None:
        """Leaves gradients to autograd from now on."""
        self.closed = True

    def _record(self, started: AsyncCollective) -> None:
        self.reductions.append(BucketCollective.of(started, self.parameters))


def late_gradient_error(name: str) -> LayoutError:
    """Returns the error for a gradient added after the reduction of its bucket has started."""
    return LayoutError(
        f"a gradient of {name!r} came after the reduction of its bucket had started: pass "
        "last=True only to the last backward pass of a step, and call zero() before the next step"
    )
