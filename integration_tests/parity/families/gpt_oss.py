"""gpt-oss: sinks, alternating windows, YaRN, and experts with biases and bounded gates."""

from families.case import FamilyCase
from families.draws import heads, merged, optional, rope, sizes
from hypothesis import strategies as st

CASE = FamilyCase(
    family="gpt_oss",
    config_class="GptOssConfig",
    model_class="GptOssForCausalLM",
    mathematics="gpt_oss",
    settings={
        "num_hidden_layers": 5,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 150,
        "max_position_embeddings": 64,
        "sliding_window": 6,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 2.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
    draws=merged(
        sizes(
            num_experts_per_tok=st.sampled_from((1, 2, 3)),
            num_local_experts=st.just(5),
            sliding_window=st.sampled_from((5, 40)),
            swiglu_limit=st.sampled_from((0.5, 2.0, 7.0)),
            attention_bias=st.booleans(),
        ),
        heads(),
        optional(hidden_act=st.sampled_from(("silu", "gelu"))),
        rope("default", "linear", "yarn"),
    ),
    refused=frozenset(
        {"layer_types", "rope_parameters", "sliding_window", "swiglu_alpha", "swiglu_limit"}
    ),
    others={
        "layer_types": (
            ["sliding_attention"] * 5,
            ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
            ["chunked_attention"] * 5,
        ),
        "sliding_window": (4, 64, 0),
        "swiglu_limit": (1.0, 0.0),
    },
)
