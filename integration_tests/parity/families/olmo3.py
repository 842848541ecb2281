"""OLMo 3: norms after sublayers and of whole projections, windows in three of four layers."""

from families.case import FamilyCase
from families.draws import heads, merged, optional, rope_by_layer, sizes
from hypothesis import strategies as st

CASE = FamilyCase(
    family="olmo3",
    config_class="Olmo3Config",
    model_class="Olmo3ForCausalLM",
    mathematics="olmo2",
    settings={
        "num_hidden_layers": 5,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 150,
        "max_position_embeddings": 64,
        "sliding_window": 9,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 8.0,
                "original_max_position_embeddings": 8,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
        # Norms of outputs that are far below the epsilon would enlarge rounding in every layer.
        "initializer_range": 0.2,
        # transformers' default is outside this vocabulary
        "eos_token_id": 2,
    },
    draws=merged(
        sizes(attention_bias=st.booleans()),
        heads(head_dim=False),
        rope_by_layer("default", "linear", "yarn"),
        optional(
            hidden_act=st.sampled_from(("silu", "swish")),
            sliding_window=st.sampled_from((5, 40)),
        ),
    ),
    refused=frozenset({"hidden_act", "layer_types", "rope_parameters"}),
    others={
        "layer_types": (["full_attention"] * 5, ["chunked_attention"] * 5),
        "rope_parameters": (
            {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            {
                "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
            },
            {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
            },
        ),
    },
)
