"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values (Qwen team, 2024)."""

from megatron_models.families.family import Family
from megatron_models.families.settings import Constant, Mapped
from megatron_models.models.gpt.families import llama
from megatron_models.models.gpt.families.rope import rope
from megatron_models.models.gpt.families.windows import from_layer, windows

_QKV_BIAS = tuple(row for row in llama.FAMILY.rows if row[0] == "layers.{i}.attention.qkv.bias")

#: Windows of Qwen2 and Qwen3: in the layers from the one on that ``max_window_layers`` names.
WINDOWS = windows(
    from_layer(28, "max_window_layers"),
    absent=4096,
    switch=False,
    reads=("max_window_layers",),
)

FAMILY = Family(
    name="qwen2",
    kind="gpt",
    title="Qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_type="qwen2",
    rows=(*llama.START_ROWS, *llama.DENSE_ROWS, *_QKV_BIAS, *llama.HEAD_ROWS),
    settings={
        **llama.FAMILY.settings,
        "num_query_groups": Mapped("num_key_value_heads", absent=32, null=0),
        "add_bias_linear": Constant(False),
        "add_qkv_bias": Constant(True),
    },
    custom=(rope(10000.0), WINDOWS),
    exported_constants={"attention_dropout": 0.0},
    ignored=llama.FAMILY.ignored,
    prefix="model.",
)
