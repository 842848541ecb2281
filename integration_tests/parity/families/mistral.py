"""Mistral: Llama with a window of attention in every layer."""

from families.case import FamilyCase
from families.draws import heads, merged, optional, rope, sizes
from hypothesis import strategies as st

CASE = FamilyCase(
    family="mistral",
    config_class="MistralConfig",
    model_class="MistralForCausalLM",
    mathematics="llama",
    settings={
        "num_hidden_layers": 5,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 150,
        "max_position_embeddings": 64,
        "sliding_window": 7,
    },
    draws=merged(
        sizes(),
        heads(),
        rope("default", "linear", "llama3", "yarn"),
        optional(sliding_window=st.sampled_from((None, 5, 40))),
    ),
    refused=frozenset({"hidden_act", "rope_parameters"}),
)
