"""Auxiliary losses: losses that layers inside the model add, on any pipeline stage.

A layer cannot return such a loss to the loss function, which only the last stage calls. Instead it
attaches the loss to a tensor on the path to the output:

    weights = losses.attach(weights, "load balancing loss", value, coefficient, replicated=())

The forward pass does not change. In the backward pass `value` receives the gradient that it would
have if `coefficient * value / denominator` were a term of the loss. Like the main loss, `value` is
a sum over a part of the batch. The denominator is known before the step and belongs to the *whole*
batch, so the gradient is the same for every layout and number of micro-batches.

The reported value is the sum over all ranks of the job. Ranks with equal activations compute equal
values, for example tensor-parallel ranks outside the tensor-parallel layers. A layer names these
axes in ``replicated``, and only the first rank of each axis counts the value. The loss of a router
is not replicated: each rank computes it for its own tokens.

Layers may also count what no gradient depends on, for reports (`AuxiliaryLosses.count`), or report
maxima (`AuxiliaryLosses.maximum`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn
from torch.autograd import Function

from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.axes import Axis


class AuxiliaryLosses:
    """Auxiliary losses of one step on one rank.

    Args:
        denominators: Denominator of each loss, for the global batch, by name of the loss: a number
            or a scalar on the device.
        counters: Number of values that are counted under each name. Defaults to no counters.
        maxima: Number of values whose maxima are reported under each name. Defaults to none.

    Attributes:
        sums: Sum of the values attached so far, by name of the loss, without coefficients: float64
            scalars, to be summed over all ranks of the job. The backward pass adds a value, once
            for each forward pass that is not a recomputation. A replicated value is added only on
            the first rank of its axes.
        counts: Sum of the values counted so far, by name: float64 vectors, to be summed over all
            ranks of the job. None under a name that no layer of this rank has counted.
        maxima: Largest values reported so far, by name: float64 vectors, whose maxima are to be
            taken over all ranks of the job. None under a name without values.
    """

    def __init__(
        self,
        denominators: Mapping[str, float | Tensor],
        counters: Mapping[str, int] | None = None,
        maxima: Mapping[str, int] | None = None,
    ) -> None:
        self._denominators = dict(denominators)
        self._counters = dict(counters or {})
        self.counts: dict[str, Tensor | None] = dict.fromkeys(self._counters)
        self._sizes = dict(maxima or {})
        self.maxima: dict[str, Tensor | None] = dict.fromkeys(self._sizes)
        self.sums: dict[str, float | Tensor] = dict.fromkeys(self._denominators, 0.0)
        self._running_sums: dict[str, Tensor] = {}

    def attach(
        self,
        x: Float[Tensor, "*shape"],
        name: str,
        value: Float[Tensor, ""],
        coefficient: float,
        *,
        replicated: Sequence[Axis],
    ) -> Float[Tensor, "*shape"]:
        """Returns `x`, with a loss attached to it.

        Args:
            x: Any tensor that the backward pass differentiates.
            name: Name of the loss, one of `denominators`.
            value: Sum over this rank's part of the micro-batch.
            coefficient: Weight of the loss in the objective.
            replicated: Axes whose ranks all compute the same value instead of a part each. The
                value has a gradient on all of these ranks, like the activations it depends on.

        Raises:
            LayoutError: `name` has no denominator.
        """
        if name not in self._denominators:
            raise LayoutError(
                f"the auxiliary loss {name!r} has no denominator: there are denominators for "
                f"{list(self._denominators)}"
            )
        factor = coefficient / self._denominators[name]
        total = self.sums[name]
        if not isinstance(total, Tensor):
            total = value.new_zeros((), dtype=torch.float64)
            self.sums[name] = total
        counts = all(axis.index == 0 for axis in replicated)
        attached: Tensor = _Attach.apply(x, value, total if counts else None, factor)  # type: ignore[no-untyped-call]
        return attached

    def running_sum(self, name: str, x: Tensor) -> Tensor:
        """Returns the sum of the tensors given under a name in this step, without gradient.

        For losses that depend on earlier micro-batches of the step. A recomputed forward pass must
        not call it again.
        """
        before = self._running_sums.get(name)
        total = x.detach().clone() if before is None else before + x.detach()
        self._running_sums[name] = total
        return total

    @property
    def has_counters(self) -> bool:
        """Whether values are counted under any name."""
        return bool(self._counters)

    def counts_under(self, name: str) -> bool:
        """Returns whether values are counted under a name."""
        return name in self._counters

    def count(self, name: str, values: Float64[Tensor, " values"]) -> None:
        """Adds values, without gradient, to those counted under a name.

        A recomputed forward pass must not call it again, and only one of several ranks with the
        same values may.

        Raises:
            LayoutError: There is no such counter, or it has another number of values.
        """
        if self._counters.get(name) != len(values):
            raise LayoutError(
                f"{len(values)} values cannot be counted as {name!r}: there are counters of "
                f"{self._counters}"
            )
        before = self.counts[name]
        self.counts[name] = values.detach() if before is None else before + values.detach()

    @property
    def has_maxima(self) -> bool:
        """Whether maxima are reported under any name."""
        return bool(self._sizes)

    def has_maximum(self, name: str) -> bool:
        """Returns whether maxima are reported under a name."""
        return name in self._sizes

    def maximum(self, name: str, values: Float[Tensor, " some"], first: int = 0) -> None:
        """Reports values, without gradient, of which the largest count under a name.

        Args:
            name: The name.
            values: Values of some of the entries.
            first: Index of the first of these entries.

        Raises:
            LayoutError: There is no such name, or it has fewer entries.
        """
        size = self._sizes.get(name, 0)
        if first + len(values) > size:
            raise LayoutError(
                f"{len(values)} values from entry {first} cannot be maxima of {name!r}: there are "
                f"maxima of {self._sizes}"
            )
        own = values.detach().double()
        whole = nn.functional.pad(own, (first, size - first - len(own)), value=-torch.inf)
        before = self.maxima[name]
        self.maxima[name] = whole if before is None else torch.maximum(before, whole)


class _Attach(Function):
    """Identity, whose backward pass adds to a total in place, which compiled code can do too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, value: Tensor, total: Tensor | None, factor: float | Tensor
    ) -> Tensor:
        ctx.value, ctx.total, ctx.factor = value.detach(), total, factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if ctx.total is not None:
            ctx.total.add_(ctx.value)
            ctx.total = None  # a split backward pass calls this twice
        if isinstance(ctx.factor, Tensor):  # on the device, so full_like would wait for it
            return grads[0], ctx.factor.to(ctx.value.dtype), None, None
        return grads[0], torch.full_like(ctx.value, ctx.factor), None, None
