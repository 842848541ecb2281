"""The text models of Llama 4: chunked attention, layers without positions, experts (Meta, 2025).

Layers with rotary positions attend within chunks and normalize queries and keys without a gain.
Layers without positions attend to all tokens, and the magnitude of queries grows with the position.
Rotary pairs are neighbouring channels. A token uses a shared expert, and others whose inputs are
multiplied by the sigmoid of their logits.
"""

import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from megatron_models.errors import ConfigError
from megatron_models.families.family import Family, Operation, Row, Where
from megatron_models.families.settings import (
    Constant,
    Custom,
    HFConfig,
    Mapped,
    Translated,
    unsupported_field,
    unsupported_hf_field,
)
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.families import llama
from megatron_models.models.gpt.families.biases import attention_bias
from megatron_models.models.gpt.families.qwen3_moe import pattern
from megatron_models.models.gpt.families.rope import rope
from megatron_models.models.gpt.families.smollm3 import NO_ROPE
from megatron_models.models.gpt.families.windows import windows

_BLOCK = "model.layers.{i}"
_FEED_FORWARD = f"{_BLOCK}.feed_forward"
_EXPERTS: Where = {"if": "$moe_layers"}
_STACK: Operation = ("stack", {"dim": 0})
_ROWS_FIRST: Operation = ("transpose", {"dims": [0, 2, 1]})
_GATE_UP: Operation = (
    "reshape",
    {
        "shape": ["$num_experts", 2, "$moe_ffn_hidden_size", "$hidden_size"],
        "source": ["$num_experts", -1, "$hidden_size"],
    },
)
_MOST_LAYERS: Final = 100_000  # the configuration refuses more
_INTERVAL: Final = 4


def _dense(ours: str, theirs: str, where: Where) -> tuple[Row, Row]:
    gate_up = tuple(f"{theirs}.{name}_proj.weight" for name in ("gate", "up"))
    return (
        (f"layers.{{i}}.{ours}.up.weight", gate_up, (_STACK,), where),
        (f"layers.{{i}}.{ours}.down.weight", (f"{theirs}.down_proj.weight",), (), where),
    )


_ROWS: tuple[Row, ...] = (
    *(
        row
        for row in llama.FAMILY.rows
        if row[0] in ("layers.{i}.attention.qkv.bias", "layers.{i}.attention.out.bias")
    ),
    *_dense("mlp", _FEED_FORWARD, {"unless": "$moe_layers"}),
    *_dense("mlp.shared", f"{_FEED_FORWARD}.shared_expert", _EXPERTS),
    ("layers.{i}.mlp.router.weight", (f"{_FEED_FORWARD}.router.weight",), (), _EXPERTS),
    (
        "layers.{i}.mlp.experts.up.weight",
        (f"{_FEED_FORWARD}.experts.gate_up_proj",),
        (_ROWS_FIRST, _GATE_UP),
        _EXPERTS,
    ),
    (
        "layers.{i}.mlp.experts.down.weight",
        (f"{_FEED_FORWARD}.experts.down_proj",),
        (_ROWS_FIRST,),
        _EXPERTS,
    ),
)


def _no_rope_from_hf(title: str, hf_config: HFConfig) -> Mapping[str, Any]:
    """Reads an empty list of layers like null, as transformers does."""
    if hf_config.get("no_rope_layers") == []:
        hf_config = {**hf_config, "no_rope_layers": None}
    return NO_ROPE.read(title, hf_config)


def _rotated(hf_config: HFConfig, count: int) -> Sequence[bool]:
    """Returns the layers with rotary positions, which attend within chunks in older files."""
    listed = hf_config.get("no_rope_layers")
    if listed and isinstance(listed, list):
        return [bool(each) for each in listed[:count]]
    interval = hf_config.get("no_rope_layer_interval", _INTERVAL)
    if type(interval) is not int or interval < 1:
        return [True] * count  # refused by the setting of positions
    return [number % interval != 0 for number in range(1, count + 1)]


def _temperature_from_hf(title: str, hf_config: HFConfig) -> Mapping[str, Any]:
    tuned = hf_config.get("attn_temperature_tuning", True)
    if type(tuned) not in (bool, int):
        raise unsupported_hf_field(title, "attn_temperature_tuning", tuned, [False, True])
    count, scale = hf_config.get("num_hidden_layers"), hf_config.get("attn_scale", 0.1)
    if type(count) is not int or not 0 < count <= _MOST_LAYERS:
        return {}
    if type(scale) not in (int, float) or scale < 0:
        raise unsupported_hf_field(title, "attn_scale", scale, ["numbers of at least 0"])
    if not (tuned and scale) or all(_rotated(hf_config, count)):
        return {}
    return {
        "attn_temperature_scale": scale,
        "attn_temperature_floor": hf_config.get("floor_scale", 8192),
    }


