"""Phi-3: Llama with fused projections."""

from families.case import FamilyCase
from families.draws import heads, merged, optional, rope, sizes
from hypothesis import strategies as st

CASE = FamilyCase(
    family="phi3",
    config_class="Phi3Config",
    model_class="Phi3ForCausalLM",
    mathematics="llama",
    settings={
        "num_hidden_layers": 5,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 150,
        "max_position_embeddings": 64,
        # transformers' default is outside this vocabulary
        "pad_token_id": 0,
    },
    draws=merged(
        sizes(),
        heads(head_dim=False),
        rope("default"),
        optional(sliding_window=st.sampled_from((None, 5, 40))),
    ),
    refused=frozenset({"hidden_act"}),
    others={
        "rope_parameters": (
            {"rope_type": "default", "rope_theta": 500.0},
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.5, 2.0, 3.0],
                "long_factor": [2.0, 3.0, 4.0, 6.0],
                "original_max_position_embeddings": 32,
            },
        )
    },
)
