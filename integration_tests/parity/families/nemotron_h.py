"""Nemotron-H: a hybrid of Mamba-2, attention and feed-forward layers."""

from families.case import FamilyCase
from families.draws import merged, optional
from hypothesis import strategies as st

LAYERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
PATTERNS = ("M*-", "MM*E", "E*M-", "*M", "M-M")

CASE = FamilyCase(
    family="nemotron_h",
    config_class="NemotronHConfig",
    model_class="NemotronHForCausalLM",
    mathematics="nemotron_h",
    settings={
        "layers_block_type": [LAYERS[symbol] for symbol in "ME*M-"],
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "mamba_num_heads": 8,
        "mamba_head_dim": 4,
        "ssm_state_size": 6,
        "n_groups": 4,
        "n_routed_experts": 8,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 16,
        "vocab_size": 150,
        "max_position_embeddings": 64,
        "chunk_size": 8,
        # Norms of small groups amplify rounding: with 1e-5 float32 errors of both sides near 1e-4.
        "layer_norm_epsilon": 1e-2,
    },
    draws=merged(
        st.fixed_dictionaries(
            {
                "layers_block_type": st.sampled_from(PATTERNS).map(
                    lambda pattern: [LAYERS[symbol] for symbol in pattern]
                ),
                "n_groups": st.sampled_from((1, 2, 4)),
                "head_dim": st.sampled_from((6, 8)),
                "num_key_value_heads": st.sampled_from((1, 2, 4)),
                "conv_kernel": st.sampled_from((2, 4)),
                "use_bias": st.booleans(),
                "use_conv_bias": st.booleans(),
                "layer_norm_epsilon": st.sampled_from((1e-5, 1e-2)),
                "routed_scaling_factor": st.sampled_from((1.0, 2.5)),
                "norm_topk_prob": st.booleans(),
            }
        ),
        optional(
            mlp_hidden_act=st.sampled_from(("relu2", "silu")),
            time_step_min=st.sampled_from((0.01, 0.5)),
        ),
    ),
    refused=frozenset(
        {
            *("mamba_hidden_act", "attention_bias", "mlp_bias", "n_shared_experts"),
            *("num_nextn_predict_layers", "moe_latent_size", "mlp_hidden_act"),
            "tie_word_embeddings",
            "sliding_window",
        }
    ),
    others={
        "layers_block_type": (["linear_attention", "mlp"], ["linear_attention"]),
        "mtp_layers_block_type": (["full_attention", "mlp"],),
        "moe_latent_size": (16,),
        "mamba_hidden_act": ("swish", "gelu"),
        "mlp_hidden_act": ("silu", "relu", "gelu", "tanh"),
        "mamba_ssm_cache_dtype": ("bfloat16",),
        "n_groups": (2,),
        "mamba_num_heads": (12,),
        "n_group": (2,),
        "topk_group": (1,),
        "time_step_limit": ([0.0, 0.5],),
    },
)
