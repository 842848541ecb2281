"""Qwen3-MoE: Qwen3's attention, and experts in some layers."""

from families.case import FamilyCase
from families.draws import heads, merged, optional, rope, sizes
from hypothesis import strategies as st

CASE = FamilyCase(
    family="qwen3_moe",
    config_class="Qwen3MoeConfig",
    model_class="Qwen3MoeForCausalLM",
    mathematics="mixtral",
    settings={
        "num_hidden_layers": 5,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "vocab_size": 150,
        "max_position_embeddings": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    draws=merged(
        sizes(
            num_experts=st.just(5),
            num_experts_per_tok=st.sampled_from((1, 2, 3)),
            moe_intermediate_size=st.sampled_from((20, 32)),
            norm_topk_prob=st.booleans(),
            attention_bias=st.booleans(),
            mlp_only_layers=st.just([]),
        ),
        heads(),
        st.sampled_from(
            (
                {},
                {"num_hidden_layers": 2, "decoder_sparse_step": 2},
                {"num_hidden_layers": 3, "mlp_only_layers": [0, 2]},
            )
        ),
        optional(
            use_sliding_window=st.booleans(),
            sliding_window=st.sampled_from((5, 40)),
        ),
        rope("default", "linear", "yarn"),
    ),
    refused=frozenset({"hidden_act", "rope_parameters", "mlp_only_layers"}),
    others={
        "num_local_experts": (3,),
        "mlp_only_layers": ([], [0, 4], [0, 1, 2, 3, 4]),
        "num_hidden_layers": (3,),
    },
)
