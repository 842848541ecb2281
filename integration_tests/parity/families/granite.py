"""Granite: Llama with factors of embeddings, sublayers, scores and logits."""

from families.case import FamilyCase
from families.draws import heads, merged, rope, sizes
from hypothesis import strategies as st

CASE = FamilyCase(
    family="granite",
    config_class="GraniteConfig",
    model_class="GraniteForCausalLM",
    mathematics="llama",
    settings={
        "num_hidden_layers": 5,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 150,
        "max_position_embeddings": 64,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    draws=merged(
        sizes(
            attention_bias=st.booleans(),
            mlp_bias=st.booleans(),
            embedding_multiplier=st.sampled_from((1.0, 12)),
            residual_multiplier=st.sampled_from((0.22, 1.0, 1.5)),
            attention_multiplier=st.sampled_from((0.0625, 0.4, 1)),
            logits_scaling=st.sampled_from((0.5, 1.0, 4.0)),
        ),
        heads(),
        rope("default", "linear", "llama3", "yarn"),
    ),
    refused=frozenset({"attention_multiplier", "hidden_act", "rope_parameters"}),
    others={"attention_multiplier": (0.0, 0.25, 1.0), "logits_scaling": (0.5, 1.0)},
)