def _temperature_to_hf(config: GPTConfig) -> Mapping[str, Any]:
    scale = config.attn_temperature_scale
    return {
        "attn_temperature_tuning": bool(scale),
        "attn_scale": scale,
        "floor_scale": config.attn_temperature_floor,
    }


def _layers_from_hf(title: str, hf_config: HFConfig) -> Mapping[str, str]:
    count, step = hf_config.get("num_hidden_layers"), hf_config.get("interleave_moe_layer_step", 1)
    if type(count) is not int or not 0 < count <= _MOST_LAYERS:
        return {}
    if type(step) is not int or step < 1:
        raise unsupported_hf_field(
            title, "interleave_moe_layer_step", step, ["numbers of at least 1"]
        )
    listed = hf_config.get("moe_layers")
    if listed is None:
        listed = list(range(step - 1, count, step))
    if not isinstance(listed, list) or any(type(each) is not int for each in listed):
        raise unsupported_hf_field(title, "moe_layers", listed, ["numbers of layers"])
    chosen = {*listed}
    experts = [layer in chosen for layer in range(count)]
    if not any(experts):
        raise ConfigError(
            f"{title} models with moe_layers = {reprlib.repr(listed)} have no experts; they are "
            "not supported"
        )
    return {"moe_layer_freq": pattern(experts)}


def _layers_to_hf(config: GPTConfig) -> Mapping[str, list[int]]:
    return {"moe_layers": [layer for layer, experts in enumerate(config.moe_layers) if experts]}


def _widths_from_hf(title: str, hf_config: HFConfig) -> Mapping[str, Any]:
    width = hf_config.get("intermediate_size", 8192)
    return {"moe_ffn_hidden_size": width, "moe_shared_expert_intermediate_size": width}


def _widths_to_hf(config: GPTConfig) -> Mapping[str, int]:
    width, shared = config.moe_ffn_hidden_size, config.moe_shared_expert_intermediate_size
    if shared != width:
        raise unsupported_field("moe_shared_expert_intermediate_size", str(width), shared)
    return {"intermediate_size": width}


def _weights_from_hf(title: str, hf_config: HFConfig) -> Mapping[str, str]:
    several = hf_config.get("num_experts_per_tok", 1) != 1
    return {"moe_router_norm_topk_prob": "no" if several else "auto"}


def _weights_to_hf(config: GPTConfig) -> Mapping[str, Any]:
    if config.normalizes_weights:
        raise unsupported_field("normalizes_weights", "False", True)
    return {}


FAMILY = Family(
    name="llama4",
    kind="gpt",
    title="Llama 4",
    architectures=("Llama4ForCausalLM",),
    model_type="llama4_text",
    rows=(*llama.START_ROWS, *_ROWS, *llama.HEAD_ROWS),
    settings={
        **llama.FAMILY.settings,
        "num_query_groups": Mapped("num_key_value_heads", absent=8, null=0),
        "kv_channels": Mapped("head_dim", absent=128, null=0),
        "norm_epsilon": Mapped("rms_norm_eps", absent=1e-5),
        "rotary_interleaved": Constant(True),
        "qk_l2_norm": Translated("use_qk_norm", ((True, True), (False, False)), absent=True),
        "ffn_hidden_size": Mapped("intermediate_size_mlp", absent=16384),
        "num_experts": Mapped("num_local_experts", absent=16),
        "moe_router_topk": Mapped("num_experts_per_tok", absent=1),
        "moe_router_score_function": Constant("sigmoid"),
        "moe_apply_probs_on_input": Constant(True),
    },
    custom=(
        rope(500000.0),
        dataclasses.replace(NO_ROPE, read=_no_rope_from_hf),
        windows(
            _rotated,
            name="attention_chunk_size",
            absent=8192,
            reads=("no_rope_layers", "no_rope_layer_interval"),
        ),
        Custom(
            ("attn_temperature_scale", "attn_temperature_floor"),
            ("attn_temperature_tuning", "attn_scale", "floor_scale"),
            read=_temperature_from_hf,
            write=_temperature_to_hf,
        ),
        attention_bias(absent=False, mlp=False),
        Custom(
            ("moe_layer_freq",),
            ("moe_layers", "interleave_moe_layer_step"),
            read=_layers_from_hf,
            write=_layers_to_hf,
        ),
        Custom(
            ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
            ("intermediate_size",),
            read=_widths_from_hf,
            write=_widths_to_hf,
        ),
        Custom(("moe_router_norm_topk_prob",), (), read=_weights_from_hf, write=_weights_to_hf),
    ),
    # Losses and noise of the router belong to training; the last is a note for a library.
    without_effect=frozenset(
        {
            *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
            "for_llm_compressor",
        }
    ),
    exported_constants={"attention_dropout": 0.0},
    ignored=llama.FAMILY.ignored[:1],
    prefix="model.",
)
