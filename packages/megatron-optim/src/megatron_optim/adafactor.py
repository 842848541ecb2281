"""Adafactor (Shazeer and Stern 2018), as `torch.optim.Adafactor`.

The running mean of the squared gradient of a matrix is the product of a mean over columns and one
over rows, so that the state of a matrix ``[r, c]`` has ``r + c`` elements. Every rank has these two
means of all parameters of its stage and tensor-parallel shard: sums over all ranks that share a
matrix update them, in any layout.
"""

import copy
from collections.abc import Mapping, Sequence
from math import prod
from typing import Self

import torch
from megatron_parallel import Sharding, View, parameter_views
from torch import Tensor

from megatron_optim.adafactor_settings import AdafactorSettings
from megatron_optim.config import OptimizerConfig
from megatron_optim.sums import Over, Sums, slice_of, summed_dims, summed_sharding
from megatron_optim.update_rule import StateTensor, UnreadStep, UpdateRule

ROWS, COLUMNS, ELEMENTS = "row_var", "col_var", "variance"


class Adafactor(UpdateRule):
    """Adafactor: ``--optimizer adafactor``.

    With gradient ``g``, learning rate ``lr`` and step ``t``: means of ``g^2`` have the weight
    ``t^beta2_decay`` for the new value. The update ``g / sqrt(estimate)``, divided by its root mean
    square over ``clip_threshold`` if that is above 1, is multiplied by ``min(lr, 1 / sqrt(t))`` and
    by the root mean square of the parameter, at least ``eps2``. Weight decay is decoupled from the
    gradient. Settings are `AdafactorSettings`.

    Experts, and gate and up projections, are separate matrices. Parameters with one dim have a mean
    for every element.
    """

    needs = "sums"
    decides_on = ("cuda",)
    state: Sequence[StateTensor] = (StateTensor(ELEMENTS),)
    summed_state = (ROWS, COLUMNS)

    def __init__(self, config: OptimizerConfig) -> None:
        super().__init__(config)
        self.settings: AdafactorSettings = config.settings or AdafactorSettings()
        self.sums: Sums | None = None
        self._rows: dict[str, Tensor] = {}
        self._columns: dict[str, Tensor] = {}

    def state_sizes(self, sharding: Sharding) -> dict[str, float]:
        """Returns the elements of each state tensor for each element of a parameter."""
        if sharding.matrix is None:
            return {ELEMENTS: 1.0}
        dims = {over: summed_dims(sharding, over) for over in ("columns", "rows")}
        counts = {over: prod(sharding.shape[d] for d in dims[over]) for over in dims}
        return {ROWS: 1 / counts["columns"], COLUMNS: 1 / counts["rows"]}

    def bind_sums(self, sums: Sums) -> Self:
        """Returns the rule for a group of parameters, with new state of matrices."""
        bound = copy.copy(self)
        bound.sums = sums
        if all(sharding.matrix is not None for sharding in sums.table.values()):
            bound.state = ()
            bound._rows, bound._columns = sums.zeros("columns"), sums.zeros("rows")
        return bound

    def views(self) -> dict[str, list[View]]:
        """Returns views of the means of matrices over columns and over rows."""
        if self.sums is None or not self._rows:
            return {}
        mesh, found = self.sums.mesh, dict[str, list[View]]()
        means: list[tuple[str, Over, dict[str, Tensor]]] = [
            (ROWS, "columns", self._rows),
            (COLUMNS, "rows", self._columns),
        ]
        for suffix, over, tensors in means:
            table = {n: summed_sharding(cut, over) for n, cut in self.sums.table.items()}
            named = {n: tensor.view(table[n].local_shape(mesh)) for n, tensor in tensors.items()}
            views = parameter_views(named, table, mesh)
            found |= {f"{name}.{suffix}": each for name, each in views.items()}
        return found

    def update(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        state: Mapping[str, Sequence[Tensor]],
        *,
        lr: float,
        weight_decay: float,
        step: int,
    ) -> None:
        """Updates the parameters and their means of squared gradients."""
        number = torch.tensor(float(step), dtype=torch.float64)
        used = torch.ones_like(number)
        self._update(parameters, gradients, state, lr, weight_decay, number, used)

    def update_unread(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        state: Mapping[str, Sequence[Tensor]],
        *,
        lr: float,
        weight_decay: float,
        step: UnreadStep,
    ) -> None:
        """Updates the parameters and their means, unless the device skips the step."""
        skip = step.skip.bool()
        finite = [
            # NaN times 0 is NaN, so gradients of a skipped step are replaced.
            torch.where(skip, 0.0, g if step.divisor is None else g / step.divisor)
            for g in gradients
        ]
        used = (1 - step.skip).double()
        self._update(parameters, finite, state, lr, weight_decay, step.number.double(), used)

    def _update(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        state: Mapping[str, Sequence[Tensor]],
        lr: float,
        weight_decay: float,
        number: Tensor,
        used: Tensor,
    ) -> None:
        sums, settings = self.sums, self.settings
        if sums is None:
            raise RuntimeError("Adafactor updates the parameters of bind_sums(); call it first")
        eps1 = torch.finfo(sums.dtype).eps if settings.eps1 is None else settings.eps1
        weight = (number**settings.beta2_decay * used).to(sums.dtype)
        rate = number.rsqrt().clamp(max=lr)
        squares = sums.total(sums.pieces(parameters), "all")
        scales = {
            name: (square / sums.count(name, "all")).sqrt().clamp(min=settings.eps2) * rate
            for name, square in squares.items()
        }
        if self._rows:
            estimates = self._factored(sums, gradients, weight, eps1)
        else:
            for variance, gradient in zip(state[ELEMENTS], gradients, strict=True):
                variance.lerp_(gradient.square(), weight)
            estimates = [variance for _, variance, _ in sums.pieces(state[ELEMENTS])]
        updates = sums.pieces(gradients)
        for (_, update, _), estimate in zip(updates, estimates, strict=True):
            update.mul_(estimate.clamp(min=eps1 * eps1).rsqrt())
        sizes = sums.total(updates, "all")
        for name, square in sizes.items():
            size = (square / sums.count(name, "all")).sqrt() / settings.clip_threshold
            scales[name] = (scales[name] / size.clamp(min=1.0) * used).to(sums.dtype)
        kept = (1 - lr * weight_decay * used).to(sums.dtype)
        pieces = zip(sums.pieces(parameters), updates, strict=True)
        for (name, parameter, box), (_, update, _) in pieces:
            parameter.mul_(kept).sub_(update * slice_of(scales[name], box))

    def _factored(
        self, sums: Sums, gradients: Sequence[Tensor], weight: Tensor, eps1: float
    ) -> list[Tensor]:
        """Updates the means of matrices; returns the estimate of the square for each piece."""
        pieces = sums.pieces(gradients)
        over_columns, over_rows = sums.total(pieces, "columns"), sums.total(pieces, "rows")
        means = {}
        for name in sums.names:
            count = sums.count(name, "columns"), sums.count(name, "rows")
            self._rows[name].lerp_(over_columns[name] / count[0], weight)
            self._columns[name].lerp_(over_rows[name] / count[1], weight)
            means[name] = self._rows[name].sum(summed_dims(sums.table[name], "rows"), keepdim=True)
        means = sums.total_over_tensor_ranks(means, "rows")
        estimates = []
        for name, _, box in pieces:
            rows, columns = slice_of(self._rows[name], box), slice_of(self._columns[name], box)
            mean = (means[name] / sums.count(name, "rows")).clamp(min=eps1)
            estimates.append(rows * columns / slice_of(mean, box))
        return estimates
