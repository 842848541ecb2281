"""Transformer Engine's products of a configuration of few bits."""

from megatron_kernels.transformer_engine import TransformerEngineRecipe

from megatron_models.errors import ConfigError
from megatron_models.low_precision.config import LowPrecisionConfig
from megatron_models.transformer_engine.delayed import DelayedProduct
from megatron_models.transformer_engine.product import QuantizedProduct


def transformer_engine_recipe(config: LowPrecisionConfig) -> TransformerEngineRecipe:
    """Returns the formats of a configuration.

    Raises:
        ConfigError: The configuration has none.
    """
    if not config.enabled:
        raise ConfigError("the configuration has no recipe; set fp8_format or fp4_format")
    if config.fp4_format is not None:
        return TransformerEngineRecipe(config.fp4_recipe)
    return TransformerEngineRecipe(config.fp8_recipe, config.fp8_format == "hybrid")


def transformer_engine_product(config: LowPrecisionConfig) -> QuantizedProduct:
    """Returns the product of a configuration.

    Raises:
        ConfigError: The configuration has no recipe.
    """
    recipe = transformer_engine_recipe(config)
    if recipe.scaling != "delayed":
        return QuantizedProduct(recipe, config.fp8_wgrad)
    return DelayedProduct(
        recipe,
        config.fp8_wgrad,
        config.fp8_margin,
        config.fp8_amax_history_len,
        config.fp8_amax_compute_algo,
    )
