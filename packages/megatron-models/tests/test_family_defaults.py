"""What a file of a decoder means that leaves fields out: the defaults in transformers."""

import pytest
from megatron_models.models.gpt.families import (
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    falcon,
    gemma2,
    gemma3,
    glm4,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    llama,
    llama4,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    qwen3_next,
    smollm3,
)

SIZES = {
    "num_hidden_layers": 6,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 64,
}
MOST_HEADS = {**SIZES, "num_attention_heads": 128}
DEEPSEEK = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "norm_epsilon": 1e-6,
    "latent_norm_epsilon": 0.0,
    "rotary_base": 1e4,
    "rotary_interleaved": True,
    "add_qkv_bias": False,
    "init_method_std": 0.02,
}
DEEPSEEK_V3 = {
    **DEEPSEEK,
    "num_experts": 256,
    "moe_router_topk": 8,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
    "moe_router_group_score_topk": 2,
    "moe_layers": (False, False, False, True, True, True),
    "normalizes_weights": True,
    "mtp_num_layers": 1,
    "num_query_groups": 128,
}
DEFAULTS = {
    "llama": (
        llama,
        SIZES,
        {
            "num_query_groups": 32,
            "kv_channels": 128,
            "norm_epsilon": 1e-6,
            "activation": "swiglu",
            "rotary_base": 1e4,
            "rope_scaling_type": "none",
            "untie_embeddings_and_output_weights": True,
            "init_method_std": 0.02,
            "has_qkv_bias": False,
            "has_mlp_bias": False,
        },
    ),
    "mistral": (
        mistral,
        SIZES,
        {"num_query_groups": 8, "sliding_window": 4096, "norm_epsilon": 1e-6, "rotary_base": 1e4},
    ),
    "mixtral": (
        mixtral,
        {**SIZES, "num_key_value_heads": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        {
            "norm_epsilon": 1e-5,
            "rotary_base": 1e6,
            "sliding_window": 0,
            "ffn_hidden_size": 512,
            "moe_ffn_hidden_size": 512,
            "moe_layers": (True,) * 6,
        },
    ),
    "qwen2": (
        qwen2,
        {**SIZES, "num_hidden_layers": 30, "use_sliding_window": True},
        {
            "num_query_groups": 32,
            "sliding_window": 4096,
            "windowed_layers": (False,) * 28 + (True, True),
            "add_qkv_bias": True,
            "add_attention_out_bias": False,
        },
    ),
    "qwen3": (
        qwen3,
        {**SIZES, "hidden_size": 64},
        {"num_query_groups": 32, "kv_channels": 128, "sliding_window": 0, "has_qkv_bias": False},
    ),
    "qwen3_moe": (
        qwen3_moe,
        SIZES,
        {
            "num_query_groups": 4,
            "num_experts": 128,
            "moe_router_topk": 8,
            "moe_ffn_hidden_size": 768,
            "moe_router_pre_softmax": True,
            "moe_layers": (True,) * 6,
            "sliding_window": 0,
        },
    ),
    "qwen3_next": (
        qwen3_next,
        {**SIZES, "num_hidden_layers": 4},
        {
            "num_query_groups": 2,
            "kv_channels": 256,
            "rotary_percent": 0.25,
            "linear_layers": (True, True, True, False),
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "num_experts": 512,
            "moe_router_topk": 10,
            "moe_ffn_hidden_size": 512,
            "moe_shared_expert_intermediate_size": 512,
            "moe_router_pre_softmax": False,
            "mtp_num_layers": 1,
        },
    ),
    "gemma2": (
        gemma2,
        SIZES,
        {
            "num_query_groups": 4,
            "kv_channels": 256,
            "sliding_window": 4096,
            "windowed_layers": (True, False) * 3,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "softmax_scale": 1 / 16,
            "embedding_multiplier": 64.0,
            "activation": "geglu_tanh",
            "untie_embeddings_and_output_weights": False,
        },
    ),
    "gemma3": (
        gemma3,
        {
            name: value
            for name, value in SIZES.items()
            if name not in ("vocab_size", "max_position_embeddings")
        },
        {
            "num_query_groups": 4,
            "kv_channels": 256,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "windowed_layers": (True,) * 5 + (False,),
            "rotary_base": 1e6,
            "rotary_base_local": 1e4,
            "final_logit_softcapping": 0.0,
            "softmax_scale": 1 / 16,
        },
    ),
    "glm4": (
        glm4,
        {name: value for name, value in SIZES.items() if name != "max_position_embeddings"},
        {
            "num_query_groups": 2,
            "kv_channels": 128,
            "max_position_embeddings": 131072,
            "norm_epsilon": 1.5625e-7,
            "rotary_percent": 0.5,
            "add_qkv_bias": True,
        },
    ),
    "phi3": (phi3, SIZES, {"norm_epsilon": 1e-5, "rotary_percent": 1.0, "sliding_window": 0}),
    "olmo2": (olmo2, SIZES, {"norm_epsilon": 1e-5, "rotary_base": 1e4, "has_qkv_bias": False}),
    "olmo3": (
        olmo3,
        SIZES,
        {
            "norm_epsilon": 1e-5,
            "rotary_base": 5e5,
            "rotary_base_local": 0.0,
            "sliding_window": 4096,
            "windowed_layers": (True, True, True, False, True, True),
        },
    ),
    "granite": (
        granite,
        SIZES,
        {
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
            "softmax_scale": 1.0,
        },
    ),
    "smollm3": (
        smollm3,
        SIZES,
        {
            "num_query_groups": 4,
            "rotary_base": 2e6,
            "unrotated_layers": (False, False, False, True, False, False),
            "untie_embeddings_and_output_weights": False,
            "sliding_window": 0,
        },
    ),
    "gpt2": (
        gpt2,
        {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 16, "vocab_size": 50},
        {
            "ffn_hidden_size": 256,
            "norm_epsilon": 1e-5,
            "activation": "gelu_tanh",
            "untie_embeddings_and_output_weights": False,
            "init_method_std": 0.02,
        },
    ),
    "gpt_neox": (
        gpt_neox,
        SIZES,
        {
            "norm_epsilon": 1e-5,
            "parallel_residual": "two_norms",
            "rotary_base": 1e4,
            "rotary_percent": 0.25,
            "activation": "gelu",
            "untie_embeddings_and_output_weights": True,
            "has_qkv_bias": True,
            "init_method_std": 0.02,
        },
    ),
    "falcon": (
        falcon,
        {
            name: SIZES[name]
            for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
        },
        {
            "num_query_groups": 1,
            "parallel_residual": "shared_norm",
            "ffn_hidden_size": 4 * 4096,
            "max_position_embeddings": 2048,
            "norm_epsilon": 1e-5,
            "position_embedding_type": "rope",
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": False,
            "init_method_std": 0.02,
        },
    ),
    "gpt_oss": (
        gpt_oss,
        SIZES,
        {
            "num_query_groups": 8,
            "kv_channels": 64,
            "norm_epsilon": 1e-5,
            "num_experts": 128,
            "moe_router_topk": 4,
            "ffn_hidden_size": 512,
            "moe_ffn_hidden_size": 512,
            "sliding_window": 128,
            "windowed_layers": (True, False) * 3,
            "activation_func_clamp_value": 7.0,
            "glu_linear_offset": 1.0,
            "rotary_base": 150000.0,
            "rope_scaling_type": "yarn",
            "rope_scaling_factor": 32.0,
            "rope_scaling_original_length": 4096,
            "yarn_beta_fast": 32.0,
            "yarn_beta_slow": 1.0,
            "yarn_correction_range_round_to_int": False,
            "has_qkv_bias": True,
        },
    ),
    "llama4": (
        llama4,
        {name: value for name, value in SIZES.items() if name != "intermediate_size"},
        {
            "num_query_groups": 8,
            "kv_channels": 128,
            "norm_epsilon": 1e-5,
            "ffn_hidden_size": 16384,
            "moe_ffn_hidden_size": 8192,
            "moe_shared_expert_intermediate_size": 8192,
            "num_experts": 16,
            "moe_router_topk": 1,
            "moe_layers": (True,) * 6,
            "rotary_base": 5e5,
            "unrotated_layers": (False, False, False, True, False, False),
            "attention_chunk_size": 8192,
            "windowed_layers": (True, True, True, False, True, True),
            "attn_temperature_scale": 0.1,
            "attn_temperature_floor": 8192,
            "qk_l2_norm": True,
        },
    ),
    "deepseek_v2": (
        deepseek_v2,
        {**SIZES, "num_experts_per_tok": 6},
        {
            **DEEPSEEK,
            "num_experts": 64,
            "moe_router_topk": 6,
            "moe_router_topk_scaling_factor": 1.0,
            "moe_ffn_hidden_size": 1407,
            "moe_shared_expert_intermediate_size": 2 * 1407,
            "moe_layers": (True,) * 6,
            "moe_router_num_groups": 0,
        },
    ),
    "deepseek_v3": (deepseek_v3, MOST_HEADS, DEEPSEEK_V3),
    "deepseek_v32": (
        deepseek_v32,
        MOST_HEADS,
        {
            **DEEPSEEK_V3,
            "dsa_indexer_n_heads": 64,
            "dsa_indexer_head_dim": 128,
            "dsa_indexer_topk": 2048,
        },
    ),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_file_without_fields_has_the_defaults_of_transformers(name):
    module, given, expected = DEFAULTS[name]
    config = module.FAMILY.config_from_hf(given)
    found = {field: getattr(config, field) for field in expected}
    assert found == expected


def test_the_original_length_of_phi_3_is_4096():
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    scaling = {"rope_type": "longrope", **factors}
    given = {**SIZES, "max_position_embeddings": 131072, "rope_scaling": scaling}
    config = phi3.FAMILY.config_from_hf(given)
    assert config.rope_scaling_original_length == 4096
    assert config.rope_scaling_factor == 32.0
