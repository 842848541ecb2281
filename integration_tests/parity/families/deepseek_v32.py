"""DeepSeek-V3.2: V3 with an indexer that selects the keys of attention."""

from families.case import FamilyCase
from families.draws import merged, rope, sizes
from hypothesis import strategies as st

CASE = FamilyCase(
    family="deepseek_v32",
    config_class="DeepseekV32Config",
    model_class="DeepseekV32ForCausalLM",
    mathematics="deepseek_v3",
    settings={
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
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "vocab_size": 150,
        "max_position_embeddings": 64,
        # Many heads, so that no two keys have a score of exactly 0.
        "index_n_heads": 16,
        "index_head_dim": 8,
        "index_topk": 6,
    },
    draws=merged(
        sizes(
            num_hidden_layers=st.sampled_from((2, 3)),
            rms_norm_eps=st.sampled_from((1e-6, 1e-5, 0.1)),
            v_head_dim=st.sampled_from((6, 12)),
            attention_bias=st.booleans(),
            n_shared_experts=st.sampled_from((1, 2)),
            norm_topk_prob=st.booleans(),
            topk_group=st.sampled_from((1, 2)),
            index_head_dim=st.sampled_from((6, 8)),
            index_topk=st.sampled_from((3, 6, 100)),
        ),
        rope("default", "linear", "yarn"),
    ),
    refused=frozenset(
        {
            *("num_attention_heads", "num_key_value_heads"),
            *("hidden_act", "rope_parameters", "mlp_bias", "layer_types"),
        }
    ),
    others={
        "n_routed_experts": (12,),
        "n_group": (2,),
        "qk_rope_head_dim": (6,),
        "mlp_layer_types": (["dense", "sparse", "dense", "sparse", "sparse"],),
        "layer_types": (["full_attention"] * 5,),
        "index_topk": (3, 30),
    },
    words={"num_attention_heads": "num_key_value_heads"},
    refused_axes=frozenset({"cp"}),
)
