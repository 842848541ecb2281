"""Models whose linear layers multiply in few bits.

    placement = low_precision_placement(config, LowPrecisionConfig(fp8_format="hybrid"), placement)

All linear layers of transformer layers do so; embeddings, routers, attention scores and the output
layer do not.
"""

from dataclasses import replace

import torch
from megatron_kernels import quantize, quantized_matmul

from megatron_models.errors import ConfigError
from megatron_models.low_precision.checks import check_low_precision
from megatron_models.low_precision.config import LowPrecisionConfig
from megatron_models.low_precision.product import DelayedProduct, LowPrecisionProduct
from megatron_models.low_precision.recipe import recipe_of
from megatron_models.models.model_config import ModelConfig
from megatron_models.placement import Placement


def low_precision_product(config: LowPrecisionConfig) -> LowPrecisionProduct:
    """Returns the product of a configuration.

    Raises:
        ConfigError: The configuration has no recipe.
    """
    recipe = recipe_of(config)
    if config.fp8_format is None or config.fp8_recipe != "delayed":
        return LowPrecisionProduct(recipe)
    return DelayedProduct(
        recipe, config.fp8_margin, config.fp8_amax_history_len, config.fp8_amax_compute_algo
    )


def low_precision_placement(
    model: ModelConfig, config: LowPrecisionConfig, placement: Placement
) -> Placement:
    """Returns a placement whose linear layers multiply in few bits.

    Args:
        model: The model's configuration.
        config: Formats and recipe. Without them the placement itself is returned.
        placement: The placement, with plain products.

    Raises:
        ConfigError: The model has experts, or the placement has other products.
    """
    if not config.enabled:
        return placement
    check_low_precision(model, config)
    if placement.products:
        raise ConfigError(
            f"products {', '.join(sorted(placement.products))} are not computed in {config.name}; "
            "leave them out"
        )
    roles = {spec.role for spec in model.parameters().values()} - {"", "output_layer"}
    plain = frozenset[int]()
    if config.first_last_layers_bf16:
        last = model.depth - config.num_layers_at_end_in_bf16
        plain = frozenset([*range(config.num_layers_at_start_in_bf16), *range(last, model.depth)])
    product = low_precision_product(config)
    return replace(placement, products=dict.fromkeys(roles, product), plain_layers=plain)


def describe_low_precision(
    config: LowPrecisionConfig, device: torch.device | str, dtype: torch.dtype
) -> str:
    """Returns in one line how the layers multiply on a device; empty without a recipe.

    Args:
        config: Formats and recipe.
        device: Device of the model.
        dtype: Dtype of the model.
    """
    if not config.enabled:
        return ""
    recipe, sample = recipe_of(config), torch.ones(16, 16, device=device)
    x, weight = quantize(sample, recipe.input), quantize(sample, recipe.weight)
    choice = quantized_matmul.explain(x, weight, None, dtype)
    descriptions = {status.backend: status.description for status in choice.statuses}
    return (
        f"linear layers multiply in {config.name}, with the backend {choice.backend} "
        f"({descriptions[choice.backend or '']})"
    )
