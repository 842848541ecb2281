"""Losses that arise inside a model, on whatever pipeline stage: of routers, of extra heads.

They cannot be returned to the loss function, which only the last stage calls. So a layer attaches
them to a tensor that goes on to the output:

    weights = inner.attach(weights, "load balancing loss", value, coefficient, replicated=())

In the forward pass that changes nothing. In the backward pass `value` gets the gradient it would
have if `coefficient * value / denominator` were part of the loss. Like the main loss, `value` is a
sum over a part of the batch, and the denominator, known before the step, is that of the *whole*
batch: however ranks, stages and micro-batches divide it, the gradient is the same.

What is reported is the sum over all ranks of the job. Ranks that hold equal activations have equal
values, though, such as tensor-parallel ranks outside of the layers that are cut: a layer names such
axes (``replicated``), and only the first rank of each counts the value. Of a router's loss every
rank has the part of its own tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from megatron_parallel.axes import Axis
from megatron_parallel.errors import LayoutError


class InnerLosses:
    """Inner losses of one step on one rank.

    Args:
        denominators: By name of the loss, of the global batch.

    Attributes:
        sums: By name, what was attached so far, not multiplied by coefficients: float64 scalars,
            to be added up over all ranks of the job. A value is added by the backward pass, once
            for each forward pass that was not a recomputation; a replicated one on the first rank
            of its axes alone.
    """

    def __init__(self, denominators: Mapping[str, float]) -> None:
        self._denominators = dict(denominators)
        self.sums: dict[str, float | Tensor] = dict.fromkeys(self._denominators, 0.0)

    def attach(
        self,
        x: Float[Tensor, "*shape"],
        name: str,
        value: Float[Tensor, ""],
        coefficient: float,
        *,
        replicated: Sequence[Axis],
    ) -> Float[Tensor, "*shape"]:
        """`x`, with a loss hanging on it.

        Args:
            x: Any tensor through which the backward pass comes.
            name: Of the loss; there has to be a denominator.
            value: Sum over this rank's part of the micro-batch.
            coefficient: Weight of the loss in the objective.
            replicated: Axes whose ranks all have this very value, not a part each. It has its
                gradient on every one of them, as the activations it is made from do.

        Raises:
            LayoutError: There is no denominator of that name.
        """
        if name not in self._denominators:
            raise LayoutError(
                f"no denominator for the inner loss {name!r}, only for {list(self._denominators)}"
            )
        factor = coefficient / self._denominators[name]
        counts = all(axis.index == 0 for axis in replicated)
        attached: Tensor = _Attach.apply(x, value, self if counts else None, name, factor)  # type: ignore[no-untyped-call]
        return attached

    def _add(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value.double()


class _Attach(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, value: Tensor, owner: InnerLosses | None, name: str, factor: float
    ) -> Tensor:
        ctx.value, ctx.owner, ctx.name, ctx.factor = value.detach(), owner, name, factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        if ctx.owner is not None:
            ctx.owner._add(ctx.name, ctx.value)
            ctx.owner = None  # a split backward pass may come by twice
        return grads[0], torch.full_like(ctx.value, ctx.factor), None, None, None
