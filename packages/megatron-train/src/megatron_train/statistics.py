"""Statistics of gradients and parameters for the log line and the records of a run."""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from megatron_optim import (
    Optimizer,
    UpdateSquares,
    count_zeros,
    gradient_norms,
    parameter_norms,
    update_ratios,
)
from torch import Tensor

NUM_ZEROS: Final = "num zeros"
PARAMS_NORM: Final = "params norm"
"""Names of the numbers of the log line, as in Megatron-LM."""

_LAYER: Final = re.compile(r"(.*?\blayers\.\d+)\.")


class Statistics:
    """Measures the steps at whose end a log line is printed.

    Args:
        names: Global names of the parameters of the model, equal on all ranks.
        interval: Steps between log lines.
        num_zeros: Whether zeros of the gradient are counted.
        params_norm: Whether the norm of the parameters is measured.
        layer_norms: Whether norms of gradient and parameters are measured by layer.
        ratios: Whether norms of the update over those of the parameters are measured by layer.
    """

    def __init__(
        self,
        names: Iterable[str],
        interval: int,
        *,
        num_zeros: bool = False,
        params_norm: bool = False,
        layer_norms: bool = False,
        ratios: bool = False,
    ) -> None:
        self.parts = tuple(dict.fromkeys(map(part_of, names)))
        self._number_of = {part: number for number, part in enumerate(self.parts)}
        self._interval = interval
        self._num_zeros, self._params_norm, self._layers = num_zeros, params_norm, layer_norms
        self._ratios = ratios
        self._squares: UpdateSquares | None = None

    def before(self, optimizer: Optimizer, iteration: int) -> dict[str, Tensor]:
        """Returns the numbers of a step's gradient, before the update."""
        found: dict[str, Tensor] = {}
        if iteration % self._interval:
            return found
        if self._num_zeros:
            found[NUM_ZEROS] = count_zeros(optimizer)
        if self._layers:
            norms = gradient_norms(optimizer, self._groups(optimizer), len(self.parts))
            found |= self._by_part("grad norm", norms)
        return found

    def squares(self, iteration: int) -> UpdateSquares | None:
        """Returns what measures the update of a step; None if the step is not measured."""
        measured = self._ratios and iteration % self._interval == 0
        self._squares = UpdateSquares() if measured else None
        return self._squares

    def after(self, optimizer: Optimizer, iteration: int) -> dict[str, Tensor]:
        """Returns the numbers of update and parameters, after the update."""
        found: dict[str, Tensor] = {}
        if self._squares is not None:
            parts = self._groups(optimizer), len(self.parts)
            found |= self._by_part("update ratio", update_ratios(optimizer, self._squares, *parts))
            self._squares = None
        if iteration % self._interval or not (self._params_norm or self._layers):
            return found
        norms = parameter_norms(optimizer, self._groups(optimizer), len(self.parts))
        if self._params_norm:
            found[PARAMS_NORM] = norms.square().sum().sqrt()
        if self._layers:
            found |= self._by_part(PARAMS_NORM, norms)
        return found

    def _groups(self, optimizer: Optimizer) -> Mapping[str, int]:
        """Returns the part of each parameter of this rank, also of those that products add."""
        return {name: self._number_of[part_of(name)] for name in optimizer.main.tensors}

    def _by_part(self, what: str, norms: Tensor) -> Mapping[str, Tensor]:
        return {
            f"{what} of {part}": norm for part, norm in zip(self.parts, norms.unbind(), strict=True)
        }


def part_of(name: str) -> str:
    """Returns the layer of a parameter, or the first word of its name if it is in none."""
    found = _LAYER.match(name)
    return found[1] if found else name.partition(".")[0]
