"""DeepSeek-V2: latent attention and experts chosen within groups by their softmax."""

from families.case import FamilyCase
from families.draws import merged, rope, sizes
from hypothesis import strategies as st

SETTINGS = {
    "num_hidden_layers": 5,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "first_k_dense_replace": 1,
    "vocab_size": 150,
    "max_position_embeddings": 64,
}

CASE = FamilyCase(
    family="deepseek_v2",
    config_class="DeepseekV2Config",
    model_class="DeepseekV2ForCausalLM",
    mathematics="deepseek_v3",
    settings=SETTINGS,
    draws=merged(
        sizes(
            num_hidden_layers=st.sampled_from((2, 3)),
            rms_norm_eps=st.sampled_from((1e-6, 1e-5, 0.1)),
            q_lora_rank=st.sampled_from((None, 20)),
            v_head_dim=st.sampled_from((6, 12)),
            attention_bias=st.booleans(),
            n_shared_experts=st.sampled_from((1, 2)),
            topk_method=st.sampled_from(("greedy", "group_limited_greedy")),
            topk_group=st.sampled_from((1, 2)),
        ),
        rope("default", "linear", "yarn"),
    ),
    refused=frozenset(
        {
            *(
                "num_attention_heads",
                "num_key_value_heads",
                "hidden_act",
            ),
            *("rope_parameters", "pretraining_tp", "mlp_bias", "norm_topk_prob", "topk_method"),
        }
    ),
    others={
        "n_routed_experts": (12,),
        "n_group": (2,),
        "qk_rope_head_dim": (6,),
        "kv_lora_rank": (14,),
        "topk_method": ("greedy", "noaux_tc"),
        "qk_nope_head_dim": (10,),
    },
    words={"num_attention_heads": "num_key_value_heads"},
)
