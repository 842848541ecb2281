"""Models whose linear layers multiply in few bits.

    placement = low_precision_placement(config, LowPrecisionConfig(fp8_format="hybrid"), placement)

All linear layers of transformer layers do so; embeddings, routers, attention scores and the output
layer do not.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import torch
from megatron_kernels import NEVER_RUN, quantize, quantized_matmul
from megatron_kernels.transformer_engine import NAME as TRANSFORMER_ENGINE
from megatron_parallel import RecomputeConfig

from megatron_models.errors import ConfigError
from megatron_models.low_precision.checks import GROUPED, QUANTIZE, check_low_precision
from megatron_models.low_precision.config import LowPrecisionConfig
from megatron_models.low_precision.delayed import DelayedProduct
from megatron_models.low_precision.memory import linear_roles, plain_layers
from megatron_models.low_precision.product import LowPrecisionProduct
from megatron_models.low_precision.recipe import recipe_of
from megatron_models.models.model_config import ModelConfig
from megatron_models.placement import Placement
from megatron_models.transformer_engine.recipe import (
    transformer_engine_product,
    transformer_engine_recipe,
)

_READ_SHARED: Final = frozenset({"linear_proj", "linear_kv"})
"""Attention saves its output, and all layers of a decoder read the output of the encoder."""

_READ_NORMS: Final = frozenset(
    {
        "linear_qkv",
        "linear_q",
        "linear_q_proj",
        "linear_q_down_proj",
        "linear_kv_down_proj",
        "linear_fc1",
        "in_proj",
        "linear",
    }
)
"""Layers that read the result of a norm, which `--recompute-modules layernorm` recomputes."""


def low_precision_product(config: LowPrecisionConfig) -> LowPrecisionProduct:
    """Returns the product of a configuration.

    Raises:
        ConfigError: The configuration has no recipe.
    """
    recipe = recipe_of(config)
    if config.fp8_format is None or config.fp8_recipe != "delayed":
        return LowPrecisionProduct(recipe)
    return DelayedProduct(
        recipe,
        margin=config.fp8_margin,
        length=config.fp8_amax_history_len,
        algorithm=config.fp8_amax_compute_algo,
    )


def low_precision_placement(
    model: ModelConfig, config: LowPrecisionConfig, placement: Placement
) -> Placement:
    """Returns a placement whose linear layers multiply in few bits.

    They do so by Transformer Engine if that is the placement's backend of ``linear``.

    Args:
        model: The model's configuration.
        config: Formats and recipe. Without them the placement itself is returned.
        placement: The placement, with plain products.

    Raises:
        ConfigError: The recipe does not cover the model, or the placement has other products.
    """
    if not config.enabled:
        return placement
    check_low_precision(model, config)
    if placement.products:
        raise ConfigError(
            f"products {', '.join(sorted(placement.products))} are not computed in {config.name}; "
            "leave them out"
        )
    roles = linear_roles(model.parameters())
    if placement.backend("linear") == TRANSFORMER_ENGINE:
        if any(spec.role and spec.sharding.experts for spec in model.parameters().values()):
            raise ConfigError(
                f"experts do not multiply in {config.name} by Transformer Engine; choose another "
                "backend of linear, or leave out the recipe"
            )
        by_library = dict.fromkeys(sorted(roles), transformer_engine_product(config))
        plain = plain_layers(config, model.depth)
        return replace(placement, products=by_library, plain_layers=plain)
    product = low_precision_product(config)
    chosen = tuple((name, placement.backend(name)) for name in (QUANTIZE, *GROUPED))
    product = replace(product, backends=chosen)
    kept = roles_that_keep_inputs(placement.recompute)
    products = {role: replace(product, keeps_input=role in kept) for role in sorted(roles)}
    return replace(placement, products=products, plain_layers=plain_layers(config, model.depth))


def roles_that_keep_inputs(recompute: RecomputeConfig) -> frozenset[str]:
    """Returns the roles of layers that save their input as it is, since that needs less memory.

    Another operation saves it too, or it is recomputed.

    Args:
        recompute: What the backward pass recomputes.
    """
    if recompute.selects("layernorm"):
        return _READ_SHARED | _READ_NORMS
    return _READ_SHARED


def describe_low_precision(
    config: LowPrecisionConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    backends: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Returns in one line how the layers multiply on a device; empty without a recipe.

    Args:
        config: Formats and recipe.
        device: Device of the model.
        dtype: Dtype of the model.
        backends: Requested backends, as in `Placement.backends`.

    Raises:
        ConfigError: Transformer Engine is requested and does not support the recipe here.
    """
    if not config.enabled:
        return ""
    if backends.get("linear") == TRANSFORMER_ENGINE:
        reason = transformer_engine_recipe(config).unavailable_reason()
        if reason is not None:
            raise ConfigError(f"{config.name} by Transformer Engine: {reason}")
        return f"linear layers multiply in {config.name} by Transformer Engine, {NEVER_RUN}"
    recipe, sample = recipe_of(config), torch.ones(16, 16, device=device)
    x, weight = quantize(sample, recipe.input), quantize(sample, recipe.weight)
    choice = quantized_matmul.explain(x, weight, None, dtype)
    descriptions = {status.backend: status.description for status in choice.statuses}
    return (
        f"linear layers multiply in {config.name}, with the backend {choice.backend} "
        f"({descriptions[choice.backend or '']})"
    )
