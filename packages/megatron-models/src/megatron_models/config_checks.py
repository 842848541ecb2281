"""What a model configuration must fulfil; `GPTConfig` asks when it is made.

Messages name fields in braces, so that whoever took the values from flags can say so.
"""

import dataclasses
import difflib
import math
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from megatron_models.errors import ConfigError
from megatron_models.layer_pattern import PatternError, layer_pattern

if TYPE_CHECKING:
    from megatron_models.config import GPTConfig

FILLED = ("num_query_groups", "kv_channels", "ffn_hidden_size")
"""Fields whose 0 stands for a value worked out from others."""

_POSITIVE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    *FILLED,
    "make_vocab_size_divisible_by",
    "rotary_base",
    "rope_scaling_factor",
    "rope_scaling_low_freq_factor",
    "rope_scaling_high_freq_factor",
    "rope_scaling_original_length",
    "norm_epsilon",
    "init_method_std",
)


_LARGEST = 2**40
_MOST = {"num_layers": 100_000, "num_experts": 100_000}
"""A configuration may come from a damaged file: what is counted through has a bound."""


def check_type(config: "GPTConfig", entry: "dataclasses.Field[Any]") -> None:
    """Refuse a value of another type; an integer given for a float becomes one."""
    value, kind = getattr(config, entry.name), entry.type
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if value in choices:
            return
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{{{entry.name}:name}} is {{{entry.name}:repr}}, not one of "
            f"{', '.join(choices)}{hint}",
            vars(config),
        )
    if kind is float and type(value) is int and abs(value) < 2**1000:
        object.__setattr__(config, entry.name, float(value))
        return
    if type(value) is not kind:
        wanted = {int: "an integer", float: "a number", bool: "true or false", str: "text"}[kind]  # type: ignore[index]
        raise ConfigError(
            f"{{{entry.name}:name}} must be {wanted}, not {{{entry.name}:repr}}", vars(config)
        )


def check_range(config: "GPTConfig") -> None:
    """Refuse sizes and numbers outside their range."""
    for entry in dataclasses.fields(config):
        largest = _MOST.get(entry.name, _LARGEST)
        if entry.type is int and getattr(config, entry.name) > largest:
            raise ConfigError(
                f"{{{entry.name}:name}} is {{{entry.name}:repr}}, more than {largest}", vars(config)
            )
    for name in _POSITIVE:
        value = getattr(config, name)
        if value == 0 and name in FILLED:
            continue
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(
                f"{{{name}:name}} must be a positive number, not {{{name}:repr}}", vars(config)
            )
    if not 0 < config.rotary_percent <= 1:
        raise ConfigError(
            "{rotary_percent:name} must lie in (0, 1], not {rotary_percent:repr}", vars(config)
        )


def check_fit(config: "GPTConfig") -> None:
    """Refuse values that do not fit together; all of them are filled in."""
    heads, groups = config.num_attention_heads, config.num_query_groups
    if heads % groups:
        raise ConfigError(
            "{num_attention_heads} is not a multiple of {num_query_groups}; every group needs "
            "equally many heads",
            vars(config),
        )
    if config.position_embedding_type == "rope":
        _check_rope(config)
    _check_experts(config)


def _check_rope(config: "GPTConfig") -> None:
    if config.rotary_dim < 2 or config.rotary_dim % 2:
        raise ConfigError(
            "rotary positions turn pairs of channels, but {kv_channels} x {rotary_percent} gives "
            f"{config.rotary_dim}; make it even",
            vars(config),
        )
    low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
    if config.rope_scaling_type == "llama3" and low >= high:
        raise ConfigError(
            "{rope_scaling_low_freq_factor} must be below {rope_scaling_high_freq_factor}",
            vars(config),
        )


def _check_experts(config: "GPTConfig") -> None:
    for name in _NOT_NEGATIVE:
        value = getattr(config, name)
        if not (value >= 0 and math.isfinite(value)):
            raise ConfigError(
                f"{{{name}:name}} must be a number from 0 on, not {{{name}:repr}}", vars(config)
            )
    if not config.num_experts:
        for entry in dataclasses.fields(config):
            if entry.name.startswith("moe_") and getattr(config, entry.name) != entry.default:
                raise ConfigError(
                    f"{{{entry.name}}} needs {{num_experts:name}}, of which there are none",
                    vars(config),
                )
        return
    if not 1 <= config.moe_router_topk <= config.num_experts:
        raise ConfigError("{moe_router_topk} must lie between 1 and {num_experts}", vars(config))
    if config.moe_aux_loss_coeff and config.moe_router_load_balancing_type == "none":
        raise ConfigError(
            "{moe_aux_loss_coeff} has no effect with {moe_router_load_balancing_type}; change one "
            "of them",
            vars(config),
        )
    try:
        pattern = layer_pattern(config.moe_layer_freq, config.num_layers)
    except PatternError as error:
        told = str(error).replace("{", "{{").replace("}", "}}")
        raise ConfigError(f"{{moe_layer_freq:name}}: {told}", vars(config)) from None
    if not any(pattern):
        raise ConfigError("{moe_layer_freq} gives no layer any experts", vars(config))


_NOT_NEGATIVE = (
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
)
