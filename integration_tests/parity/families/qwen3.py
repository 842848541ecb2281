"""Qwen3: Llama with norms of each head's queries and keys."""

from families.case import FamilyCase
from families.draws import heads, merged, optional, rope, sizes
from hypothesis import strategies as st

CASE = FamilyCase(
    family="qwen3",
    config_class="Qwen3Config",
    model_class="Qwen3ForCausalLM",
    mathematics="llama",
    settings={
        "num_hidden_layers": 5,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 150,
        "max_position_embeddings": 64,
    },
    draws=merged(
        sizes(attention_bias=st.booleans()),
        heads(),
        rope("default", "linear", "yarn"),
        optional(
            hidden_act=st.sampled_from(("silu", "swish")),
            use_sliding_window=st.booleans(),
            sliding_window=st.sampled_from((5, 40)),
            max_window_layers=st.sampled_from((0, 1)),
        ),
    ),
    refused=frozenset({"hidden_act", "layer_types", "rope_parameters"}),
    others={"layer_types": (["sliding_attention"] * 5, ["full_attention"] * 5)},
)
