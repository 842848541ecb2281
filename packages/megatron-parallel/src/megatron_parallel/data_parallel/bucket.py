"""One bucket: flat storage, a view of it for each parameter, and a sum in flight."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import Parameter

from megatron_parallel.collectives.async_collective import AsyncCollective
from megatron_parallel.collectives.exposed_time import ExposedTime
from megatron_parallel.data_parallel.config import DEFAULT_CONFIG, DataParallelConfig
from megatron_parallel.data_parallel.finite import NonFiniteGradient
from megatron_parallel.data_parallel.plan import BucketPlan
from megatron_parallel.data_parallel.reduction import (
    AsyncCollectives,
    ReductionAxes,
    Sum,
    all_reduce_bucket,
    reduce_in_bf16,
    reduce_scatter_bucket,
)
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.axes import Axis

PURPOSE: Final = "gradients"
"""What the messages of a sum are for, in `Traffic`."""


class BucketCollective(NamedTuple):
    """What one collective of a bucket did in the last step.

    Attributes:
        axis: Name of the axis.
        operation: For example `all_reduce of gradients`.
        parameters: Names of the parameters in the bucket, in backward order.
        nbytes: Bytes handed in.
        launched: When it started (`time.perf_counter`).
        exposed: How long the device waited for it: communication that nothing hid.
    """

    axis: str
    operation: str
    parameters: tuple[str, ...]
    nbytes: int
    launched: float
    exposed: ExposedTime

    @property
    def stall_seconds(self) -> float:
        """Seconds of `exposed`; on CUDA devices reading them waits for the stream."""
        return self.exposed.seconds

    @classmethod
    def of(cls, started: AsyncCollective, parameters: Iterable[str]) -> "BucketCollective":
        """Returns what a collective did that has been waited for."""
        return cls(
            started.axis.name,
            started.operation,
            tuple(parameters),
            started.nbytes,
            started.start_time,
            started.exposed,
        )


class Bucket:
    """Gradients of a few parameters, and their sum over a route, then over `further` axes.

    Of a parameter in full precision, `.grad` is the gradient: the first micro-batch's is copied
    into the bucket, `.grad` becomes the view of it, and autograd adds the others in place. Of a
    parameter in low precision, `.grad` is what has not been added to the bucket yet. The product
    that makes a fused gradient adds it up itself, where `place` says.

    A sharded bucket sums each rank's shard only; of `flat`, nothing but `shard` means anything
    after that. A bucket that neither sums nor widens has no storage (`flat` is None): the gradients
    stay where autograd puts them.
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
        self.checked = config.check_for_nan_in_loss_and_grad
        self.bf16_wire = (
            config.ddp_reduce_scatter_with_fp32_accumulation
            and plan.parameter_dtype == torch.bfloat16
        )
        self.parameters = {slot.name: parameters[slot.name] for slot in plan.slots}
        self.pending: set[str] = set()
        self.launched = False
        self._own_total: Tensor | None = None  # not finite if a gradient of this rank is not
        self.reductions: list[BucketCollective] = []
        self._sum: Sum | None = None
        self._started: AsyncCollective | None = None  # what the sum waits for
        self._widened = {n for n, p in self.parameters.items() if p.dtype != plan.dtype}
        self._empty = set(self._widened)  # of those, whose views hold nothing of this step yet
        self.closed = False
        self.dummy_gradient = torch.zeros((), dtype=plan.parameter_dtype, device=plan.device)
        """A gradient that a fused product has added up already is this number, expanded."""
        self._fused: set[str] = set()
        self._aside: dict[str, Tensor | None] | None = None  # `.grad` of those in a split pass
        self.flat: Tensor | None = None
        self.shard: Tensor | None = None
        self.views: dict[str, Tensor] = {}
        if axes.size > 1 or self.extra_axes or self._widened:
            self.flat = torch.zeros(plan.numel, dtype=plan.dtype, device=plan.device)
            self.shard = self.flat[slice(*plan.shard_range(axes.inner.index))]
            self.views = {
                slot.name: self.flat[slot.start : slot.stop].view(slot.shape) for slot in plan.slots
            }

    @torch.no_grad()
    def collect_gradient(self, name: str) -> None:
        """Brings what autograd left on `.grad` into the bucket."""
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

    def mark_fused(self, name: str) -> None:
        """Says that products add up the gradient of this weight, at its `place`."""
        self._fused.add(name)

    def accumulation_target(self, name: str) -> tuple[Tensor, bool]:
        """Where a product adds up the gradient of a weight, and whether it is the first one there.

        Raises `LayoutError` if the bucket has been handed to the other ranks.
        """
        if self.launched:
            raise late_gradient_error(name)
        if name in self._widened:
            first = name in self._empty
            self._empty.discard(name)
            return self.views[name], first
        parameter = self.parameters[name]
        if self._aside is None and self.views:
            self.collect_gradient(name)
        held = parameter.grad if self._aside is None else self._aside[name]
        if held is not None:
            return held, False
        held = self.views[name] if self.views else torch.empty_like(parameter, requires_grad=False)
        if self._aside is None:
            parameter.grad = held
        else:
            self._aside[name] = held
        return held, True

    @property
    def in_weight_backward(self) -> bool:
        """Whether the weight half of a split backward pass is under way."""
        return self._aside is not None

    def begin_weight_backward(self) -> None:
        """Before the weight half of a split pass, which adds what it is returned to `.grad`.

        Of fused gradients that is `nothing`: their `.grad` must not be in the way, or adding it
        would cost what was saved.
        """
        self._aside = {name: self.parameters[name].grad for name in self._fused}
        for name in self._fused:
            self.parameters[name].grad = None

    @torch.no_grad()
    def end_weight_backward(self) -> None:
        """After it."""
        aside, self._aside = self._aside or {}, None
        for name, held in aside.items():
            parameter = self.parameters[name]
            left, parameter.grad = parameter.grad, held
            if left is None or left.data_ptr() == self.dummy_gradient.data_ptr():
                continue
            if held is None:  # another use of the weight
                parameter.grad = left
            else:
                held.add_(left)
        for name in self.views:
            self.collect_gradient(name)

    def launch(self) -> None:
        """Starts the sum; nothing may be added from now on."""
        self.launched = True
        if self.flat is None or self.shard is None:
            return
        for name, view in self.views.items():
            self.collect_gradient(name)
            self._fill_if_empty(name, view)
        if self.checked:
            # Looked at only if something turns out wrong; of all tests the cheapest.
            self._own_total = self.flat.sum()
        operands = (self.flat, self.shard, self.axes, self.collectives)
        if self.bf16_wire:
            self._sum = reduce_in_bf16(*operands, whole=not self.sharded)
        else:
            self._sum = (
                reduce_scatter_bucket(*operands) if self.sharded else all_reduce_bucket(*operands)
            )
        self._proceed()

    def _fill_if_empty(self, name: str, view: Tensor) -> None:
        """Zeros the gradient of a parameter that no backward pass of the step reached."""
        if name in self._empty:
            view.zero_()
            self._empty.remove(name)
        elif name not in self._widened and self.parameters[name].grad is None:
            self.parameters[name].grad = view.zero_()

    def _proceed(self) -> None:
        """Starts the next collective of the sum."""
        if self._sum is not None:
            self._started = next(self._sum, None)
        if self._started is None:
            self._sum = None

    @property
    def needs_several_collectives(self) -> bool:
        """Whether its sum is several collectives, one after another."""
        return self.axes.outer is not None or (self.bf16_wire and not self.sharded)

    @property
    def done(self) -> bool:
        """Whether the sum was started and nothing of it is under way."""
        return self.launched and (self._started is None or self._started.is_completed)

    def advance(self) -> None:
        """Of a sum of several collectives, start the next one, when that before it is there."""
        if self._started is not None:
            self._wait(self._started)
            self._proceed()

    def wait(self) -> None:
        """Returns when the sum over the route is there."""
        while self._started is not None:
            self.advance()

    def reduce_extra_axes(self) -> None:
        """Sums over the further axes, after `wait`: partial gradients, then twins of a tied weight.

        The ranks of such an axis have summed over their own data-parallel ranks by then, in buckets
        of equal length, so whatever shard of the bucket a rank keeps, the others keep the same.
        """
        kept = self.shard if self.sharded else self.flat
        if kept is None:
            return
        for axis in self.extra_axes:
            self._wait(self.collectives.all_reduce(kept, axis))

    def gradients(self) -> dict[str, Float[Tensor, "..."]]:
        """By name, in main precision; zero where the backward pass came to nothing.

        Of a sharded bucket, what lies in this rank's shard (`BucketPlan.split_shard`).
        """
        if self.sharded and self.shard is not None:
            return self.plan.split_shard(self.shard, self.axes.inner.index)
        if self.flat is not None:
            return dict(self.views)
        where_autograd_puts_them = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self.parameters.items()
        }
        if self.sharded and not self.plan.whole:  # over one rank: its shard is all of them
            return {name: gradient.view(-1) for name, gradient in where_autograd_puts_them.items()}
        return where_autograd_puts_them

    def nonfinite_gradients(self) -> list[NonFiniteGradient]:
        """Summed gradients that are NaN or infinite, and whether this rank's own share was."""
        total = self._own_total
        own = None if total is None else not bool(total.isfinite())
        return [
            NonFiniteGradient(f"bucket {self.label}", name, bool(gradient.isnan().any()), own)
            for name, gradient in self.gradients().items()
            if not bool(gradient.isfinite().all())
        ]

    def clear(self) -> None:
        """Forgets all gradients. Nothing is written: the next ones overwrite the old."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self._empty = set(self._widened)
        self.pending = set()
        self.launched = False
        self.reductions = []

    def close(self) -> None:
        """Leaves gradients to autograd from now on."""
        self.closed = True

    def _wait(self, started: AsyncCollective) -> None:
        started.wait()
        self.reductions.append(BucketCollective.of(started, self.parameters))


def late_gradient_error(name: str) -> LayoutError:
    """Returns a gradient came when the sum of its bucket had started."""
    return LayoutError(
        f"a gradient of {name!r} came after its bucket had been handed to the other ranks: "
        "announce the last backward pass of a step only, and call zero() before the next"
    )
