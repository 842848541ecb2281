"""Batch-invariant models: the logits of a sequence do not depend on what is computed with it.

    placement = batch_invariant(config, placement)

A token's logits then have the same bits alone, in a batch, in chunks with a cache and one after
another, on the same layout of ranks and with the same number of threads. Linear layers, norms,
activations and attention use the backends `batch-invariant` of `megatron_kernels`.
"""

from dataclasses import replace
from typing import Final

from megatron_kernels import linear
from megatron_parallel.tensor_parallel.product import (
    Multiply,
    PlainProduct,
    Weights,
    as_matrix,
    multiply_matrix,
)
from torch import Tensor

from megatron_models.components.attention.spec import AttentionSpec
from megatron_models.components.mlp.spec import MLPSpec
from megatron_models.errors import ConfigError
from megatron_models.models.model_config import ModelConfig
from megatron_models.placement import Placement

BACKEND: Final = "batch-invariant"
OPERATIONS: Final = (
    "attention",
    "layer_norm",
    "rms_norm",
    "gelu",
    "glu",
    "pointwise",
    "swiglu",
)
"""Operations of a layer whose results could depend on other rows."""

_MIXERS: Final = {AttentionSpec.__name__, MLPSpec.__name__}


class BatchInvariantProduct(PlainProduct):
    """The product `x W^T + b` of a fixed number of rows at a time."""

    def forward(
        self,
        x: Tensor,
        weights: Weights,
        bias: Tensor | None = None,
        multiply: Multiply = multiply_matrix,
    ) -> Tensor:
        """Returns `x W^T + b`. The gradients are those of the plain product."""
        del multiply
        return linear(x, as_matrix(weights[0]), bias, backend=BACKEND)


def batch_invariant(config: ModelConfig, placement: Placement) -> Placement:
    """Returns a placement with batch-invariant products and backends.

    Args:
        config: The model's configuration.
        placement: The placement, with plain products.

    Raises:
        ConfigError: The model has layers without batch-invariant operations, such as experts, or
            the placement has other products.
    """
    if placement.products:
        raise ConfigError(
            f"products {', '.join(sorted(placement.products))} are not batch-invariant; leave them "
            "out"
        )
    specs = config.parameters().values()
    others = {type(mixer).__name__ for mixer in config.mixers} - _MIXERS
    if others:
        raise ConfigError(
            f"layers of {', '.join(sorted(others))} have no batch-invariant operations; use a "
            f"model of {' and '.join(sorted(_MIXERS))} alone"
        )
    roles = {spec.role for spec in specs} - {""}
    return replace(
        placement,
        products=dict.fromkeys(roles | {"output_layer"}, BatchInvariantProduct()),
        backends={**dict.fromkeys(OPERATIONS, BACKEND), **placement.backends},
    )
