"""Qwen3: Llama with norms of each head's queries and keys (Qwen team, 2025)."""

from megatron_models.families.family import Family, Row
from megatron_models.families.settings import (
    Constant,
    Custom,
    HFConfig,
    Mapped,
    unsupported_field,
    unsupported_hf_field,
)
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.families import llama
from megatron_models.models.gpt.families.qwen2 import WINDOWS
from megatron_models.models.gpt.families.rope import rope


def _biases_from_hf(title: str, hf_config: HFConfig) -> dict[str, bool]:
    bias = hf_config.get("attention_bias", False)
    if bias not in (None, False, True):
        raise unsupported_hf_field(title, "attention_bias", bias, [False, True])
    return {"add_qkv_bias": bool(bias), "add_attention_out_bias": bool(bias)}


def _biases_to_hf(config: GPTConfig) -> dict[str, bool]:
    if config.add_qkv_bias != config.add_attention_out_bias:
        raise unsupported_field(
            "add_attention_out_bias", repr(config.add_qkv_bias), config.add_attention_out_bias
        )
    return {"attention_bias": config.add_qkv_bias}


#: Biases of all projections of attention, or of none; feed-forward layers have none.
ATTENTION_BIASES = Custom(
    fields=("add_qkv_bias", "add_attention_out_bias"),
    hf_fields=("attention_bias",),
    read=_biases_from_hf,
    write=_biases_to_hf,
)

#: Rows of the biases of attention, and of the norms of queries and keys.
ATTENTION_ROWS: tuple[Row, ...] = (
    *(
        row
        for row in llama.FAMILY.rows
        if row[0] in ("layers.{i}.attention.qkv.bias", "layers.{i}.attention.out.bias")
    ),
    *(
        (
            f"layers.{{i}}.attention.{name}.weight",
            (f"model.layers.{{i}}.self_attn.{name}.weight",),
            (),
        )
        for name in ("q_norm", "k_norm")
    ),
)

FAMILY = Family(
    name="qwen3",
    kind="gpt",
    title="Qwen3",
    version=1,
    architectures=("Qwen3ForCausalLM",),
    model_type="qwen3",
    rows=(*llama.START_ROWS, *ATTENTION_ROWS, *llama.DENSE_ROWS, *llama.HEAD_ROWS),
    settings={
        **llama.FAMILY.settings,
        "num_query_groups": Mapped("num_key_value_heads", absent=32, null=0),
        "kv_channels": Mapped("head_dim", absent=128),
        "add_bias_linear": Constant(False),
        "qk_layernorm": Constant(True),
    },
    custom=(rope(10000.0), WINDOWS, ATTENTION_BIASES),
    exported_constants={"attention_dropout": 0.0},
    ignored=llama.FAMILY.ignored,
    prefix="model.",
)
