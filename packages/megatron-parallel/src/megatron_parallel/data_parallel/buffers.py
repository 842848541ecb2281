"""Gradient buffers: accumulate and reduce gradients between backward passes and optimizer.

    buffers = GradientBuffers(model.named_parameters(), collect_shardings(model), mesh)
    for number, batch in enumerate(micro_batches):
        buffers.begin(last=number == len(micro_batches) - 1)
        (losses(model, batch).sum() / true_tokens_of_all_ranks).backward()
    buffers.finish()                 # every rank has the gradient of the global batch
    update(parameters, buffers.gradients())
    buffers.zero()

Gradients are *summed* over the data-parallel axis, never averaged: the loss is already divided by
the number of true tokens of the global batch, so every token has the same weight. `finish()` sums
two kinds once more: gradients of parameters whose tensor-parallel ranks saw different positions
(`Sharding.partial`), and gradients of a weight that two pipeline stages share.

In the last micro-batch the reduction of a bucket starts as soon as its gradients are complete,
while the backward pass continues. Two signals mark them complete:

- `begin(last=True)` before a plain backward pass: hooks on the parameters report each gradient.
- `start_reductions()` from a pipeline schedule, once this stage has no backward pass left.
  Schedules that split the backward pass add weight gradients without calling hooks; they run the
  weight half inside `weight_backward()`.

All ranks start buckets in the same order, even if a rank does not use a parameter: a collective
pairs up with the one that other ranks start at the same point of the order, so another order would
add unrelated gradients or hang. Without either signal, `finish()` starts all reductions: later, but
with the same result.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from megatron_parallel.data_parallel.bucket import Bucket, BucketCollective, late_gradient_error
from megatron_parallel.data_parallel.config import DEFAULT_CONFIG, DataParallelConfig
from megatron_parallel.data_parallel.finite import NonFiniteGradient
from megatron_parallel.data_parallel.plan import BucketPlan, plan_buckets
from megatron_parallel.data_parallel.reduction import ReductionAxes
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.axes import Axis
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.sharding.sharding import Sharding


class GradientBuffers:
    """Main gradients of one rank, in buckets, summed over the data-parallel axis.

    Main gradients are float32, or float64 for float64 parameters. If nothing is to be reduced,
    gradients in main precision stay where autograd puts them and no hook is installed. A pipeline
    rank has one `GradientBuffers` for each model chunk.

    Args:
        named_parameters: Global names and this rank's parameters in forward order, each of them
            once. Parameters that need no gradient are left out.
        table: Sharding of each parameter: over which axis its gradient is summed (`dp_cp`, or
            `expert_dp` for experts), over which axis it is partial, and whether its weight is tied
            over pipeline stages.
        mesh: The mesh of this rank.
        config: Size of the buckets, whether reductions overlap with the backward pass, and whether
            a rank holds whole gradients or, for a distributed optimizer, its shard of each bucket.

    Raises:
        LayoutError: A parameter is not in the table, a gradient is partial over ranks of its data
            axis, or a method is called in the wrong order.
        CollectiveError: A rank of the axis does not take part within the mesh's time-out.
    """

    def __init__(
        self,
        named_parameters: Mapping[str, Parameter] | Iterable[tuple[str, Parameter]],
        table: Mapping[str, Sharding],
        mesh: Mesh,
        config: DataParallelConfig = DEFAULT_CONFIG,
    ) -> None:
        parameters = {n: p for n, p in dict(named_parameters).items() if p.requires_grad}
        _check_distinct(parameters)
        axes_of = {"dp_cp": data_reduction_axes(mesh)}
        if mesh.has_axis("expert_dp"):
            axes_of["expert_dp"] = ReductionAxes(mesh.axis("expert_dp"))
        sizes = {name: axes.inner.size for name, axes in axes_of.items()}
        plans = plan_buckets(
            parameters,
            table,
            sizes,
            config.ddp_bucket_size,
            low_precision=config.low_precision,
            whole_matrices=config.whole_matrices,
        )
        self.config = config
        self.buckets = tuple(
            Bucket(
                label=f"{number + 1} of {len(plans)}",
                plan=plan,
                parameters=parameters,
                axes=axes_of[plan.axis],
                extra_axes=_extra_axes(plan, axes_of[plan.axis], mesh),
                config=config,
            )
            for number, plan in enumerate(plans)
        )
        self._names = tuple(parameters)
        self._last = False
        self._next = 0  # index of the first bucket whose reduction has not started
        self._finished = False
        self._hooks: list[RemovableHandle] = []
        for bucket in self.buckets:
            for name, parameter in bucket.parameters.items() if bucket.views else ():
                hook = partial(self._arrived, bucket, name)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooks.append(handle)

    def begin(self, *, last: bool = False) -> None:
        """Prepares for the next micro-batch; call it before each forward pass.

        Args:
            last: Whether it is the last micro-batch of the step. Its reductions start as soon as
                hooks have reported all gradients of a bucket.
        """
        self._check_open("begin()")
        self._last = last
        if last:
            for bucket in self.buckets:
                bucket.pending = set(bucket.parameters)

    def collect_gradients(self) -> None:
        """Moves gradients that were added to `.grad` without hooks into the buckets.

        So gradients of low-precision parameters are accumulated in main precision. Hooks and
        `weight_backward` do this themselves.
        """
        self._check_open("collect_gradients()")
        for bucket in self.buckets:
            bucket.collect_gradients()

    @contextmanager
    def weight_backward(self) -> Iterator[None]:
        """Returns a context for the weight half of a split backward pass, which calls no hooks.

        On exit all its gradients are in the buckets.
        """
        self._check_open("weight_backward()")
        for bucket in self.buckets:
            bucket.begin_weight_backward()
        yield
        for bucket in self.buckets:
            bucket.end_weight_backward()

    def start_reductions(self) -> None:
        """Starts every reduction that has not started.

        All gradients of the step must be complete.
        """
        self._check_open("start_reductions()")
        self._launch()

    def finish(self) -> None:
        """Returns when all reductions are complete.

        Afterwards all ranks of an axis have equal gradients. Several buffers of one rank are
        finished by `finish_buffers`.
        """
        finish_buffers([self])

    def gradients(self) -> dict[str, Float[Tensor, "..."]]:
        """Returns this rank's summed main gradients by global name, as views of the buckets.

        They may be scaled in place. The gradient of a parameter that no backward pass reached is
        zero. For sharded buckets, returns the ranges in this rank's shard
        (`BucketPlan.split_shard`), without parameters that do not reach into it.
        """
        if not self._finished:
            raise LayoutError("the gradients are not summed yet: call finish() first")
        found = {name: g for bucket in self.buckets for name, g in bucket.gradients().items()}
        return {name: found[name] for name in self._names if name in found}

    def shard_gradients(self) -> dict[str, Float[Tensor, "..."]]:
        """Returns this rank's shards of the gradients, whether or not it holds whole ones."""
        return {n: g for bucket in self.buckets for n, g in bucket.shard_gradients().items()}

    def nonfinite_gradients(self) -> list[NonFiniteGradient]:
        """Returns the gradients that are NaN or infinite after `finish`, bucket by bucket."""
        return [found for bucket in self.buckets for found in bucket.nonfinite_gradients()]

    def zero(self) -> None:
        """Drops all gradients and starts the next step."""
        if self._next and not self._finished:
            raise LayoutError("zero() while gradients are being summed: call finish() first")
        for bucket in self.buckets:
            bucket.clear()
        self._finished, self._last, self._next = False, False, 0

    def reductions(self) -> list[BucketCollective]:
        """Returns the collectives of this step, in the order in which they started."""
        found = [reduction for bucket in self.buckets for reduction in bucket.reductions]
        return sorted(found, key=lambda reduction: reduction.launched)

    def close(self) -> None:
        """Removes the hooks and leaves gradients to autograd; parameters do not change."""
        for hook in self._hooks:
            hook.remove()
        for bucket in self.buckets:
            bucket.close()

    def _arrived(self, bucket: Bucket, name: str, parameter: Tensor) -> None:
        """Collects a gradient that autograd has added to `.grad`."""
        if bucket.launched:
            raise late_gradient_error(name)
        bucket.collect_gradient(name)
        if self._last and self.config.overlap_grad_reduce:
            bucket.pending.discard(name)
            if not bucket.pending:
                self._launch()

    def _launch(self) -> None:
        """Starts every reduction whose gradients are complete, in order.

        First starts the next collective of earlier buckets that need several. All ranks must start
        the same collectives in the same order, although they fill their buckets at different times.
        """
        ready = list(takewhile(lambda bucket: not bucket.pending, self.buckets[self._next :]))
        for bucket in ready:
            bucket.complete()
        for bucket, own_largest in zip(ready, _largest(ready), strict=True):
            for earlier in self.buckets[: self._next]:
                if earlier.needs_several_collectives:
                    earlier.advance()
            bucket.launch(own_largest)
            self._next += 1

    def _check_open(self, call: str) -> None:
        if self._finished:
            raise LayoutError(f"{call} after finish(): call zero() to start the next step")
        if self._next or self._last:
            raise LayoutError(
                f"{call} after begin(last=True) or start_reductions(): call finish() first"
            )


