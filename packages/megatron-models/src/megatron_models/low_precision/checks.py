"""Checks of products in few bits against a model. This module does not import torch."""

from typing import Final

from megatron_models.errors import ConfigError
from megatron_models.low_precision.config import LowPrecisionConfig
from megatron_models.models.model_config import ModelConfig

QUANTIZE: Final = "quantize_tensor"
"""The operation of `megatron_kernels` that casts operands with one scale."""

GROUPED: Final = ("quantized_grouped_matmul", "quantized_grouped_gradient")
"""Those of experts."""

_ONE_SCALE: Final = ("delayed", "tensorwise")


def check_low_precision(model: ModelConfig, config: LowPrecisionConfig) -> None:
    """Refuses models without such products.

    Raises:
        ConfigError: The recipe does not cover experts, which the model has, or its outermost layers
            are not defined.
    """
    if not config.enabled:
        return
    form = "fp8_format" if config.fp4_format is None else "fp4_format"
    if _has_experts(model):
        _check_experts(config, form)
    if not config.first_last_layers_bf16:
        return
    if len(model.trunks()) > 1:
        raise ConfigError(
            "{first_last_layers_bf16:name} is not defined for a model of several stacks of layers; "
            "leave it out",
            vars(config),
        )
    ends = config.num_layers_at_start_in_bf16 + config.num_layers_at_end_in_bf16
    if ends >= model.depth:
        raise ConfigError(
            "{num_layers_at_start_in_bf16} and {num_layers_at_end_in_bf16} leave none of "
            f"{model.depth} layers for {config.name}; lower them",
            vars(config),
        )


def low_precision_operations(model: ModelConfig, config: LowPrecisionConfig) -> tuple[str, ...]:
    """Returns the operations of `megatron_kernels` with a choice of backends that products call."""
    if config.fp8_format is None or config.fp8_recipe not in _ONE_SCALE:
        return ()
    if not _has_experts(model):
        return (QUANTIZE,)
    return QUANTIZE, *GROUPED


def _has_experts(model: ModelConfig) -> bool:
    return any(spec.role and spec.sharding.experts for spec in model.parameters().values())


def _check_experts(config: LowPrecisionConfig, form: str) -> None:
    """Refuses recipes without a product of experts."""
    if config.fp4_format is not None or config.fp8_recipe not in _ONE_SCALE:
        recipe = form if config.fp4_format is not None else "fp8_recipe"
        raise ConfigError(
            f"{{{recipe}}} does not cover the grouped products of experts; use "
            "{fp8_format:name} with the recipe delayed or tensorwise",
            vars(config),
        )
    if not config.fp8_wgrad:
        raise ConfigError(
            "{fp8_wgrad:name} as false does not cover experts, whose gradients are computed in few "
            "bits too; leave it out",
            vars(config),
        )
