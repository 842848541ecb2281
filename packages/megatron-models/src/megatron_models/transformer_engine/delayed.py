"""Delayed scaling by Transformer Engine's quantizers, with histories as state of the layers.

Histories are those of `megatron_models.low_precision`, also in checkpoints: maxima over all
micro-batches of a step and all ranks that have a part of the tensor, combined once a step. The
quantizers find the magnitudes on the way. Transformer Engine's own modules have them in one
process-wide object, of which a step is a micro-batch.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from megatron_parallel import Mesh, Sharding, StepState
from megatron_parallel.tensor_parallel import Product
from torch import Tensor, nn

from megatron_models.low_precision.config import AMAX_HISTORY
from megatron_models.low_precision.delayed import history_sharding, shifted_history
from megatron_models.low_precision.recipe import OPERANDS, Operand
from megatron_models.transformer_engine.product import QuantizedProduct
from megatron_models.transformer_engine.shared_gradient import FewBits, SharedGradient


@dataclass(frozen=True)
class DelayedProduct(QuantizedProduct):
    """A product whose scales follow the magnitudes of earlier steps, before it has a layer.

    Attributes:
        margin: Powers of two between the largest magnitude and the limit.
        length: Steps of the history.
        algorithm: Magnitude of the history that the scale follows.
    """

    margin: int
    length: int
    algorithm: Literal["most_recent", "max"]

    def bind(self, layer: nn.Module, mesh: Mesh) -> Product:
        """Returns the product of a layer, and adds the history to the layer."""
        table: dict[str, Sharding] = layer.sharding  # type: ignore[assignment]
        table[AMAX_HISTORY] = history_sharding(table["weight"], self.length)
        device = layer.get_parameter("weight").device
        state = StepState(
            layer,
            AMAX_HISTORY,
            mesh,
            shifted_history,
            parameter="weight",
            observation_shape=(len(OPERANDS),),
            device=device,
        )
        seen = torch.zeros(1, device=device)
        own = {**vars(self), "shared": SharedGradient()}
        return LayerDelayedProduct(**own, history=state, weight_amax=seen)


@dataclass(frozen=True, eq=False)
class LayerDelayedProduct(DelayedProduct):
    """The product of one layer, with its history.

    Attributes:
        history: The layer's history `[3, steps]`, newest first, with rows of input, weight and
            gradient. They are observed where the gradient of the weight is computed, or where a
            norm writes the input of a pass with gradients.
        weight_amax: Largest magnitude of the weight when it was last quantized, `[1]`.
    """

    history: StepState
    weight_amax: Tensor

    def multiply_factors(
        self,
        dy: Float[Tensor, "rows out"],
        x: Float[Tensor, "rows in"],
        into: Float[Tensor, "out in"] | None = None,
        *,
        first: bool = True,
    ) -> Float[Tensor, "out in"]:
        """Returns `dy^T x`, or adds it to a matrix, and observes the magnitudes."""
        if not self.quantizes_wgrad:
            self.history.add(torch.cat((_largest(x), self.weight_amax, _largest(dy))))
        return super().multiply_factors(dy, x, into, first=first)

    def observe(self, dy: FewBits, x: FewBits | None) -> None:
        """Adds the magnitudes that the quantizers found to the observations of this step."""
        seen = _nothing(self.weight_amax) if x is None else x.quantizer.amax
        self.history.add(torch.cat((seen, self.weight_amax, dy.quantizer.amax)))

    def observe_norm(self, quantizer: Any) -> None:
        """Adds the largest magnitude that a norm wrote to the observations of this step."""
        unseen = _nothing(quantizer.amax)
        self.history.add(torch.cat((quantizer.amax, unseen, unseen)))

    def few_bits(
        self, matrix: Tensor, operand: Operand, *, rows: bool = False, columns: bool = False
    ) -> FewBits:
        """Quantizes an operand, scaled by its history."""
        few = super().few_bits(matrix, operand, rows=rows, columns=columns)
        if operand == "weight":
            self.weight_amax.copy_(few.quantizer.amax)
        return few

    def quantizer(
        self,
        operand: Operand,
        device: torch.device,
        *,
        rows: bool = False,
        columns: bool = False,
        group: Any = None,
    ) -> Any:
        """Returns a quantizer; its scale is that of all ranks already.

        Without a history the scale is 1, as in the first step of Transformer Engine.
        """
        del group
        row = self.history.value[OPERANDS.index(operand)]
        amax = (row.amax() if self.algorithm == "max" else row[0]).float().view(1)
        scale = self.recipe.largest(operand) / (amax * 2.0**self.margin)
        largest = torch.finfo(torch.float32).max
        return self.recipe.quantizer(
            operand,
            device,
            rows=rows,
            columns=columns,
            scale=torch.where(amax > 0, scale.clamp(max=largest), 1.0),
            amax=torch.zeros(1, device=device),
        )


def _largest(x: Tensor) -> Tensor:
    """Returns the largest magnitude of a tensor, `[1]`."""
    if not x.numel():
        return torch.full((1,), -torch.inf, device=x.device)
    return x.detach().abs().amax().float().view(1)


def _nothing(like: Tensor) -> Tensor:
    """Returns the observation of nothing, `[1]`."""
    return torch.full_like(like, -torch.inf)
