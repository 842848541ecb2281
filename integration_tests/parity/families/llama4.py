"""Llama 4: chunks, layers without positions, temperatures, and experts with weighted inputs."""

from families.case import FamilyCase
from families.draws import heads, merged, optional, rope, sizes
from hypothesis import strategies as st

CASE = FamilyCase(
    family="llama4",
    config_class="Llama4TextConfig",
    model_class="Llama4ForCausalLM",
    mathematics="llama4",
    settings={
        "num_hidden_layers": 5,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
        "intermediate_size_mlp": 48,
        "vocab_size": 150,
        "max_position_embeddings": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 6,
        "floor_scale": 4,
        "attn_scale": 0.3,
    },
    draws=merged(
        sizes(
            intermediate_size_mlp=st.sampled_from((20, 48)),
            num_local_experts=st.just(5),
            num_experts_per_tok=st.sampled_from((1, 2)),
            interleave_moe_layer_step=st.just(1),
            no_rope_layer_interval=st.sampled_from((2, 3)),
            attention_chunk_size=st.sampled_from((5, 16)),
            attention_bias=st.booleans(),
            use_qk_norm=st.booleans(),
            attn_temperature_tuning=st.booleans(),
            floor_scale=st.sampled_from((2, 7)),
        ),
        heads(),
        st.sampled_from(
            (
                {},
                {"num_hidden_layers": 2, "interleave_moe_layer_step": 2},
                {"num_hidden_layers": 3, "moe_layers": [1]},
                {"num_hidden_layers": 2, "layer_types": ["full_attention", "chunked_attention"]},
                {"num_hidden_layers": 2, "no_rope_layers": [1, 1]},
            )
        ),
        optional(hidden_act=st.sampled_from(("silu", "swish"))),
        rope("default", "llama3", "yarn"),
    ),
    refused=frozenset({"hidden_act", "layer_types", "moe_layers", "no_rope_layers"})
    | {"rope_parameters"},
    others={
        "layer_types": (
            ["full_attention"] * 5,
            ["full_attention", "chunked_attention"] * 2 + ["full_attention"],
            ["sliding_attention"] * 5,
        ),
        "moe_layers": ([0], [1, 2, 4], []),
        "no_rope_layers": ([0, 1, 1, 0, 0], [1] * 5, [2, 0, 1, 1, 0]),
        "num_hidden_layers": (2, 4),
        "num_experts_per_tok": (2, 3),
        "attn_scale": (0.7, 0.0),
    },
)
