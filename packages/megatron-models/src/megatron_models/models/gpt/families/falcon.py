"""Falcon: parallel attention and feed-forward layer, few keys and values, LayerNorm.

Almazrouei et al., 2023. The rows of ``query_key_value`` are grouped by key and value, as here.
Models have one of three layers: one norm before both sublayers (7B), a norm before each
(``new_decoder_architecture``, 40B and 180B), or attention before the feed-forward layer (1B).
Positions are rotary or ALiBi. In models of every dtype, transformers rounds the slopes of ALiBi and
the positions of keys to bfloat16 before it multiplies them. This changes the slopes of more than 8
heads or of a number that is no power of two, and gives neighbouring keys from position 256 on the
same bias. Here nothing is rounded: biases depend on the distance of query and key only.
"""

import reprlib

from megatron_models.errors import ConfigError
from megatron_models.families.family import UNTIED, Family, Row, Where
from megatron_models.families.settings import (
    Constant,
    Custom,
    Derived,
    HFConfig,
    Mapped,
    Translated,
    unsupported_field,
    unsupported_hf_field,
)
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.families import gpt_neox
from megatron_models.models.gpt.families.activations import activation
from megatron_models.models.gpt.families.rope import rope

_BLOCK = "transformer.h.{i}"
_BIAS: Where = {"if": "$add_bias_linear"}
_TWO_NORMS: Where = {"if": "$has_parallel_norms"}


def _linear(name: str, hf_name: str) -> tuple[Row, Row]:
    weight, bias = gpt_neox.with_bias(name, hf_name)
    return weight, (*bias[:3], _BIAS)


_QKV = f"{_BLOCK}.self_attention.query_key_value"
_ROWS: tuple[Row, ...] = (
    ("embedding.word.weight", ("transformer.word_embeddings.weight",), (gpt_neox.VOCAB,)),
    *gpt_neox.with_bias("layers.{i}.attention_norm", f"{_BLOCK}.ln_attn", _TWO_NORMS),
    *gpt_neox.with_bias(
        "layers.{i}.attention_norm",
        f"{_BLOCK}.input_layernorm",
        {"unless": "$has_parallel_norms"},
    ),
    ("layers.{i}.attention.qkv.weight", (f"{_QKV}.weight",), (gpt_neox.QKV_WEIGHT,)),
    ("layers.{i}.attention.qkv.bias", (f"{_QKV}.bias",), (gpt_neox.QKV_BIAS,), _BIAS),
    *_linear("layers.{i}.attention.out", f"{_BLOCK}.self_attention.dense"),
    *gpt_neox.with_bias("layers.{i}.mlp_norm", f"{_BLOCK}.ln_mlp", _TWO_NORMS),
    *gpt_neox.with_bias(
        "layers.{i}.mlp_norm",
        f"{_BLOCK}.post_attention_layernorm",
        {"if": "$has_sequential_sublayers"},
    ),
    *_linear("layers.{i}.mlp.up", f"{_BLOCK}.mlp.dense_h_to_4h"),
    *_linear("layers.{i}.mlp.down", f"{_BLOCK}.mlp.dense_4h_to_h"),
    *gpt_neox.with_bias("final_norm", "transformer.ln_f"),
    ("output.weight", ("lm_head.weight",), (gpt_neox.VOCAB,), UNTIED),
)

_SWITCHES = {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True}
"""Fields that select the layer, with the values of a file without them."""


def _layers_from_hf(title: str, hf_config: HFConfig) -> dict[str, object]:
    found = {name: hf_config.get(name, absent) for name, absent in _SWITCHES.items()}
    for name, value in found.items():
        if not isinstance(value, bool):
            raise unsupported_hf_field(title, name, value, [False, True])
    new, norms = found["new_decoder_architecture"], hf_config.get("num_ln_in_parallel_attn")
    heads, groups = hf_config.get("num_attention_heads"), hf_config.get("num_kv_heads")
    groups = heads if groups is None else groups
    if new and not found["parallel_attn"]:
        raise ConfigError(
            f"{title} models with new_decoder_architecture and parallel_attn = False are not "
            "supported"
        )
    if norms not in ((None, 1, 2) if new else (None, 1)) and found["parallel_attn"]:
        raise unsupported_hf_field(
            title, "num_ln_in_parallel_attn", norms, [None, 1, 2] if new else [None, 1]
        )
    if not new and not found["multi_query"] and groups != heads:
        raise ConfigError(
            f"{title} models with num_kv_heads = {reprlib.repr(groups)} are not supported without "
            f"multi_query and new_decoder_architecture, only {reprlib.repr(heads)}"
        )
    if not found["parallel_attn"]:
        kind = "none"
    else:
        kind = "two_norms" if new and norms != 1 else "shared_norm"
    several = new or not found["multi_query"]
    return {"num_query_groups": groups if several else 1, "parallel_residual": kind}


