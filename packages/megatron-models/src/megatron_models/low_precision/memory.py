"""Bytes of what products in few bits keep. This module does not import torch."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from megatron_models.components.mixer import ParameterSpec
from megatron_models.components.saved_bytes import LinearInput
from megatron_models.low_precision.config import LowPrecisionConfig
from megatron_models.low_precision.recipe import recipe_of

_LARGE: Final = 4096
"""Rows and columns of a matrix whose scales are a typical share of its bytes."""

FUSED_EXPERTS: Final = "scaled_grouped_mm"
"""Backend of the products of experts that reads transposed matrices, which are held too."""


def linear_roles(parameters: Mapping[str, ParameterSpec]) -> frozenset[str]:
    """Returns the roles of the layers that multiply in few bits, all but the output layer."""
    return frozenset(spec.role for spec in parameters.values()) - {"", "output_layer"}


def plain_layers(config: LowPrecisionConfig, depth: int) -> frozenset[int]:
    """Returns the numbers of the layers that multiply in the precision of the model.

    Args:
        config: Formats and recipe.
        depth: Number of layers.
    """
    if not config.first_last_layers_bf16:
        return frozenset()
    last = depth - config.num_layers_at_end_in_bf16
    return frozenset([*range(config.num_layers_at_start_in_bf16), *range(last, depth)])


def saved_inputs(config: LowPrecisionConfig) -> LinearInput | None:
    """Returns how linear layers save their inputs; None as they are."""
    if not config.enabled:
        return None
    recipe = recipe_of(config)
    if not recipe.wgrad:
        return None
    each = recipe.input.bits(_LARGE, _LARGE) / 8
    return LinearInput(each, each if recipe.input.is_per_tensor else None)


@dataclass(frozen=True)
class HeldWeights:
    """Bytes that the converted weights of a step need.

    Attributes:
        each: Bytes of an element of a matrix.
        of_experts: Bytes of an element of a matrix of experts.
    """

    each: float = 0.0
    of_experts: float = 0.0

    @classmethod
    def of(
        cls, config: LowPrecisionConfig, backends: Mapping[str, str], sharded: bool
    ) -> "HeldWeights":
        """Returns the bytes of a configuration.

        Args:
            config: Formats and recipe.
            backends: Chosen backends of operations.
            sharded: Whether weights are sharded, and thus converted in each pass.
        """
        if not config.enabled or sharded:
            return cls()
        form = recipe_of(config).weight
        each = form.bits(_LARGE, _LARGE) / 8
        # The transpose of square blocks of bytes is a view; products of tensors need a copy.
        square = form.rows == form.columns and not form.is_per_tensor
        copies = 1 if square and form.elements != "e2m1" else 2
        chosen = backends.get("quantized_grouped_matmul", "")
        return cls(copies * each, each * (1 + (FUSED_EXPERTS in chosen)))

    def bytes_of(self, spec: ParameterSpec, elements: int, roles: Collection[str]) -> float:
        """Returns the bytes held for a parameter of a layer."""
        if spec.role not in roles or len(spec.sharding.shape) < 2:
            return 0.0
        return elements * (self.of_experts if spec.sharding.experts else self.each)
