"""Every field of a configuration round-trips through each family, or is refused."""

from collections import Counter
from dataclasses import MISSING, dataclass, fields, replace
from typing import get_args

import pytest
from megatron_models.components.mlp.spec import Activation
from megatron_models.errors import ConfigError
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.families import gpt2

from .test_families import CASES, NO_EFFECT


@dataclass(frozen=True, kw_only=True)
class KnobConfig(GPTConfig):
    """A configuration with a field that no family knows."""

    a_knob: float = 0.0


@pytest.mark.parametrize(("family", "theirs"), CASES)
def test_a_new_field_is_refused_by_every_family_unless_it_has_its_default(family, theirs):
    config = KnobConfig(**family.config_from_hf(theirs).to_dict())
    assert family.config_to_hf(config) == family.config_to_hf(family.config_from_hf(theirs))
    words = f"a {family.title} model has a_knob = 0.0, this one has 30.0"
    with pytest.raises(ConfigError, match=words):
        family.config_to_hf(replace(config, a_knob=30.0))


#: Another value for each field with a default, for a model with or without experts.
OTHERS = {
    "num_query_groups": 1,
    "kv_channels": 4,
    "ffn_hidden_size": 44,
    "make_vocab_size_divisible_by": 64,
    "position_embedding_type": ("rope", "learned_absolute", "alibi"),
    "scale_alibi": True,
    "attention_output_gate": True,
    "rotary_base": 1e3,
    "rotary_base_local": 1e2,
    "rotary_percent": 0.5,
    "rotary_interleaved": True,
    "rope_scaling_type": ("linear", "none"),
    "rope_scaling_factor": 3.0,
    "rope_scaling_low_freq_factor": 1.5,
    "rope_scaling_high_freq_factor": 5.0,
    "rope_scaling_original_length": 4,
    "rope_scaling_attention_factor": 1.5,
    "rope_scaling_short_factors": "1.0,2.0",
    "rope_scaling_long_factors": "3.0,4.0",
    "yarn_beta_fast": 20.0,
    "yarn_beta_slow": 2.0,
    "yarn_correction_range_round_to_int": False,
    "mscale": 2.0,
    "mscale_all_dim": 1.0,
    "mrope_section": ((1, 1, 0),),
    "mrope_interleaved": True,
    "no_rope_freq": "2",
    "normalization": ("LayerNorm", "RMSNorm"),
    "norm_epsilon": 1e-3,
    "apply_layernorm_1p": True,
    "norm_bias": False,
    "norm_placement": ("post", "sandwich", "sum"),
    "parallel_residual": ("two_norms", "shared_norm"),
    "residual_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "logits_scaling": 4.0,
    "final_logit_softcapping": 30.0,
    "activation": get_args(Activation),
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "add_bias_linear": (False, True),
    "add_qkv_bias": True,
    "add_attention_out_bias": True,
    "add_mlp_bias": True,
    "untie_embeddings_and_output_weights": (False, True),
    "mtp_num_layers": 1,
    "mtp_loss_scaling_factor": 0.5,
    "softmax_type": "learnable",
    "attn_logit_softcapping": 1.0,
    "softmax_scale": 0.5,
    "qk_l2_norm": True,
    "attn_temperature_scale": 0.5,
    "attn_temperature_floor": 4,
    "sliding_window": 3,
    "attention_chunk_size": 4,
    "window_attn_skip_freq": "2",
    "num_experts": (0, 3),
    "moe_router_topk": 3,
    "moe_ffn_hidden_size": 12,
    "moe_shared_expert_intermediate_size": 8,
    "moe_layer_freq": "2",
    "moe_router_pre_softmax": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.5,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.5,
    "moe_router_norm_topk_prob": "yes",
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_group_score_topk": 1,
    "moe_router_add_bias": True,
    "moe_router_expert_choice": True,
    "moe_router_force_load_balancing": True,
    "moe_apply_probs_on_input": True,
    "moe_router_dtype": "fp64",
    "moe_input_jitter_eps": 0.1,
    "moe_seq_aux_loss_coeff": 0.5,
    "moe_global_aux_loss_coeff": 0.5,
    "moe_shared_expert_gate": True,
    "moe_expert_capacity_factor": 0.5,
    "moe_token_drop_policy": "position",
    "moe_pad_expert_input_to_capacity": True,
    "moe_expert_rank_capacity_factor": 1.5,
    "task_head": ("classification", "reward"),
    "num_labels": 3,
    "head_pooling": "mean",
    "normalize_embedding": False,
    "use_mup": True,
    "mup_base_hidden_size": 8,
    "mup_base_head_dim": 4.0,
    "mup_attn_scale_power": 0.5,
    "init_method_std": 0.5,
    "multi_latent_attention": True,
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 4,
    "latent_norm_epsilon": 0.5,
    "qk_layernorm": True,
    "qk_layernorm_scope": "projection",
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": "2",
    "dsa_indexer_n_heads": 4,
    "dsa_indexer_head_dim": 8,
    "dsa_indexer_topk": 4,
    "dsa_indexer_loss_coeff": 0.5,
    "dsa_indexer_use_sparse_loss": True,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "heterogeneous_layers_config_encoded_json": '[{"attention": {"no_op": true}}, {}]',
    "layer_modules": "attention=megatron_models.components.linear.spec:LinearSpec",
}
#: Fields that need not round-trip in a family, since no layer reads them.
UNREAD = {"gpt2": gpt2.ROTARY, "llama": (), "mixtral": ("ffn_hidden_size",)}


SCALING = {each for each in OTHERS if each.startswith(("rope_scaling_", "yarn_", "mscale"))}
#: Fields that each type of rotary scaling reads.
READ_BY = {
    "none": set(),
    "linear": {"rope_scaling_factor"},
    "llama3": {
        *("rope_scaling_factor", "rope_scaling_original_length"),
        *("rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor"),
    },
}


@pytest.mark.parametrize(("family", "theirs"), CASES)
def test_each_field_round_trips_or_is_refused(family, theirs):
    config = family.config_from_hf(theirs)
    needed = {each.name for each in fields(GPTConfig) if each.default is MISSING}
    assert {each.name for each in fields(GPTConfig)} == OTHERS.keys() | needed
    outcomes = Counter()
    for name, given in OTHERS.items():
        for value in given if isinstance(given, tuple) else (given,):
            try:
                changed = replace(config, **{name: value})
            except ConfigError:
                continue  # not a valid model
            try:
                back = family.config_from_hf(family.config_to_hf(changed))
            except ConfigError as error:
                outcomes["refused"] += 1
                assert "has" in str(error) and changed != config
                continue
            outcomes["kept"] += 1
            free = {*NO_EFFECT, *UNREAD[family.name]}
            free |= SCALING - {"rope_scaling_type"} - READ_BY[changed.rope_scaling_type]
            left = {n: v for n, v in changed.to_dict().items() if n not in free}
            biases = [each for each in left if each.startswith("add_")]
            for each in biases:
                del left[each]
            assert left.items() <= back.to_dict().items(), name
            for part in ("qkv", "attention_out", "mlp"):
                assert getattr(back, f"has_{part}_bias") == getattr(changed, f"has_{part}_bias")
    assert outcomes["refused"] > 5 and outcomes["kept"] > 5