def _layers_to_hf(config: GPTConfig) -> dict[str, object]:
    groups, kind = config.num_query_groups, config.parallel_residual
    old = kind != "two_norms" and groups in (1, config.num_attention_heads)
    if kind == "none" and not old:
        raise unsupported_field(
            "num_query_groups",
            f"1 or {config.num_attention_heads} without parallel_residual",
            groups,
        )
    return {
        "new_decoder_architecture": not old,
        "multi_query": groups == 1,
        "parallel_attn": kind != "none",
        "num_kv_heads": groups,
        "num_ln_in_parallel_attn": {"none": None, "shared_norm": 1, "two_norms": 2}[kind],
    }


_LAYERS = Custom(
    fields=("num_query_groups", "parallel_residual"),
    hf_fields=(
        *_SWITCHES,
        *("num_kv_heads", "num_ln_in_parallel_attn", "num_attention_heads"),
    ),
    read=_layers_from_hf,
    write=_layers_to_hf,
)


def _positions_from_hf(title: str, hf_config: HFConfig) -> dict[str, object]:
    alibi = hf_config.get("alibi")
    if alibi not in (None, False, True):
        raise unsupported_hf_field(title, "alibi", alibi, [False, True])
    return {
        "position_embedding_type": "alibi" if alibi else "rope",
        "scale_alibi": bool(alibi),
    }


def _positions_to_hf(config: GPTConfig) -> dict[str, bool]:
    if config.position_embedding_type not in ("rope", "alibi"):
        raise unsupported_field(
            "position_embedding_type", "'rope' or 'alibi'", config.position_embedding_type
        )
    if config.scale_alibi != config.has_alibi:
        raise unsupported_field("scale_alibi", repr(config.has_alibi), config.scale_alibi)
    return {"alibi": config.has_alibi}


_POSITIONS = Custom(
    fields=("position_embedding_type", "scale_alibi"),
    hf_fields=("alibi",),
    read=_positions_from_hf,
    write=_positions_to_hf,
)

FAMILY = Family(
    name="falcon",
    kind="gpt",
    title="Falcon",
    architectures=("FalconForCausalLM",),
    model_type="falcon",
    rows=_ROWS,
    settings={
        "num_layers": Mapped("num_hidden_layers"),
        "hidden_size": Mapped("hidden_size"),
        "num_attention_heads": Mapped("num_attention_heads"),
        "kv_channels": Derived(),
        "ffn_hidden_size": Mapped("ffn_hidden_size", absent=0, null=0),
        "vocab_size": Mapped("vocab_size"),
        "max_position_embeddings": Mapped("max_position_embeddings", absent=2048),
        "normalization": Constant("LayerNorm"),
        "norm_epsilon": Mapped("layer_norm_epsilon", absent=1e-5),
        "activation": activation("activation", absent="gelu"),
        "add_bias_linear": Translated("bias", ((True, True), (False, False)), absent=False),
        "untie_embeddings_and_output_weights": Translated(
            "tie_word_embeddings", ((True, False), (False, True)), absent=True
        ),
        "init_method_std": Mapped("initializer_range", absent=0.02),
    },
    custom=(rope(10000.0), _LAYERS, _POSITIONS),
    exported_constants={"attention_dropout": 0.0, "hidden_dropout": 0.0},
    ignored=(
        (
            "lm_head.weight",
            "same_as",
            {"other": "transformer.word_embeddings.weight", "rows": "$vocab_size"},
        ),
        (
            f"{_BLOCK}.self_attention.rotary_emb.inv_freq",
            "rotary_frequencies",
            {"base": "$rotary_base", "dim": "$rotary_dim"},
        ),
    ),
    prefix="transformer.",
    published_code={
        "AutoConfig": "configuration_falcon.FalconConfig",
        **{
            f"AutoModel{task}": f"modeling_falcon.Falcon{task or 'Model'}"
            for task in (
                "",
                "ForCausalLM",
                "ForQuestionAnswering",
                "ForSequenceClassification",
                "ForTokenClassification",
            )
        },
    },
    defers_to=("gpt_neox",),
)
