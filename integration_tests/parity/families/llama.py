"""Llama 2 and 3: rotary positions with scaling, RMSNorm, SwiGLU, query groups."""

from families.case import FamilyCase
from families.draws import heads, merged, optional, rope, sizes
from hypothesis import strategies as st

CASE = FamilyCase(
    family="llama",
    config_class="LlamaConfig",
    model_class="LlamaForCausalLM",
    mathematics="llama",
    settings={
        "num_hidden_layers": 5,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 150,
        "max_position_embeddings": 64,
    },
    draws=merged(
        sizes(attention_bias=st.booleans(), mlp_bias=st.booleans()),
        heads(),
        optional(hidden_act=st.sampled_from(("silu", "swish"))),
        rope("default", "linear", "dynamic", "llama3", "yarn"),
    ),
    refused=frozenset({"hidden_act", "pretraining_tp", "rope_parameters"}),
)
