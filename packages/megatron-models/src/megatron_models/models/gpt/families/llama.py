"""Llama 2 and 3, and models of the same shape: rotary positions, RMSNorm, SwiGLU, query groups.

Touvron et al., 2023 and the Llama 3 report. Hugging Face stores rotary channels as two halves, as
this package does, so no row permutes them.
"""

from megatron_models.families.family import UNTIED, Family, Operation, Row
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
from megatron_models.models.gpt.families.rope import rope

_QKV: Operation = (
    "interleave_qkv",
    {"heads": "$num_attention_heads", "groups": "$num_query_groups", "head_dim": "$kv_channels"},
)
_GATE_UP: Operation = ("stack", {"dim": 0})
_VOCAB: Operation = ("slice_rows", {"rows": "$vocab_size"})
_BLOCK = "model.layers.{i}"


def _attention(part: str) -> tuple[Row, Row]:
    hf_names = tuple(f"{_BLOCK}.self_attn.{name}_proj.{part}" for name in "qkv")
    out = f"{_BLOCK}.self_attn.o_proj.{part}"
    qkv_where, out_where = (
        {} if part == "weight" else {"if": f"$has_{name}_bias"} for name in ("qkv", "attention_out")
    )
    return (
        (f"layers.{{i}}.attention.qkv.{part}", hf_names, (_QKV,), qkv_where),
        (f"layers.{{i}}.attention.out.{part}", (out,), (), out_where),
    )


def _mlp(part: str) -> tuple[Row, Row]:
    gate_up = tuple(f"{_BLOCK}.mlp.{name}_proj.{part}" for name in ("gate", "up"))
    where = {} if part == "weight" else {"if": "$has_mlp_bias"}
    return (
        (f"layers.{{i}}.mlp.up.{part}", gate_up, (_GATE_UP,), where),
        (f"layers.{{i}}.mlp.down.{part}", (f"{_BLOCK}.mlp.down_proj.{part}",), (), where),
    )


#: Rows before and after the feed-forward layers of all models with Llama's attention.
START_ROWS: tuple[Row, ...] = (
    ("embedding.word.weight", ("model.embed_tokens.weight",), (_VOCAB,)),
    ("layers.{i}.attention_norm.weight", (f"{_BLOCK}.input_layernorm.weight",), ()),
    ("layers.{i}.mlp_norm.weight", (f"{_BLOCK}.post_attention_layernorm.weight",), ()),
    *_attention("weight"),
)
HEAD_ROWS: tuple[Row, ...] = (
    ("final_norm.weight", ("model.norm.weight",), ()),
    ("output.weight", ("lm_head.weight",), (_VOCAB,), UNTIED),
)
DENSE_ROWS: tuple[Row, ...] = _mlp("weight")
_BIAS_ROWS: tuple[Row, ...] = (*_attention("bias"), *_mlp("bias"))


def _biases_from_hf(title: str, hf_config: HFConfig) -> dict[str, bool]:
    biases = {}
    for name in ("attention_bias", "mlp_bias"):
        biases[name] = hf_config.get(name, False)
        if biases[name] not in (None, False, True):
            raise unsupported_hf_field(title, name, biases[name], [False, True])
    attention, mlp = bool(biases["attention_bias"]), bool(biases["mlp_bias"])
    both = attention and mlp
    return {
        "add_bias_linear": both,
        "add_qkv_bias": attention and not both,
        "add_attention_out_bias": attention and not both,
        "add_mlp_bias": mlp and not both,
    }


def _biases_to_hf(config: GPTConfig) -> dict[str, bool]:
    if config.has_qkv_bias != config.has_attention_out_bias:
        raise unsupported_field(
            "has_qkv_bias", repr(config.has_attention_out_bias), config.has_qkv_bias
        )
    return {"attention_bias": config.has_qkv_bias, "mlp_bias": config.has_mlp_bias}


BIASES = Custom(
    fields=("add_bias_linear", "add_qkv_bias", "add_attention_out_bias", "add_mlp_bias"),
    hf_fields=("attention_bias", "mlp_bias"),
    read=_biases_from_hf,
    write=_biases_to_hf,
)

FAMILY = Family(
    name="llama",
    kind="gpt",
    title="Llama",
    architectures=("LlamaForCausalLM",),
    model_type="llama",
    rows=(*START_ROWS, *DENSE_ROWS, *_BIAS_ROWS, *HEAD_ROWS),
    settings={
        "num_layers": Mapped("num_hidden_layers"),
        "hidden_size": Mapped("hidden_size"),
        "num_attention_heads": Mapped("num_attention_heads"),
        "num_query_groups": Mapped("num_key_value_heads", absent=0, null=0),
        "kv_channels": Mapped("head_dim", absent=0, null=0),
        "ffn_hidden_size": Mapped("intermediate_size"),
        "vocab_size": Mapped("vocab_size"),
        "max_position_embeddings": Mapped("max_position_embeddings"),
        "position_embedding_type": Constant("rope"),
        "normalization": Constant("RMSNorm"),
        "norm_epsilon": Mapped("rms_norm_eps", absent=1e-6),
        "activation": Translated(
            "hidden_act", (("silu", "swiglu"), ("swish", "swiglu")), absent="silu"
        ),
        "untie_embeddings_and_output_weights": Translated(
            "tie_word_embeddings", ((True, False), (False, True), (None, True)), absent=False
        ),
        "init_method_std": Mapped("initializer_range", absent=0.02),
    },
    custom=(rope(10000.0), BIASES),
    neutral={"pretraining_tp": (1,)},
    # Notes of programs that wrote such files.
    without_effect=frozenset(
        {"is_llama_config", "max_sequence_length", "unsloth_fixed", "unsloth_version"}
    ),
    exported_constants={"attention_dropout": 0.0},
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
