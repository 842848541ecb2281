"""Gemma 3, text: Gemma 2 with norms of heads, and another rotation in layers with a window."""

from families.case import FamilyCase
from families.draws import heads, merged, optional, rope_by_layer, sizes
from hypothesis import strategies as st

CASE = FamilyCase(
    family="gemma3",
    config_class="Gemma3TextConfig",
    model_class="Gemma3ForCausalLM",
    mathematics="gemma3",
    settings={
        "num_hidden_layers": 5,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 150,
        "max_position_embeddings": 64,
        "sliding_window": 9,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 20,
    },
    draws=merged(
        sizes(
            attention_bias=st.booleans(),
            final_logit_softcapping=st.sampled_from((None, 4.0)),
            query_pre_attn_scalar=st.sampled_from((7, 20, 256)),
            sliding_window_pattern=st.sampled_from((2, 6)),
        ),
        heads(),
        rope_by_layer("default", "linear", "yarn"),
        optional(
            hidden_activation=st.sampled_from(("gelu", "gelu_pytorch_tanh", "silu")),
            sliding_window=st.sampled_from((5, 40)),
        ),
    ),
    refused=frozenset(
        {
            "attn_logit_softcapping",
            "hidden_activation",
            "layer_types",
            "rope_parameters",
            "use_bidirectional_attention",
        }
    ),
    others={
        "hidden_activation": ("gelu", "relu", "mish"),
        "layer_types": (["full_attention"] * 5, ["chunked_attention"] * 5),
        "attn_logit_softcapping": (30.0,),
        "final_logit_softcapping": (30.0,),
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
