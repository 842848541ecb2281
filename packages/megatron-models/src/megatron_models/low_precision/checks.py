"""Checks of products in few bits against a model. This module does not import torch."""

from megatron_models.errors import ConfigError
from megatron_models.low_precision.config import LowPrecisionConfig
from megatron_models.models.model_config import ModelConfig


def check_low_precision(model: ModelConfig, config: LowPrecisionConfig) -> None:
    """Refuses models without such products.

    Raises:
        ConfigError: The model has experts, or its outermost layers are not defined.
    """
    if not config.enabled:
        return
    form = "fp8_format" if config.fp4_format is None else "fp4_format"
    if any(spec.role and spec.sharding.experts for spec in model.parameters().values()):
        raise ConfigError(
            f"{{{form}}} does not cover the grouped products of experts; use a model without "
            "experts, or leave it out",
            vars(config),
        )
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
