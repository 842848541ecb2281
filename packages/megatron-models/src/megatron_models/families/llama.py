"""Llama 2 and 3, and models of the same shape: rotary positions, RMSNorm, SwiGLU, query groups.

Touvron et al., 2023 and the Llama 3 report. Hugging Face stores rotary channels as two halves, as
we do, so no row permutes them.
"""

import reprlib
from collections.abc import Mapping
from typing import Any, cast

from megatron_models.config import GPTConfig, RopeScalingType
from megatron_models.errors import ConfigError
from megatron_models.families.family import Family, Operation, Row, need, refuse_unless, require

_QKV: Operation = (
    "interleave_qkv",
    {"heads": "$num_attention_heads", "groups": "$num_query_groups", "head_dim": "$kv_channels"},
)
_GATE_UP: Operation = ("stack", {"dim": 0})
_VOCAB: Operation = ("slice_rows", {"rows": "$vocab_size"})
_BLOCK = "model.layers.{i}"


def _linears(part: str) -> tuple[Row, ...]:
    attention, mlp = f"{_BLOCK}.self_attn", f"{_BLOCK}.mlp"
    query_key_value = tuple(f"{attention}.{name}_proj.{part}" for name in "qkv")
    gate_up = (f"{mlp}.gate_proj.{part}", f"{mlp}.up_proj.{part}")
    return (
        (f"layers.{{i}}.attention.qkv.{part}", query_key_value, (_QKV,)),
        (f"layers.{{i}}.attention.out.{part}", (f"{attention}.o_proj.{part}",), ()),
        (f"layers.{{i}}.mlp.up.{part}", gate_up, (_GATE_UP,)),
        (f"layers.{{i}}.mlp.down.{part}", (f"{mlp}.down_proj.{part}",), ()),
    )


_ROWS: tuple[Row, ...] = (
    ("embedding.word.weight", ("model.embed_tokens.weight",), (_VOCAB,)),
    ("layers.{i}.attention_norm.weight", (f"{_BLOCK}.input_layernorm.weight",), ()),
    ("layers.{i}.mlp_norm.weight", (f"{_BLOCK}.post_attention_layernorm.weight",), ()),
    *_linears("weight"),
    *_linears("bias"),
    ("final_norm.weight", ("model.norm.weight",), ()),
    ("output.weight", ("lm_head.weight",), (_VOCAB,)),
)

_ALLOWED: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish"), "pretraining_tp": (1,)}


_ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "factor"),
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _rope_parameters(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary settings after refusing those that are not read."""
    given = [values[key] for key in ("rope_parameters", "rope_scaling") if values.get(key)]
    maps = [each for each in given if isinstance(each, Mapping)]
    bare = [{key: each[key] for key in each if key != "rope_theta"} for each in maps]
    if len(maps) < len(given) or any(each != bare[0] for each in bare):
        raise ConfigError(
            f"rotary settings are {reprlib.repr(given)}, not one map: give rope_parameters or "
            "rope_scaling"
        )
    bases = [each["rope_theta"] for each in (values, *maps) if each.get("rope_theta") is not None]
    others = [base for base in bases if base != bases[0]]
    if others:
        raise ConfigError(
            f"rope_theta is {reprlib.repr(bases[0])} and {reprlib.repr(others[0])} in the "
            "rotary settings"
        )
    settings = bare[0] if bare else {}
    if bases:
        settings["rope_theta"] = bases[0]
    for key, value in settings.items():
        neutral = value is None or (key == "partial_rotary_factor" and value == 1)
        if key not in _ROPE_KEYS and not neutral:
            raise ConfigError(
                f"rotary settings with {reprlib.repr(key)} = {reprlib.repr(value)} are not "
                "supported"
            )
    return settings


def _rope_from_hf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the rotary settings, in the spelling of transformers 4 or 5."""
    scaling = _rope_parameters(values)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    base = scaling.get("rope_theta") or values.get("rope_theta") or 10000.0
    settings: dict[str, Any] = {"rotary_base": base}
    if kind == "default":
        return settings
    if kind not in ("linear", "llama3"):
        raise ConfigError(
            f"rotary scaling of type {reprlib.repr(kind)} is not supported, only linear and llama3"
        )
    settings["rope_scaling_type"] = cast(RopeScalingType, kind)
    settings["rope_scaling_factor"] = need(scaling, "factor", "rope_scaling")
    if kind == "llama3":
        for ours, theirs in _LLAMA3.items():
            settings[ours] = need(scaling, theirs, "rope_scaling")
    return settings


_LLAMA3 = {
    "rope_scaling_low_freq_factor": "low_freq_factor",
    "rope_scaling_high_freq_factor": "high_freq_factor",
    "rope_scaling_original_length": "original_max_position_embeddings",
}


def _rope_to_hf(config: GPTConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {"rope_theta": config.rotary_base, "rope_scaling": None}
    if config.rope_scaling_type == "none":
        return settings
    scaling = {"rope_type": config.rope_scaling_type, "factor": config.rope_scaling_factor}
    if config.rope_scaling_type == "llama3":
        scaling |= {theirs: getattr(config, ours) for ours, theirs in _LLAMA3.items()}
    return settings | {"rope_scaling": scaling}


def config_from_hf(values: Mapping[str, Any]) -> GPTConfig:
    """Read the content of a Llama ``config.json``."""
    refuse_unless(values, _ALLOWED, "Llama")
    attention, mlp = bool(values.get("attention_bias")), bool(values.get("mlp_bias"))
    everywhere = attention and mlp
    return GPTConfig(
        num_layers=need(values, "num_hidden_layers", "Llama"),
        hidden_size=need(values, "hidden_size", "Llama"),
        num_attention_heads=need(values, "num_attention_heads", "Llama"),
        num_query_groups=values.get("num_key_value_heads") or 0,
        kv_channels=values.get("head_dim") or 0,
        ffn_hidden_size=need(values, "intermediate_size", "Llama"),
        vocab_size=need(values, "vocab_size", "Llama"),
        max_position_embeddings=need(values, "max_position_embeddings", "Llama"),
        position_embedding_type="rope",
        normalization="RMSNorm",
        norm_epsilon=values.get("rms_norm_eps", 1e-6),
        activation="swiglu",
        add_bias_linear=everywhere,
        add_qkv_bias=attention and not everywhere,
        add_attention_out_bias=attention and not everywhere,
        add_mlp_bias=mlp and not everywhere,
        untie_embeddings_and_output_weights=not values.get("tie_word_embeddings", False),
        init_method_std=values.get("initializer_range", 0.02),
        **_rope_from_hf(values),
    )


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Make the content of a Llama ``config.json``."""
    wanted = {
        "num_experts": 0,
        "softmax_type": "vanilla",
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "has_qkv_bias": config.has_attention_out_bias,
    }
    require(config, wanted, "Llama")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "intermediate_size": config.ffn_hidden_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_epsilon,
        "hidden_act": "silu",
        "attention_bias": config.has_qkv_bias,
        "mlp_bias": config.has_mlp_bias,
        "attention_dropout": 0.0,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        **_rope_to_hf(config),
    }


FAMILY = Family(
    name="llama",
    version=1,
    architectures=("LlamaForCausalLM",),
    rows=_ROWS,
    config_to_hf=config_to_hf,
    config_from_hf=config_from_hf,
    conditions={
        "output.weight": "untie_embeddings_and_output_weights",
        "layers.{i}.attention.qkv.bias": "has_qkv_bias",
        "layers.{i}.attention.out.bias": "has_attention_out_bias",
        "layers.{i}.mlp.up.bias": "has_mlp_bias",
        "layers.{i}.mlp.down.bias": "has_mlp_bias",
    },
    ignored=(
        (
            "lm_head.weight",
            "same_as",
            {"other": "model.embed_tokens.weight", "rows": "$vocab_size"},
        ),
        (
            f"{_BLOCK}.self_attn.rotary_emb.inv_freq",
            "rotary_frequencies",
            {"base": "$rotary_base", "dim": "$rotary_dim"},
        ),
    ),
    prefix="model.",
)