def _largest(buckets: Sequence[Bucket]) -> list[Tensor | None]:
    """Returns numbers that are finite only if what a reduction overwrites is; None if not checked.

    The largest magnitudes, in one kernel; on CPUs the sums, which are faster. Nothing reads them
    unless a reduced gradient is not finite.
    """
    own = [bucket.overwritten if bucket.checks_finite else None for bucket in buckets]
    checked = [gradients for gradients in own if gradients is not None]
    on_cpu = bool(checked) and checked[0].device.type == "cpu"
    norms = torch._foreach_norm(checked, torch.inf) if checked and not on_cpu else ()
    found = map(torch.sum, checked) if on_cpu else iter(norms)
    return [None if gradients is None else next(found) for gradients in own]


def data_reduction_axes(mesh: Mesh) -> ReductionAxes:
    """Returns the axes of the ranks that see other samples, or other parts of the same samples."""
    if mesh.layout.dp_outer > 1:
        return ReductionAxes(mesh.axis("dp_cp_inner"), mesh.axis("dp_cp_outer"))
    return ReductionAxes(mesh.axis("dp" if mesh.layout.cp == 1 else "dp_cp"))


def finish_buffers(buffers: Sequence[GradientBuffers]) -> None:
    """Returns when all reductions of the buffers of a rank are complete.

    Parameters that stages share are summed over their axes last, in the order of their names: it is
    the same on all ranks, which may hold them in other chunks.
    """
    for each in buffers:
        if each._finished:
            raise LayoutError("finish() was called twice: call zero() after the optimizer's step")
        for bucket in each.buckets:
            bucket.pending = set()
        each._launch()
    buckets = [bucket for each in buffers for bucket in each.buckets]
    for bucket in buckets:
        bucket.wait()
    tied = sorted(
        (bucket for bucket in buckets if bucket.plan.tied is not None),
        key=lambda bucket: bucket.plan.slots[0].name,
    )
    ordered = (*(bucket for bucket in buckets if bucket.plan.tied is None), *tied)
    for bucket in ordered:
        bucket.reduce_extra_axes()
    for bucket in ordered:
        bucket.wait()
    for each in buffers:
        each._finished = True


def _extra_axes(plan: BucketPlan, axes: ReductionAxes, mesh: Mesh) -> list[Axis]:
    """Returns the axes that a bucket is summed over after the data axis.

    Their order is the same on all ranks.
    """
    extra_axes = []
    if plan.partial is not None:
        partial = mesh.axis(plan.partial)
        for data in (axes.inner, axes.outer):
            if data is not None and set(partial.ranks) & set(data.ranks) != {mesh.rank}:
                raise LayoutError(
                    f"the gradient of {plan.slots[0].name!r} is partial over axis "
                    f"{plan.partial!r}, whose ranks are also on axis {data.name!r}: it would be "
                    "summed twice"
                )
        extra_axes.append(partial)
    if plan.tied is not None and mesh.has_axis(plan.tied):
        extra_axes.append(mesh.axis(plan.tied))
    return extra_axes


def _check_distinct(parameters: Mapping[str, Parameter]) -> None:
    names: dict[int, str] = {}
    for name, parameter in parameters.items():
        other = names.setdefault(id(parameter), name)
        if other != name:
            raise LayoutError(f"{other!r} and {name!r} are the same parameter: pass one of them")
