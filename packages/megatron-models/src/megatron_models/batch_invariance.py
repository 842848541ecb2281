"""Batch-invariant models: the logits of a sequence do not depend on what is computed with it.

    placement = batch_invariant(config, placement)

A token's logits then have the same bits alone, in a batch, in chunks with a cache and one after
another, on the same layout of ranks and with the same number of threads. Linear layers, norms,
activations and attention use the backends `batch-invariant` of `megatron_kernels`.
"""

from dataclasses import replace
from typing import Final

from megatron_models.components.attention.spec import AttentionSpec
from megatron_models.components.mlp.spec import MLPSpec
from megatron_models.errors import ConfigError
from megatron_models.fused_operations import FUSED, SEPARATE
from megatron_models.models.model_config import ModelConfig
from megatron_models.placement import Placement

BACKEND: Final = "batch-invariant"
OPERATIONS: Final = (
    "linear",
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


def batch_invariant(config: ModelConfig, placement: Placement) -> Placement:
    """Returns a placement with batch-invariant backends.

    Args:
        config: The model's configuration.
        placement: The placement, with plain products.

    Raises:
        ConfigError: The model has layers without batch-invariant operations, such as experts, or
            the placement has other products or backends.
    """
    if placement.products:
        raise ConfigError(
            f"products {', '.join(sorted(placement.products))} are not batch-invariant; leave them "
            "out"
        )
    chosen = {name: placement.backend(name) for name in OPERATIONS if name in placement.backends}
    if different := [f"{name} {each}" for name, each in chosen.items() if each != BACKEND]:
        raise ConfigError(
            f"backends {', '.join(different)} are not batch-invariant; leave them out"
        )
    others = {type(mixer).__name__ for mixer in config.mixers} - _MIXERS
    if others:
        raise ConfigError(
            f"layers of {', '.join(sorted(others))} have no batch-invariant operations; use a "
            f"model of {' and '.join(sorted(_MIXERS))} alone"
        )
    separate = dict.fromkeys(FUSED, SEPARATE)
    backends = {**separate, **placement.backends, **dict.fromkeys(OPERATIONS, BACKEND)}
    return replace(placement, backends=backends)
