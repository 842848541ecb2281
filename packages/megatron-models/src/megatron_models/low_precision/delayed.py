"""Products in FP8 whose scales follow the magnitudes of earlier steps.

Delayed scaling (Micikevicius et al. 2022, section 4) takes scales from the largest magnitudes of
earlier steps. These are state of the layer: maxima over all micro-batches of a step and all ranks
that have a part of the tensor, so every layout has the same scales. Transformer Engine shifts its
history once a micro-batch instead. A tensor without a history, as in the first step, has a scale of
its own, a power of two.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from megatron_kernels import ScaleType
from megatron_parallel import Mesh, Sharding, StepState
from megatron_parallel.sharding import ZEROS
from megatron_parallel.tensor_parallel import Product, Saved
from megatron_parallel.tensor_parallel.product import as_rows
from torch import Tensor, nn

from megatron_models.low_precision.config import AMAX_HISTORY
from megatron_models.low_precision.held_weight import HeldWeight
from megatron_models.low_precision.product import (
    LowPrecisionProduct,
    OutputGradient,
    is_of_experts,
    saved_tensor,
)
from megatron_models.low_precision.recipe import OPERANDS, Operand


@dataclass(frozen=True, kw_only=True)
class DelayedProduct(LowPrecisionProduct):
    """A product whose scales follow the magnitudes of earlier steps, before it has a layer.

    Attributes:
        margin: Powers of two between the largest magnitude and the largest element.
        length: Steps of the history.
        algorithm: Magnitude of the history that the scale follows.
    """

    margin: int
    length: int
    algorithm: Literal["most_recent", "max"]

    def bind(self, layer: nn.Module, mesh: Mesh) -> Product:
        """Returns the product of a layer, and adds the history to the layer."""
        table: dict[str, Sharding] = layer.sharding  # type: ignore[assignment]
        weight = table["weight"]
        table[AMAX_HISTORY] = history_sharding(weight, self.length)
        state = StepState(
            layer,
            AMAX_HISTORY,
            mesh,
            shifted_history,
            parameter="weight",
            observation_shape=(len(OPERANDS),),
            device=layer.get_parameter("weight").device,
        )
        own = {"held": HeldWeight(), "grouped": is_of_experts(layer)}
        return LayerDelayedProduct(**{**vars(self), **own}, history=state)


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerDelayedProduct(DelayedProduct):
    """The product of one layer, with its history.

    Attributes:
        history: The layer's history `[3, steps]`, newest first, with rows of input, weight and
            gradient. Magnitudes are observed where the gradient of the weight is computed, so
            evaluations and frozen layers observe nothing.
    """

    history: StepState
    observes: ClassVar[bool] = True

    def hold_weights(self, *, compiled: bool = False) -> None:
        """Begins a time in which the weight does not change, and the observations of a step."""
        super().hold_weights(compiled=compiled)
        if compiled:
            self.history.begin()

    def scale(self, operand: Operand) -> Float[Tensor, ""]:
        """Returns the scale of an operand by its history, 0 without one."""
        row = self.history.value[OPERANDS.index(operand)]
        amax = row.amax() if self.algorithm == "max" else row[0]
        return amax * 2.0**self.margin / self.recipe.of(operand).largest

    def scale_rule(self, operand: Operand) -> ScaleType:
        """Returns that a scale without a history is a power of two."""
        return "power_of_two"

    def _observe(self, saved: Saved, gradient: OutputGradient, amax: Tensor | None) -> None:
        constant = self._constant(saved)
        of_gradient = None if gradient.both is None else gradient.both.amax
        self.observe(
            largest_magnitude(as_rows(saved_tensor(saved.input[0]))) if amax is None else amax,
            saved_tensor(constant[-1]) if constant else largest_magnitude(saved.weights[0]),
            largest_magnitude(gradient.exact) if of_gradient is None else of_gradient,
        )

    def observe(self, *magnitudes: Tensor) -> None:
        """Adds the largest magnitudes of input, weight and gradient to those of this step."""
        dtype = self.history.value.dtype
        self.history.add(torch.stack([each.detach().to(dtype) for each in magnitudes]))


def largest_magnitude(x: Tensor) -> Tensor:
    """Returns the largest magnitude, -inf without elements."""
    return x.detach().abs().amax() if x.numel() else x.new_tensor(-torch.inf)


def history_sharding(weight: Sharding, length: int) -> Sharding:
    """Returns the sharding of the history of a layer with a weight.

    Every rank holds it. It is the maximum over the ranks that have a part of the layer's tensors:
    for experts, all ranks of a pipeline stage.
    """
    return Sharding(
        (len(OPERANDS), length),
        init=ZEROS,
        partial="tp" if weight.experts else weight.axis or weight.partial,
        reduce="max",
    )


def shifted_history(
    value: Float[Tensor, "operands steps"], observed: Float[Tensor, " operands"]
) -> Float[Tensor, "operands steps"]:
    """Returns the history after a step.

    The row of an operand without a finite, positive magnitude in the step stays.
    """
    newest = observed.to(value.dtype)[:, None]
    shifted = torch.cat((newest, value[:, :-1]), 1)
    return torch.where(newest.isfinite() & (newest > 0), shifted, value)
