"""Qwen3: Llama with norms of each head's queries and keys (Qwen team, 2025)."""

from megatron_models.families.family import Family, Row
from megatron_models.families.settings import Constant, Mapped
from megatron_models.models.gpt.families import llama
from megatron_models.models.gpt.families.biases import attention_bias
from megatron_models.models.gpt.families.qwen2 import WINDOWS
from megatron_models.models.gpt.families.rope import rope

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
    architectures=("Qwen3ForCausalLM",),
    model_type="qwen3",
    rows=(*llama.START_ROWS, *ATTENTION_ROWS, *llama.DENSE_ROWS, *llama.HEAD_ROWS),
    settings={
        **llama.FAMILY.settings,
        "num_query_groups": Mapped("num_key_value_heads", absent=32, null=0),
        "kv_channels": Mapped("head_dim", absent=128),
        "qk_layernorm": Constant(True),
    },
    custom=(rope(10000.0), WINDOWS, attention_bias(absent=False, mlp=False)),
    neutral={"use_qk_norm": (True,)},
    exported_constants={"attention_dropout": 0.0},
    ignored=llama.FAMILY.ignored,
    prefix="model.",
)
