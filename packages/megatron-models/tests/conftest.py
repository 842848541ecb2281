"""Run-time checks of shape annotations, and configurations shared by the tests."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checked_shapes import check_shapes

# Configurations and descriptions check their own values and have no tensors.
_PARTS = (
    "latent_attention.module",
    "gated_delta_net.module",
    "sparse_attention.module",
    *(
        f"attention.{name}"
        for name in ("module", "cross", "context_parallel", "sinks", "temperature", "alibi")
    ),
    *(
        "rotary.module",
        "mlp.module",
        "linear.module",
        "mamba.module",
        "recurrent_state",
        "moe.module",
        "moe.router",
        "moe.experts",
        "norm.module",
    ),
    *("embedding.module", "embedding.output", "block", "context", "dropout", "stack", "trunk"),
)
_CHECKED = [
    "megatron_models.cache",
    *(f"megatron_models.components.{name}" for name in _PARTS),
    "megatron_models.models.trunk_model",
    *("megatron_models.components.masked_lm.module", "megatron_models.components.heads.module"),
    *(f"megatron_models.models.{name}.model" for name in ("gpt", "bert", "encoder_decoder")),
]
check_shapes(_CHECKED)

from megatron_models.models.gpt.config import GPTConfig  # noqa: E402
from megatron_models.models.gpt.model import GPT  # noqa: E402

MODELS: dict[str, dict[str, Any]] = {
    "gpt2-exact-gelu": {},
    "untied": {"activation": "gelu_tanh", "untie_embeddings_and_output_weights": True},
    "qkv-bias-only": {"add_bias_linear": False, "add_qkv_bias": True, "num_query_groups": 2},
    "attention-out-bias-only": {"add_bias_linear": False, "add_attention_out_bias": True},
    "mlp-bias-only": {"add_bias_linear": False, "add_mlp_bias": True},
    "multi-query-wide": {"normalization": "RMSNorm", "num_query_groups": 1, "kv_channels": 10},
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "num_query_groups": 2,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
    },
    "interleaved": {
        "position_embedding_type": "rope",
        "activation": "swiglu",
        "rotary_interleaved": True,
    },
    "partial-rotary": {
        "position_embedding_type": "rope",
        "rotary_percent": 0.34,
        "kv_channels": 12,
    },
    "llama3-scaling": {
        "position_embedding_type": "rope",
        "rope_scaling_type": "llama3",
        "rope_scaling_original_length": 8,
    },
    "linear-scaling": {"position_embedding_type": "rope", "rope_scaling_type": "linear"},
    "window": {"sliding_window": 4, "softmax_scale": 0.7, "window_attn_skip_freq": "2"},
    "local-base": {
        "position_embedding_type": "rope",
        "rotary_base_local": 50.0,
        "rope_scaling_type": "linear",
        "sliding_window": 4,
        "window_attn_skip_freq": "2",
    },
    "chunks": {"attention_chunk_size": 4, "window_attn_skip_freq": "[0,1]"},
    "llama4": {
        "position_embedding_type": "rope",
        "rotary_interleaved": True,
        "no_rope_freq": "2",
        "normalization": "RMSNorm",
        "norm_epsilon": 0.01,
        "activation": "swiglu",
        "num_query_groups": 2,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "qk_l2_norm": True,
        "attention_chunk_size": 4,
        "window_attn_skip_freq": "2",
        "attn_temperature_scale": 0.4,
        "attn_temperature_floor": 3,
    },
    "gated": {
        "attention_output_gate": True,
        "num_query_groups": 2,
        "position_embedding_type": "rope",
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "add_qkv_bias": True,
    },
    "gated-heads": {"attention_output_gate": True},
    "alibi": {"position_embedding_type": "alibi", "num_query_groups": 2, "softmax_scale": 0.7},
    "scaled-alibi": {
        "position_embedding_type": "alibi",
        "scale_alibi": True,
        "num_attention_heads": 6,
        "num_query_groups": 3,
        "sliding_window": 5,
    },
    "heterogeneous": {
        "position_embedding_type": "rope",
        "heterogeneous_layers_config_encoded_json": '[{"attention": {"num_attention_heads": 2, '
        '"num_query_groups": 1, "kv_channels": 10}, "mlp": {"replace_with_linear": true}}, '
        '{"attention": {"no_op": true}, "mlp": {"ffn_hidden_size": 28}}]',
    },
    "heterogeneous-parallel": {
        "parallel_residual": "two_norms",
        "activation": "swiglu",
        "heterogeneous_layers_config_encoded_json": '{"block_configs": [{"attention": '
        '{"replace_with_linear": true}, "ffn": {"ffn_hidden_size": 52}}, {"attention": '
        '{"n_heads_in_group": 2}, "ffn": {"no_op": true}}]}',
    },
    "softcap": {"attn_logit_softcapping": 1.5, "num_query_groups": 2},
    "gemma": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "apply_layernorm_1p": True,
        "norm_placement": "sandwich",
        "activation": "geglu_tanh",
        "add_bias_linear": False,
        "embedding_multiplier": 24**0.5,
        "final_logit_softcapping": 2.0,
    },
    "granite": {
        "normalization": "RMSNorm",
        "activation": "reglu",
        "residual_multiplier": 0.3,
        "embedding_multiplier": 12.0,
        "logits_scaling": 3.0,
        "untie_embeddings_and_output_weights": True,
    },
    "olmo2": {"norm_placement": "post", "normalization": "RMSNorm", "activation": "silu"},
    "layernorm-1p": {"apply_layernorm_1p": True, "activation": "squared_relu"},
    "post-ln": {"norm_placement": "sum", "activation": "relu"},
    "no-norm-bias": {"norm_bias": False, "activation": "quick_gelu"},
    "parallel": {"parallel_residual": "two_norms", "activation": "geglu"},
    "parallel-rms": {
        "parallel_residual": "two_norms",
        "normalization": "RMSNorm",
        "apply_layernorm_1p": True,
        "residual_multiplier": 0.5,
    },
    "parallel-shared-norm": {
        "parallel_residual": "shared_norm",
        "num_query_groups": 1,
        "position_embedding_type": "rope",
        "add_bias_linear": False,
    },
    "gpt-oss-mlp": {
        "activation": "quick_geglu",
        "activation_func_clamp_value": 0.7,
        "glu_linear_offset": 1.0,
    },
    "swiglu-oai": {"activation": "swiglu", "activation_func_clamp_value": 0.7},
    "norms-of-heads": {
        "qk_layernorm": True,
        "num_query_groups": 2,
        "position_embedding_type": "rope",
    },
    "norms-of-heads-1p": {
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "apply_layernorm_1p": True,
        "num_query_groups": 1,
    },
    "norms-of-projections": {
        "qk_layernorm": True,
        "qk_layernorm_scope": "projection",
        "num_query_groups": 2,
        "normalization": "RMSNorm",
        "norm_placement": "post",
        "position_embedding_type": "rope",
    },
    "latent": {
        "multi_latent_attention": True,
        "position_embedding_type": "rope",
        "kv_lora_rank": 10,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
    },
    "latent-queries": {
        "multi_latent_attention": True,
        "position_embedding_type": "rope",
        "rotary_interleaved": True,
        "q_lora_rank": 14,
        "kv_lora_rank": 10,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 2,
        "v_head_dim": 8,
        "qk_layernorm": True,
        "latent_norm_epsilon": 0.1,
        "add_qkv_bias": True,
        "normalization": "RMSNorm",
    },
    "gated-delta-net": {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": "[0,1]",
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 5,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "normalization": "RMSNorm",
        "apply_layernorm_1p": True,
    },
}


@pytest.fixture
def small() -> Callable[..., GPTConfig]:
    """Returns a maker of configurations of a small model; keywords replace fields."""

    def make(**changes: Any) -> GPTConfig:
        values: dict[str, Any] = {
            "num_layers": 2,
            "hidden_size": 24,
            "num_attention_heads": 4,
            "vocab_size": 61,
            "max_position_embeddings": 16,
            "ffn_hidden_size": 40,
        }
        return GPTConfig(**(values | changes))

    return make


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def config(request: pytest.FixtureRequest, small: Callable[..., GPTConfig]) -> GPTConfig:
    """Covers every option of the model at least once."""
    return small(**request.param)


@pytest.fixture
def model_changes() -> dict[str, dict[str, Any]]:
    """Returns all changes of `config` to a small model together."""
    return MODELS


@pytest.fixture
def scramble() -> Callable[[GPT], GPT]:
    """Returns a function that gives a model non-unit gains, nonzero biases and large weights."""

    def fill(model: GPT) -> GPT:
        generator = torch.Generator().manual_seed(5)
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            with torch.no_grad():
                parameter.copy_(noise * 0.3 + ("norm.weight" in name))
                if name in ("embedding.word.weight", "output.weight"):
                    parameter[model.config.vocab_size :] = 0  # padding, as loaded from a checkpoint
        return model

    return fill
