"""The configuration of an upcycled model. Importing this module does not import torch."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

from megatron_parallel.nearest import nearest_divisors, nearest_multiples

from megatron_models.components.moe.config import MoEConfig
from megatron_models.errors import ConfigError
from megatron_models.models.model_config import ModelConfig

UPCYCLING_REFUSED: Final = (
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_router_expert_choice",
    "moe_router_force_load_balancing",
    "moe_apply_probs_on_input",
    "moe_expert_capacity_factor",
    "moe_token_drop_policy",
    "moe_pad_expert_input_to_capacity",
)
"""Fields of experts whose values upcycling derives, or with which the function would change."""


def upcycled_config(
    dense: ModelConfig, granularity: int, changes: Mapping[str, Any]
) -> ModelConfig:
    """Returns the configuration of the upcycled model.

    Args:
        dense: Configuration of the dense model.
        granularity: Number of slices that the feed-forward width is cut into.
        changes: Fields of experts and their values, with ``num_experts``.

    Raises:
        ConfigError: The model has experts already or cannot have any, sizes do not fit, or a field
            would change the function.
    """
    if not isinstance(dense, MoEConfig):
        raise ConfigError(f"a model of kind {dense.kind!r} cannot have experts; give another model")
    if dense.num_experts:
        raise ConfigError("the model has {num_experts} already; give a dense model", vars(dense))
    if wrong := [name for name in UPCYCLING_REFUSED if name in changes]:
        raise ConfigError(
            f"{{{wrong[0]}:name}} cannot be set by upcycling, which keeps the function of the "
            "dense model; leave it out",
            vars(dense),
        )
    if not changes.get("num_experts"):
        raise ConfigError("upcycling needs experts; set {num_experts:name}", vars(dense))
    if not 1 <= granularity <= dense.ffn_hidden_size or dense.ffn_hidden_size % granularity:
        raise ConfigError(
            f"a granularity of {granularity} does not divide {{ffn_hidden_size}}; use "
            f"{nearest_divisors(dense.ffn_hidden_size, granularity)}",
            vars(dense),
        )
    values = {**changes, "moe_ffn_hidden_size": dense.ffn_hidden_size // granularity}
    found = dataclasses.replace(dense, **values)
    groups = found.moe_router_num_groups or 1
    for size, text in (
        (found.num_experts // groups, "the experts of a group" if groups > 1 else "{num_experts}"),
        (found.moe_router_topk, "{moe_router_topk}"),
    ):
        if size % granularity:
            raise ConfigError(
                f"a granularity of {granularity} does not divide {text}; use a multiple of "
                f"{granularity}, such as {nearest_multiples(size, granularity)}",
                vars(found),
            )
    return found


def expert_weight_sum(config: ModelConfig) -> tuple[float, bool]:
    """Returns the sum of the weights of a token's experts, and whether it is so for every token."""
    if not isinstance(config, MoEConfig) or not config.num_experts:
        raise ConfigError("the model has no experts, so their weights have no sum")
    factor = config.moe_router_topk_scaling_factor
    if config.softmax_of_selected or config.normalizes_weights:
        return factor, True
    scores = {"softmax": 1 / config.num_experts, "sigmoid": 0.5, "sqrtsoftplus": math.log(2) ** 0.5}
    return factor * config.moe_router_topk * scores[config.moe_router_score_function], False
