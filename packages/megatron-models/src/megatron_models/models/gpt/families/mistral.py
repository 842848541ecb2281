"""Mistral: Llama with a window of attention in every layer (Jiang et al., 2023).

Files of version 0.2 and later have no window, so their models are those of Llama without biases.
"""

from megatron_models.families.family import Family
from megatron_models.families.settings import Constant, Mapped
from megatron_models.models.gpt.families import llama
from megatron_models.models.gpt.families.rope import rope
from megatron_models.models.gpt.families.windows import windows

FAMILY = Family(
    name="mistral",
    kind="gpt",
    title="Mistral",
    architectures=("MistralForCausalLM",),
    model_type="mistral",
    rows=(*llama.START_ROWS, *llama.DENSE_ROWS, *llama.HEAD_ROWS),
    settings={
        **llama.FAMILY.settings,
        "num_query_groups": Mapped("num_key_value_heads", absent=8, null=0),
        "add_bias_linear": Constant(False),
    },
    custom=(rope(10000.0), windows(absent=4096, listed=False)),
    neutral={"attention_bias": (False,), "mlp_bias": (False,)},
    exported_constants={"attention_dropout": 0.0},
    ignored=llama.FAMILY.ignored,
    prefix="model.",
    defers_to=("llama",),
)
