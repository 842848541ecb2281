"""The residual stream, which all components of a model read and write.

Importing this module does not import torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_models.components.fields import ComponentConfig, flag


@dataclass(frozen=True, kw_only=True)
class StreamConfig(ComponentConfig):
    """Width and depth of the residual stream, and the scale of initial weights."""

    num_layers: int = field(
        metadata=flag(
            "--num-layers", "number of transformer layers", positive=True, maximum=100_000
        )
    )
    hidden_size: int = field(
        metadata=flag(
            "--hidden-size",
            "width of the residual stream",
            positive=True,
            unit="channels",
            small=24,
        )
    )
    add_bias_linear: bool = field(
        default=True, metadata=flag("--disable-bias-linear", "biases in every linear layer")
    )
    init_method_std: float = field(
        default=0.02,
        metadata=flag(
            "--init-method-std",
            "standard deviation of initial weights; divided by sqrt(2 x num_layers) for "
            "projections back to the residual stream",
            positive=True,
        ),
    )

    def fields_for_layers(self, layers: Sequence[int]) -> dict[str, Any]:
        """Returns the fields that differ in a model with only some of the layers."""
        return super().fields_for_layers(layers) | {"num_layers": len(layers)}

    @property
    def output_std(self) -> float:
        """Standard deviation of initial weights of projections to the residual stream."""
        return self.init_method_std / math.sqrt(2 * self.num_layers)
