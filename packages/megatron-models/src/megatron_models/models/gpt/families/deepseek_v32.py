"""DeepSeek-V3.2: V3 with an indexer that selects the keys of attention (DeepSeek-AI, 2025).

The indexer rotates halves, and has a norm with an epsilon of 1e-6. transformers computes its scores
without the Hadamard transform of the released code, which does not change products, and trains it
with no loss.
"""

import reprlib
from collections.abc import Mapping
from typing import Any

from megatron_models.errors import ConfigError
from megatron_models.families.family import Family, Operation, Row
from megatron_models.families.settings import (
    Constant,
    Custom,
    HFConfig,
    Mapped,
    unsupported_field,
    unsupported_hf_field,
)
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.families import deepseek_settings, deepseek_v3
from megatron_models.models.gpt.families.qwen3_moe import pattern

_TYPES, _FIRST = "mlp_layer_types", "first_k_dense_replace"
_KINDS = {True: "sparse", False: "dense"}
_INDEXED = "indexed_attention"
_MOST_LAYERS = 100_000  # the configuration refuses more
_HEADS: Operation = (
    "reshape",
    {
        "shape": ["$dsa_indexer_n_heads", "$dsa_indexer_head_dim", "$q_lora_rank"],
        "source": [-1, "$q_lora_rank"],
    },
)


def _indexer_rows(ours: str, theirs: str) -> tuple[Row, ...]:
    return tuple(
        (f"{ours}.indexer.{name}", (f"{theirs}.indexer.{hf_name}",), operations)
        for name, hf_name, operations in (
            ("q", "wq_b.weight", (_HEADS,)),
            ("k", "wk.weight", ()),
            ("k_norm.weight", "k_norm.weight", ()),
            ("k_norm.bias", "k_norm.bias", ()),
            ("weights", "weights_proj.weight", ()),
        )
    )


def _layers_from_hf(title: str, hf_config: HFConfig) -> Mapping[str, str]:
    types, count = hf_config.get(_TYPES), hf_config.get("num_hidden_layers")
    if type(count) is not int or not 0 < count <= _MOST_LAYERS:
        return {}
    if types is None:
        first = hf_config.get(_FIRST, 3)
        if type(first) is not int or first < 0:
            raise unsupported_hf_field(title, _FIRST, first, ["integers of at least 0"])
        types = [_KINDS[layer >= first] for layer in range(count)]
    known = isinstance(types, list) and len(types) == count
    if not known or any(each not in _KINDS.values() for each in types):
        raise ConfigError(
            f"{title} models with {_TYPES} = {reprlib.repr(types)} are not supported; give "
            f"{' or '.join(map(repr, _KINDS.values()))} for each layer"
        )
    return {"moe_layer_freq": pattern([each == _KINDS[True] for each in types])}


def _layers_to_hf(config: GPTConfig) -> Mapping[str, Any]:
    first = config.moe_layers.index(True) if any(config.moe_layers) else config.num_layers
    return {_TYPES: [_KINDS[each] for each in config.moe_layers], _FIRST: first}


def _attention_from_hf(title: str, hf_config: HFConfig) -> Mapping[str, Any]:
    if hf_config.get("q_lora_rank", 1536) is None:
        raise unsupported_hf_field(title, "q_lora_rank", None, ["numbers above 0"])
    types = hf_config.get("layer_types")
    if types is not None and (
        not isinstance(types, list) or any(each != _INDEXED for each in types)
    ):
        raise unsupported_hf_field(title, "layer_types", types, [None, f"{_INDEXED!r} everywhere"])
    return deepseek_settings.attention(128).read(title, hf_config)


def _attention_to_hf(config: GPTConfig) -> Mapping[str, Any]:
    if not config.q_lora_rank:
        raise unsupported_field("q_lora_rank", "a number above 0", config.q_lora_rank)
    return deepseek_settings.attention(128).write(config)


_ATTENTION = deepseek_settings.attention(128)
_REPLACED = (("moe_layer_freq",), ("qk_pos_emb_head_dim",), _ATTENTION.fields)

FAMILY = Family(
    name="deepseek_v32",
    kind="gpt",
    title="DeepSeek-V3.2",
    architectures=("DeepseekV32ForCausalLM",),
    model_type="deepseek_v32",
    rows=(
        *deepseek_v3.FAMILY.rows,
        *_indexer_rows("layers.{i}.attention", "model.layers.{i}.self_attn"),
        *_indexer_rows("mtp.{m}.layer.attention", "model.layers.{m}.self_attn"),
    ),
    settings={
        **{
            name: setting
            for name, setting in deepseek_v3.FAMILY.settings.items()
            if name != "rotary_interleaved"
        },
        "rotary_interleaved": Constant(True),
        "qk_pos_emb_head_dim": Mapped("qk_rope_head_dim", absent=64),
        "experimental_attention_variant": Constant("dsa"),
        "dsa_indexer_n_heads": Mapped("index_n_heads", absent=64),
        "dsa_indexer_head_dim": Mapped("index_head_dim", absent=128),
        "dsa_indexer_topk": Mapped("index_topk", absent=2048),
    },
    custom=(
        *(rule for rule in deepseek_v3.FAMILY.custom if rule.fields not in _REPLACED),
        Custom(("moe_layer_freq",), (_TYPES, _FIRST), _layers_from_hf, _layers_to_hf),
        Custom(
            _ATTENTION.fields,
            (*_ATTENTION.hf_fields, "layer_types"),
            _attention_from_hf,
            _attention_to_hf,
        ),
    ),
    if_absent=deepseek_v3.FAMILY.if_absent,
    neutral={
        **deepseek_v3.FAMILY.neutral,
        "auto_map": (None,),
        "mlp_bias": (False,),
    },
    # transformers replaces the value of head_dim.
    without_effect=deepseek_settings.WITHOUT_EFFECT | {"head_dim"},
    exported_constants={"attention_dropout": 0.0},
    prefix="model.",
)
