"""Qwen3-Next: gated delta nets in most layers, gated attention in the others, and experts."""

from families.case import FamilyCase
from families.draws import heads, merged, partly_rotated, rope, sizes
from hypothesis import strategies as st

CASE = FamilyCase(
    family="qwen3_next",
    config_class="Qwen3NextConfig",
    model_class="Qwen3NextForCausalLM",
    mathematics="qwen3_next",
    settings={
        "num_hidden_layers": 5,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 8,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 16,
        "vocab_size": 150,
        "max_position_embeddings": 64,
        # Norms of small outputs of a state would enlarge rounding: 6e-5 in theirs too.
        "rms_norm_eps": 1e-2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
    },
    draws=merged(
        sizes(
            rms_norm_eps=st.just(1e-2),
            num_experts=st.just(5),
            num_experts_per_tok=st.sampled_from((1, 2, 3)),
            moe_intermediate_size=st.sampled_from((20, 32)),
            shared_expert_intermediate_size=st.sampled_from((20, 32)),
            norm_topk_prob=st.booleans(),
            attention_bias=st.booleans(),
            linear_conv_kernel_dim=st.sampled_from((2, 4)),
            linear_key_head_dim=st.sampled_from((6, 8)),
            linear_value_head_dim=st.sampled_from((5, 8)),
            linear_num_key_heads=st.sampled_from((1, 2)),
            linear_num_value_heads=st.sampled_from((4, 6)),
        ),
        heads(),
        st.sampled_from(
            (
                {"num_hidden_layers": 4, "layer_types": None, "mlp_only_layers": []},
                {
                    "num_hidden_layers": 2,
                    "layer_types": ["full_attention", "linear_attention"],
                    "decoder_sparse_step": 2,
                    "mlp_only_layers": [],
                },
                {
                    "num_hidden_layers": 3,
                    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
                    "mlp_only_layers": [0, 2],
                },
            )
        ),
        partly_rotated(rope("default", "linear", "yarn"), 0.5, 1.0),
    ),
    refused=frozenset({"hidden_act", "mlp_only_layers"}),
    others={
        "head_dim": (8, 24),
        "linear_num_key_heads": (1, 4),
        "linear_num_value_heads": (2, 6),
        "num_local_experts": (3,),
        "mlp_only_layers": ([], [0, 4], [0, 1, 2, 3, 4]),
        "layer_types": (["linear_attention", "full_attention"] * 2 + ["linear_attention"],),
    },
    refused_axes=frozenset({"cp"}),
)
