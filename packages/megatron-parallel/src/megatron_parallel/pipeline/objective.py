"""The loss of a step: sums over micro-batches, some of them divided by known denominators."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_parallel.errors import LayoutError

Loss = Callable[[Any, Any], Mapping[str, Tensor]]
"""`loss(output, micro_batch)` returns sums over the micro-batch, by name."""


class Objective:
    """Sums of a step over its micro-batches, by name, and the scalar that is differentiated."""

    def __init__(self, loss: Loss, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self.totals = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        """Sums over the micro-batches so far, float64."""
        self._loss = loss
        self._denominators: dict[str, float | Tensor] = {}

    def begin(self, denominators: Mapping[str, float | Tensor]) -> None:
        """Starts a step.

        Raises `LayoutError` for a denominator without a sum.
        """
        unknown = [name for name in denominators if name not in self.names]
        if unknown:
            raise LayoutError(f"denominators for {unknown}, but the sums are {list(self.names)}")
        self._denominators = dict(denominators)
        self.totals = torch.zeros_like(self.totals)

    def add(self, output: Any, micro_batch: Any) -> Tensor:
        """Adds the sums of a micro-batch; returns its term of the differentiated scalar."""
        sums = self._loss(output, micro_batch)
        if set(sums) != set(self.names):
            raise LayoutError(
                f"the loss returned the sums {list(sums)}, but `sums` lists {list(self.names)}"
            )
        self.totals += torch.stack([sums[name].detach().to(self.totals) for name in self.names])
        parts = [_divided(sums[name], below) for name, below in self._denominators.items()]
        if len(parts) == 1:
            return parts[0]
        return torch.stack(parts).sum() if parts else self.totals.new_zeros(())


def _divided(total: Tensor, denominator: float | Tensor) -> Tensor:
    """Divides a sum in its dtype, as by a number; a float64 scalar alone would promote it."""
    if isinstance(denominator, Tensor):
        denominator = denominator.to(total.dtype)
    return total / denominator
