"""Sums of squares of an update and of the parameters before it, measured while rules update."""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from megatron_optim.clip import sum_of_squares


class UpdateSquares:
    """The squares of the update of one step, by parameter, of what this rank updates.

    Pass a new one to `megatron_optim.Optimizer.step` in the steps to measure. Parameters are copied
    before each call of a rule, and the copies end with the call. Rules that update element by
    element get at most 16 million elements in a call of such a step, so that the copies are small.
    Rules that need matrices or sums update all parameters of a group in one call, and the copies
    take as much memory as these parameters. A step that is skipped has updates of 0.

    Attributes:
        updates: The sum of the squares of the update, by name: float64 scalars.
        parameters: The sum of the squares of the main parameter before the update, by name.
    """

    def __init__(self) -> None:
        self.updates: dict[str, Float64[Tensor, ""]] = {}
        self.parameters: dict[str, Float64[Tensor, ""]] = {}

    def copy(self, parameters: Iterable[Float[Tensor, "..."]]) -> list[Float[Tensor, "..."]]:
        """Returns copies of the parameters of a call, before the rule is called."""
        return [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def add(
        self,
        names: Sequence[str],
        before: Sequence[Float[Tensor, "..."]],
        parameters: Sequence[Float[Tensor, "..."]],
    ) -> None:
        """Adds the squares of a call, after the rule was called.

        Args:
            names: The name of the parameter that each tensor is a range of.
            before: What `copy` returned; overwritten.
            parameters: The parameters of the call.
        """
        for name, old, new in zip(names, before, parameters, strict=True):
            if old.numel():
                _add(self.parameters, name, sum_of_squares([old]))
                _add(self.updates, name, sum_of_squares([old.sub_(new)]))


def _add(totals: dict[str, Tensor], name: str, value: Tensor) -> None:
    totals[name] = totals[name] + value if name in totals else value
