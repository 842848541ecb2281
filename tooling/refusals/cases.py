"""Wrong configurations of models, the words of their errors, and a change that mends each.

Without torch, so that a process that cannot import it reads the cases.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SMALL: Mapping[str, Any] = {
    "num_layers": 4,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 16,
    "ffn_hidden_size": 40,
}
ROPE: Mapping[str, Any] = {"position_embedding_type": "rope"}
EXPERTS: Mapping[str, Any] = {"num_experts": 8}
PRE: Mapping[str, Any] = {**EXPERTS, "moe_router_pre_softmax": True}
GROUPS: Mapping[str, Any] = {**PRE, "moe_router_num_groups": 4, "moe_router_group_topk": 2}
CHOICE: Mapping[str, Any] = {**PRE, "moe_router_expert_choice": True}
SINKHORN: Mapping[str, Any] = {**PRE, "moe_router_load_balancing_type": "sinkhorn"}
LATENT: Mapping[str, Any] = {
    **ROPE,
    "multi_latent_attention": True,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
LINEAR: Mapping[str, Any] = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": "2",
}
TEMPERATURE: Mapping[str, Any] = {"attn_temperature_scale": 0.5}


@dataclass(frozen=True)
class Case:
    """A wrong configuration.

    Attributes:
        fields: The fields that differ from `SMALL`.
        words: What the error contains, joined by ``|``: fields, values, the rule, the remedy.
        fix: The fields that the error advises, with which the configuration is accepted. None takes
            a field out.
        layout: The parallel sizes, for a layout that does not fit the model.
        fixed_layout: The parallel sizes that the error advises.
        kind: Kind of the model.
    """

    fields: Mapping[str, Any]
    words: str
    fix: Mapping[str, Any] | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)
    fixed_layout: Mapping[str, Any] | None = None
    kind: str = "gpt"


def blocks(first: str) -> dict[str, str]:
    """Returns the fields of a model whose first layer differs."""
    return {"heterogeneous_layers_config_encoded_json": f"[{first}, {{}}, {{}}, {{}}]"}


def _absent(**fields: Any) -> dict[str, Any]:
    return fields


TYPES = {
    "an integer": Case({"num_layers": 2.5}, "num_layers must be an integer, not 2.5"),
    "a number": Case({"norm_epsilon": "1"}, "norm_epsilon must be a number, not '1'"),
    "a switch": Case({"qk_layernorm": 1}, "qk_layernorm must be true or false, not 1"),
    "text": Case({"no_rope_freq": 2}, "no_rope_freq must be text, not 2"),
    "a choice": Case(
        {"activation": "swigl"},
        "activation is 'swigl', not one of|did you mean 'swiglu'",
        {"activation": "swiglu"},
    ),
    "too many layers": Case(
        {"num_layers": 10**9}, "num_layers is 1000000000, more than 100000; use 100000 or less"
    ),
    "no layers": Case(
        {"num_layers": 0}, "num_layers must be a positive number, not 0; use 1", {"num_layers": 1}
    ),
    "a negative size": Case(
        {"sliding_window": -1},
        "sliding_window must be a number of at least 0, not -1; use 0",
        {"sliding_window": 0},
    ),
    "an infinite number": Case(
        {"init_method_std": float("inf")},
        "init_method_std must be a positive number, not inf; the default is 0.02",
        {"init_method_std": 0.02},
    ),
    "no number": Case(
        {"softmax_scale": float("nan")},
        "softmax_scale must be a number of at least 0, not nan; the default is 0.0",
        {"softmax_scale": 0.0},
    ),
    "an infinite offset": Case(
        {"activation": "swiglu", "glu_linear_offset": float("inf")},
        "glu_linear_offset must be a finite number, not inf; the default is 0.0",
        {"glu_linear_offset": 0.0},
    ),
}

ATTENTION = {
    "heads and width": Case(
        {"hidden_size": 26},
        "hidden_size 26 is not a multiple of num_attention_heads 4; use hidden_size 24 or 28",
        {"hidden_size": 28},
    ),
    "groups and heads": Case(
        {"num_query_groups": 3},
        "num_attention_heads 4 is not a multiple of num_query_groups 3|use num_query_groups 2 or 4",
        {"num_query_groups": 2},
    ),
    "a scope without norms": Case(
        {"qk_layernorm_scope": "projection"},
        "qk_layernorm_scope projection has no effect without qk_layernorm; leave it out",
        _absent(qk_layernorm_scope=None),
    ),
    "a norm of projections with LayerNorm": Case(
        {"qk_layernorm": True, "qk_layernorm_scope": "projection"},
        "qk_layernorm_scope projection needs normalization 'RMSNorm', not 'LayerNorm'",
        {"normalization": "RMSNorm"},
    ),
    "two norms of heads": Case(
        {**ROPE, "qk_l2_norm": True, "qk_layernorm": True},
        "qk_l2_norm and qk_layernorm exclude each other; choose one",
        _absent(qk_l2_norm=None),
    ),
    "an L2 norm without rotation": Case(
        {"qk_l2_norm": True},
        "qk_l2_norm needs rotary positions, not position_embedding_type learned_absolute",
        ROPE,
    ),
    "scaled biases without biases": Case(
        {"scale_alibi": True},
        "scale_alibi has no effect with position_embedding_type learned_absolute; leave it out",
        _absent(scale_alibi=None),
    ),
    "a local base without windows": Case(
        {**ROPE, "rotary_base_local": 50.0},
        "rotary_base_local 50.0 is the base of layers with a window|set sliding_window",
        {"sliding_window": 4},
    ),
    "a pattern without windows": Case(
        {"window_attn_skip_freq": "2"},
        "window_attn_skip_freq 2 selects layers without a window, but no layer has one; set",
        {"sliding_window": 4},
    ),
    "windows in no layer": Case(
        {"window_attn_skip_freq": "1", "sliding_window": 4},
        "window_attn_skip_freq 1 leaves no layer with sliding_window 4; set sliding_window to 0",
        _absent(window_attn_skip_freq=None),
    ),
    "chunks in no layer": Case(
        {"window_attn_skip_freq": "[0]*4", "attention_chunk_size": 4},
        "[0]*4 leaves no layer with attention_chunk_size 4; set attention_chunk_size to 0",
        _absent(window_attn_skip_freq=None),
    ),
    "a pattern of windows of another length": Case(
        {"window_attn_skip_freq": "[1,0]", "sliding_window": 4},
        "window_attn_skip_freq: the pattern [1,0] has 2 layers, but the model has 4",
        {"window_attn_skip_freq": "[1,0]*2"},
    ),
    "text that is no pattern": Case(
        {"window_attn_skip_freq": "{x}", "sliding_window": 4},
        "window_attn_skip_freq: '{x}' is not a pattern of layers; give a number, or lists of ones",
        {"window_attn_skip_freq": "2"},
    ),
    "windows without a number": Case(
        {"window_attn_skip_freq": "0", "sliding_window": 4},
        "window_attn_skip_freq: 0 is not a pattern of layers; give a number of at least 1",
        {"window_attn_skip_freq": "2"},
    ),
    "a temperature without layers for it": Case(
        {**ROPE, **TEMPERATURE},
        "attn_temperature_scale 0.5 needs layers without rotary positions; set no_rope_freq",
        {"no_rope_freq": "2"},
    ),
    "a temperature with learned positions": Case(
        TEMPERATURE,
        "0.5 is not supported with position_embedding_type learned_absolute; use 'rope' or 'none'",
        {"position_embedding_type": "none"},
    ),
    "a floor without a temperature": Case(
        {"attn_temperature_floor": 5},
        "attn_temperature_floor 5 has no effect without attn_temperature_scale; leave it out",
        _absent(attn_temperature_floor=None),
    ),
}

ROTARY = {
    "a fraction above 1": Case(
        {**ROPE, "rotary_percent": 1.5},
        "rotary_percent must lie in (0, 1], not 1.5; use 1.0",
        {"rotary_percent": 1.0},
    ),
    "an odd number of channels": Case(
        {**ROPE, "kv_channels": 5},
        "kv_channels 5 x rotary_percent 1.0 gives 5; make it even and positive, such as 4 or 6",
        {"kv_channels": 6},
    ),
    "factors in the wrong order": Case(
        {**ROPE, "rope_scaling_type": "llama3", "rope_scaling_low_freq_factor": 8.0},
        "rope_scaling_low_freq_factor 8.0 must be below rope_scaling_high_freq_factor 4.0|as 1",
        {"rope_scaling_low_freq_factor": 1.0},
    ),
    "periods in the wrong order": Case(
        {**ROPE, "rope_scaling_type": "yarn", "yarn_beta_slow": 32.0},
        "yarn_beta_slow 32.0 must be below yarn_beta_fast 32.0; use a smaller one, such as 8",
        {"yarn_beta_slow": 8.0},
    ),
    "too few factors": Case(
        {**ROPE, "rope_scaling_type": "longrope", "rope_scaling_short_factors": "1,2"},
        "rope_scaling_short_factors must be 3 positive numbers separated by commas|not '1,2'",
        {"rope_scaling_short_factors": "1,2,3", "rope_scaling_long_factors": "1,1,1"},
    ),
    "factors of a latent": Case(
        {**LATENT, "rope_scaling_type": "longrope", "rope_scaling_short_factors": "1,2,3"},
        "rope_scaling_short_factors must be 2 positive numbers separated by commas|not '1,2,3'",
        {"rope_scaling_short_factors": "1,2", "rope_scaling_long_factors": "1,1"},
    ),
    "text for layers without rotation": Case(
        {**ROPE, "no_rope_freq": "every"},
        "no_rope_freq: 'every' is not a pattern of layers; give a number",
        {"no_rope_freq": "2"},
    ),
    "layers without a rotation that no layer has": Case(
        {"no_rope_freq": "2"},
        "no_rope_freq 2 needs rotary positions, not position_embedding_type learned_absolute",
        {"no_rope_freq": "0"},
    ),
    "a local base without rotation": Case(
        {"rotary_base_local": 50.0, "sliding_window": 4},
        "rotary_base_local 50.0 needs rotary positions, not|leave it at 0",
        {"rotary_base_local": 0.0},
    ),
}

VARIANTS = {
    "heads of a variant that no layer has": Case(
        {"linear_num_key_heads": 8},
        "linear_num_key_heads 8 has no effect without experimental_attention_variant "
        "'gated_delta_net'; leave it at 16",
        {"linear_num_key_heads": 16},
    ),
    "layers of a variant that the model lacks": Case(
        {"linear_attention_freq": "2"},
        "linear_attention_freq 2 has no effect without|leave it at ''",
        {"linear_attention_freq": ""},
    ),
    "a variant without layers": Case(
        {**LINEAR, "linear_attention_freq": ""},
        "gated_delta_net needs layers with linear attention; set linear_attention_freq, such as 4",
        {"linear_attention_freq": "4"},
    ),
    "too few layers in the pattern of a variant": Case(
        {**LINEAR, "linear_attention_freq": "[1,0]"},
        "linear_attention_freq: the pattern [1,0] has 2 layers, but the model has 4",
        {"linear_attention_freq": "[1,0]*2"},
    ),
    "an indexer that no layer has": Case(
        {"dsa_indexer_topk": 4},
        "dsa_indexer_topk 4 has no effect without experimental_attention_variant 'dsa'; leave it "
        "at 2048",
        {"dsa_indexer_topk": 2048},
    ),
    "sparse attention without latents": Case(
        {"experimental_attention_variant": "dsa"},
        "sparse attention (dsa) needs multi_latent_attention; set it",
        LATENT,
    ),
    "an indexer narrower than what is rotated": Case(
        {**LATENT, "experimental_attention_variant": "dsa", "dsa_indexer_head_dim": 3},
        "dsa_indexer_head_dim 3 is less than qk_pos_emb_head_dim 4|use dsa_indexer_head_dim 4",
        {"dsa_indexer_head_dim": 4},
    ),
    "sparse attention over context-parallel ranks": Case(
        {**LATENT, "experimental_attention_variant": "dsa"},
        "cp 2 cannot cut sparse attention|use cp 1",
        layout={"cp": 2},
        fixed_layout={},
    ),
    "value heads of a gated delta net": Case(
        {**LINEAR, "linear_num_value_heads": 40},
        "linear_num_value_heads 40 is not a multiple of linear_num_key_heads 16|use "
        "linear_num_value_heads 32 or 48",
        {"linear_num_value_heads": 48},
    ),
    "key heads of a gated delta net over ranks": Case(
        {**LINEAR, "num_attention_heads": 6, "ffn_hidden_size": 48, "vocab_size": 60},
        "tp 3 cannot cut linear_num_key_heads 16 into 3 equal parts",
        {"linear_num_key_heads": 18, "linear_num_value_heads": 36},
        layout={"tp": 3},
    ),
    "a gated delta net over context-parallel ranks": Case(
        LINEAR,
        "cp 2 cannot cut a gated delta net, whose state passes from token to token; use cp 1",
        layout={"cp": 2},
        fixed_layout={},
    ),
}

LATENTS = {
    "ranks without latents": Case(
        {"kv_lora_rank": 10},
        "kv_lora_rank 10 has no effect without multi_latent_attention; leave it at 32",
        {"kv_lora_rank": 32},
    ),
    "query groups": Case(
        {**LATENT, "num_query_groups": 2},
        "multi_latent_attention needs num_query_groups = 4, not 2",
        {"num_query_groups": 4},
    ),
    "other positions": Case(
        {**LATENT, "position_embedding_type": "none"},
        "multi_latent_attention needs position_embedding_type = 'rope', not 'none'",
        ROPE,
    ),
    "a window": Case(
        {**LATENT, "sliding_window": 4},
        "sliding_window 4 is not supported with multi_latent_attention; leave it at 0",
        {"sliding_window": 0},
    ),
    "an odd rotated key": Case(
        {**LATENT, "qk_pos_emb_head_dim": 5},
        "qk_pos_emb_head_dim 5 is odd; use 4 or 6",
        {"qk_pos_emb_head_dim": 6},
    ),
    "values wider than queries": Case(
        {**LATENT, "v_head_dim": 11},
        "v_head_dim 11 is more than|qk_head_dim 6 + qk_pos_emb_head_dim 4; use 10 or less",
        {"v_head_dim": 10},
    ),
}

BLOCK = {
    "a bias of norms without one": Case(
        {"normalization": "RMSNorm", "norm_bias": False},
        "norm_bias has no effect with normalization RMSNorm, which has no bias; leave it out",
        _absent(norm_bias=None),
    ),
    "parallel sublayers with other norms": Case(
        {"parallel_residual": "two_norms", "norm_placement": "post"},
        "parallel_residual two_norms needs norm_placement 'pre', not 'post'",
        {"norm_placement": "pre"},
    ),
    "a bound of no gate": Case(
        {"activation_func_clamp_value": 7.0},
        "activation_func_clamp_value 7.0 needs a gated activation (swiglu, |not 'gelu'",
        {"activation": "swiglu"},
    ),
    "a weight of no prediction": Case(
        {"mtp_loss_scaling_factor": 0.3},
        "mtp_loss_scaling_factor 0.3 has no effect without mtp_num_layers; set it to 1 or more",
        {"mtp_num_layers": 1},
    ),
    "a base width without its parametrization": Case(
        {"mup_base_hidden_size": 12},
        "mup_base_hidden_size 12 has no effect without use_mup; leave it out",
        _absent(mup_base_hidden_size=None),
    ),
    "a power of scores above 2": Case(
        {"use_mup": True, "mup_attn_scale_power": 3.0},
        "mup_attn_scale_power is 3.0, more than 2; use 2 or less",
        {"mup_attn_scale_power": 2.0},
    ),
}

ROUTER = {
    "too many experts of a token": Case(
        {**EXPERTS, "moe_router_topk": 9},
        "moe_router_topk 9 must lie between 1 and num_experts 8; use 8",
        {"moe_router_topk": 8},
    ),
    "no expert of a token": Case(
        {**EXPERTS, "moe_router_topk": 0},
        "moe_router_topk 0 must lie between 1 and num_experts 8; use 1",
        {"moe_router_topk": 1},
    ),
    "noise that deletes inputs": Case(
        {**EXPERTS, "moe_input_jitter_eps": 1.0},
        "moe_input_jitter_eps 1.0 must be below 1|0.01 is usual",
        {"moe_input_jitter_eps": 0.01},
    ),
    "a softmax before sigmoids": Case(
        {**PRE, "moe_router_score_function": "sigmoid"},
        "moe_router_pre_softmax has no effect with moe_router_score_function sigmoid; leave it out",
        _absent(moe_router_pre_softmax=None),
    ),
    "a sum that is 1": Case(
        {**EXPERTS, "moe_router_norm_topk_prob": "yes"},
        "moe_router_norm_topk_prob yes has no effect on a softmax|add moe_router_pre_softmax",
        {"moe_router_pre_softmax": True},
    ),
    "a sum over tokens": Case(
        {**CHOICE, "moe_router_norm_topk_prob": "yes"},
        "moe_router_norm_topk_prob yes does not work with moe_router_expert_choice|leave it out",
        _absent(moe_router_norm_topk_prob=None),
    ),
    "a default": Case(
        {**PRE, "moe_router_norm_topk_prob": "no"},
        "moe_router_norm_topk_prob no is the default with|leave it out",
        _absent(moe_router_norm_topk_prob=None),
    ),
    "a rate of no bias": Case(
        {**PRE, "moe_router_bias_update_rate": 0.5},
        "moe_router_bias_update_rate 0.5 has no effect without a bias; add",
        {"moe_router_enable_expert_bias": True},
    ),
    "a bias of logits": Case(
        {**EXPERTS, "moe_router_enable_expert_bias": True},
        "moe_router_enable_expert_bias needs moe_router_score_function sigmoid or",
        {"moe_router_score_function": "sigmoid"},
    ),
    "scores of no groups": Case(
        {**PRE, "moe_router_group_score_topk": 2},
        "moe_router_group_score_topk 2 has no effect without groups; set moe_router_num_groups",
        {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    ),
    "groups without a choice": Case(
        {**PRE, "moe_router_num_groups": 4},
        "moe_router_num_groups 4 and moe_router_group_topk 0 need each other; set both or none",
        {"moe_router_group_topk": 2},
    ),
    "groups that do not divide": Case(
        {**GROUPS, "moe_router_num_groups": 3},
        "moe_router_num_groups 3 does not divide num_experts 8; use 2 or 4",
        {"moe_router_num_groups": 4},
    ),
    "all groups": Case(
        {**GROUPS, "moe_router_group_topk": 4},
        "moe_router_group_topk 4 must be less than moe_router_num_groups 4|use 3",
        {"moe_router_group_topk": 3},
    ),
    "one group": Case(
        {**GROUPS, "moe_router_num_groups": 1, "moe_router_group_topk": 1},
        "moe_router_group_topk 1 must be less than moe_router_num_groups 1|use no groups",
        {"moe_router_num_groups": 0, "moe_router_group_topk": 0},
    ),
    "groups with too few experts": Case(
        {**GROUPS, "moe_router_topk": 5},
        "moe_router_group_topk 2 groups of 2 experts have fewer experts than moe_router_topk 5; "
        "use 3 groups, or moe_router_topk 4",
        {"moe_router_group_topk": 3},
    ),
    "groups that no choice satisfies": Case(
        {**GROUPS, "moe_router_topk": 7},
        "fewer experts than moe_router_topk 7; use no groups, or moe_router_topk 4",
        {"moe_router_topk": 4},
    ),
    "more scores than experts": Case(
        {**GROUPS, "moe_router_group_score_topk": 3},
        "moe_router_group_score_topk 3 exceeds the 2 experts of a group; use 2",
        {"moe_router_group_score_topk": 2},
    ),
    "two selections": Case(
        {**SINKHORN, "moe_router_force_load_balancing": True},
        "moe_router_force_load_balancing True and moe_router_load_balancing_type sinkhorn exclude",
        _absent(moe_router_force_load_balancing=None),
    ),
    "groups of another selection": Case(
        {**GROUPS, "moe_router_load_balancing_type": "sinkhorn"},
        "moe_router_num_groups 4 has no effect with moe_router_load_balancing_type sinkhorn",
        _absent(moe_router_load_balancing_type=None),
    ),
    "experts that choose by a softmax of the chosen": Case(
        {**EXPERTS, "moe_router_expert_choice": True},
        "moe_router_expert_choice needs scores of all experts; add moe_router_pre_softmax",
        {"moe_router_pre_softmax": True},
    ),
    "a loss of experts that choose": Case(
        {**CHOICE, "moe_seq_aux_loss_coeff": 0.1},
        "moe_seq_aux_loss_coeff 0.1 has no effect with moe_router_expert_choice|set it to 0",
        {"moe_seq_aux_loss_coeff": 0.0},
    ),
    "weighted inputs of experts that choose": Case(
        {**CHOICE, "moe_apply_probs_on_input": True},
        "moe_apply_probs_on_input does not work with moe_router_expert_choice; leave one out",
        _absent(moe_apply_probs_on_input=None),
    ),
    "a capacity of experts that choose": Case(
        {**CHOICE, "moe_expert_capacity_factor": 1.0},
        "moe_expert_capacity_factor 1.0 does not work with moe_router_expert_choice|leave one",
        _absent(moe_expert_capacity_factor=None),
    ),
    "a loss with Sinkhorn": Case(
        {**SINKHORN, "moe_aux_loss_coeff": 0.1},
        "moe_aux_loss_coeff 0.1 does not work with moe_router_load_balancing_type sinkhorn|to 0",
        {"moe_aux_loss_coeff": 0.0},
    ),
    "Sinkhorn without a softmax": Case(
        {**SINKHORN, "moe_router_pre_softmax": False},
        "sinkhorn with moe_router_topk 2 has weights by a softmax|add moe_router_pre_softmax",
        {"moe_router_pre_softmax": True},
    ),
    "Sinkhorn without sigmoids": Case(
        {**SINKHORN, "moe_router_topk": 1, "moe_router_pre_softmax": False},
        "sinkhorn with moe_router_topk 1 has sigmoids as weights; set moe_router_score_function",
        {"moe_router_score_function": "sigmoid"},
    ),
    "a loss that is off": Case(
        {**EXPERTS, "moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "none"},
        "moe_aux_loss_coeff 0.1 has no effect with moe_router_load_balancing_type none; set it to",
        {"moe_router_load_balancing_type": "aux_loss"},
    ),
    "a loss twice": Case(
        {
            **EXPERTS,
            "moe_seq_aux_loss_coeff": 0.1,
            "moe_router_load_balancing_type": "seq_aux_loss",
        },
        "moe_seq_aux_loss_coeff 0.1 is the weight of the loss that|use moe_aux_loss_coeff",
        {"moe_seq_aux_loss_coeff": 0.0, "moe_aux_loss_coeff": 0.1},
    ),
}

MOE = {
    "settings of no experts": Case(
        {"moe_router_topk": 1},
        "moe_router_topk 1 has no effect without experts; set num_experts, or leave it at 2",
        {"moe_router_topk": 2},
    ),
    "a policy without a capacity": Case(
        {**EXPERTS, "moe_token_drop_policy": "position"},
        "moe_token_drop_policy position has no effect without moe_expert_capacity_factor|1.0",
        {"moe_expert_capacity_factor": 1.0},
    ),
    "a capacity above all tokens": Case(
        {**EXPERTS, "moe_expert_capacity_factor": 1e30},
        "moe_expert_capacity_factor 1e+30 exceeds num_experts 8|use at most 8",
        {"moe_expert_capacity_factor": 8.0},
    ),
    "a gate of no expert": Case(
        {**EXPERTS, "moe_shared_expert_gate": True},
        "moe_shared_expert_gate has no effect without a shared expert; set",
        {"moe_shared_expert_intermediate_size": 8},
    ),
    "a pattern of another length": Case(
        {**EXPERTS, "moe_layer_freq": "[0,1]"},
        "moe_layer_freq: the pattern [0,1] has 2 layers, but the model has 4; give one number",
        {"moe_layer_freq": "[0,1]*2"},
    ),
    "experts in no layer": Case(
        {**EXPERTS, "moe_layer_freq": "[0]*4"},
        "moe_layer_freq [0]*4 selects no layer for experts; use 1",
        {"moe_layer_freq": "1"},
    ),
}

_JSON = "heterogeneous_layers_config_encoded_json: "
_STRANGER = "collections:OrderedDict"

LAYERS = {
    "no JSON": Case({"heterogeneous_layers_config_encoded_json": "{"}, f"{_JSON}not JSON|give one"),
    "deep JSON": Case(
        {"heterogeneous_layers_config_encoded_json": "[" * 100_000},
        f"{_JSON}nested too deeply; give one map for each layer",
    ),
    "no list": Case(
        {"heterogeneous_layers_config_encoded_json": "{}"}, f"{_JSON}neither a list nor a map with"
    ),
    "too few blocks": Case(
        {"heterogeneous_layers_config_encoded_json": "[{}]"},
        "has 1 layers, but num_layers is 4; give one block for each layer",
        {"num_layers": 1},
    ),
    "no map": Case(blocks("1"), "layer 0 is 1, not a map of attention and mlp"),
    "an unknown sublayer": Case(
        blocks('{"mixer": {}}'), "layer 0: unknown key 'mixer'; use attention or mlp"
    ),
    "two names": Case(blocks('{"mlp": {}, "ffn": {}}'), "layer 0 has both mlp and ffn|leave one"),
    "an empty layer": Case(
        blocks('{"attention": {"no_op": true}, "mlp": {"no_op": true}}'),
        "layer 0 has neither attention nor mlp; leave the layer out",
    ),
    "no map of settings": Case(blocks('{"mlp": 3}'), "layer 0, mlp is 3, not a map"),
    "no name of a module": Case(
        blocks('{"mlp": {"module": 3}}'), "layer 0, mlp: module is 3, not package.module:Class"
    ),
    "an unknown kind": Case(
        blocks('{"mlp": {"kind": "sparse"}}'),
        "layer 0, mlp: kind is 'sparse'; kinds of mlp are dense and moe",
        blocks('{"mlp": {"kind": "dense"}}'),
    ),
    "two replacements": Case(
        blocks('{"mlp": {"no_op": true, "replace_with_linear": true}}'),
        "layer 0, mlp: no_op, replace_with_linear and module exclude each other",
    ),
    "settings of no sublayer": Case(
        blocks('{"mlp": {"no_op": true, "ffn_hidden_size": 4}}'),
        "layer 0, mlp: ffn_hidden_size has no effect with no_op or replace_with_linear",
    ),
    "a kind of a module": Case(
        blocks('{"mlp": {"module": "a:b", "kind": "moe"}}'),
        "layer 0, mlp: kind has no effect with module; leave one out",
    ),
    "no switch": Case(
        blocks('{"mlp": {"no_op": 1}}'), "layer 0, mlp: no_op must be true or false, not 1"
    ),
    "an unknown setting": Case(
        blocks('{"mlp": {"ffn_hiden_size": 4}}'),
        "layer 0, mlp: unknown key 'ffn_hiden_size'; did you mean 'ffn_hidden_size'",
        blocks('{"mlp": {"ffn_hidden_size": 4}}'),
    ),
    "a size twice": Case(
        blocks('{"mlp": {"ffn_hidden_size": 4, "ffn_mult": 2}}'),
        "layer 0, mlp: ffn_mult and ffn_hidden_size exclude each other; leave one out",
    ),
    "heads of a group": Case(
        blocks('{"attention": {"n_heads_in_group": 3}}'),
        "n_heads_in_group is 3, which does not divide the heads (4); use 2 or 4",
        blocks('{"attention": {"n_heads_in_group": 2}}'),
    ),
    "a negative factor": Case(
        blocks('{"mlp": {"ffn_mult": -1}}'),
        "ffn_mult must be a positive number below 2^20, not -1; 4 is usual",
        blocks('{"mlp": {"ffn_mult": 4}}'),
    ),
    "heads of a layer": Case(
        blocks('{"attention": {"num_query_groups": 3}}'),
        "layer 0, attention: num_attention_heads 4 is not a multiple of num_query_groups 3|2 or 4",
        blocks('{"attention": {"num_query_groups": 2}}'),
    ),
    "a latent layer with groups": Case(
        {**LATENT, **blocks('{"attention": {"num_query_groups": 2}}')},
        "layer 0, attention: multi_latent_attention needs num_query_groups = 4, not 2",
        blocks('{"attention": {"num_query_groups": 4}}'),
    ),
    "experts of a dense layer": Case(
        blocks('{"mlp": {"moe_router_topk": 1}}'),
        "layer 0, mlp: moe_router_topk needs a layer of kind moe; leave it out",
        blocks("{}"),
    ),
    "a layer of experts in a dense model": Case(
        blocks('{"mlp": {"kind": "moe"}}'),
        "layer 0, mlp: the kind moe needs num_experts of at least 1, not 0; set it",
        {"num_experts": 2},
    ),
    "experts that no layer has": Case(
        {
            **EXPERTS,
            "heterogeneous_layers_config_encoded_json": '[{"mlp": {"kind": "dense"}}'
            + ', {"mlp": {"no_op": true}}' * 3
            + "]",
        },
        "num_experts 8 has no effect, since no layer has experts; set num_experts 0",
        {"num_experts": 0},
    ),
    "a list of modules": Case(
        {"layer_modules": "mlp"},
        "layer_modules is 'mlp', not attention=package.module:Class, mlp=package.module:Class",
    ),
    "a module that does not exist": Case(
        {"layer_modules": "mlp=nowhere:Class"}, "'nowhere:Class', which cannot be imported|give"
    ),
    "a module that is no mixer": Case(
        {"layer_modules": f"mlp={_STRANGER}"},
        f"{_STRANGER} is <class|not a class that derives from Mixer and ComponentConfig",
    ),
    "a long name": Case(
        {"layer_modules": "mlp=" + "a" * 300}, "is no name of a module; give package.module:Class"
    ),
    "settings of a replaced layer": Case(
        {
            **blocks('{"mlp": {"ffn_hidden_size": 4}}'),
            "layer_modules": "mlp=megatron_models.components.linear.spec:LinearSpec",
        },
        "layer 0, mlp: its settings have no effect with layer_modules|give the layer a module",
        blocks("{}"),
    ),
    "a field that a module lacks": Case(
        blocks(
            '{"mlp": {"module": "megatron_models.components.linear.spec:LinearSpec", "rank": 4}}'
        ),
        "LinearSpec has no field 'rank' that a layer may change; use one of",
    ),
}

LAYOUTS = {
    "heads": Case(
        {},
        "tp 3 cannot cut num_attention_heads 4 into 3 equal parts; use tp 2 or 4",
        layout={"tp": 3},
        fixed_layout={"tp": 2},
    ),
    "query groups": Case(
        {"num_attention_heads": 6, "num_query_groups": 3, "ffn_hidden_size": 48},
        "tp 2 and num_query_groups 3: one must be a multiple of the other; use tp 1 or 3",
        layout={"tp": 2},
        fixed_layout={"tp": 3},
    ),
    "the feed-forward width": Case(
        {"ffn_hidden_size": 42},
        "tp 4 cannot cut ffn_hidden_size 42 into 4 equal parts|or ffn_hidden_size 40 or 44",
        {"ffn_hidden_size": 44},
        layout={"tp": 4},
    ),
    "heads of a latent": Case(
        LATENT,
        "tp 3 cannot cut num_attention_heads 4 into 3 equal parts; use tp 2 or 4",
        layout={"tp": 3},
        fixed_layout={"tp": 4},
    ),
    "experts": Case(
        EXPERTS,
        "ep 3 cannot cut num_experts 8 into 3 equal parts; use ep 2 or 4",
        layout={"ep": 3, "dp": 3},
        fixed_layout={"ep": 4, "dp": 4},
    ),
    "the width of experts": Case(
        {**EXPERTS, "moe_ffn_hidden_size": 15},
        "etp 2 cannot cut the experts' moe_ffn_hidden_size 15 into 2 equal parts|14 or 16",
        {"moe_ffn_hidden_size": 16},
        layout={"etp": 2, "dp": 2},
    ),
    "the width of shared experts": Case(
        {**EXPERTS, "moe_shared_expert_intermediate_size": 15},
        "tp 2 cannot cut moe_shared_expert_intermediate_size 15 into 2 equal parts|14 or 16",
        {"moe_shared_expert_intermediate_size": 14},
        layout={"tp": 2},
    ),
    "biases of experts": Case(
        {**EXPERTS, "hidden_size": 25, "kv_channels": 6},
        "etp 2 cannot cut the experts' hidden_size 25 into 2 equal parts|hidden_size 24 or 26",
        {"hidden_size": 26},
        layout={"etp": 2, "dp": 2},
    ),
    "multi-token prediction": Case(
        {"mtp_num_layers": 1, "hidden_size": 25, "kv_channels": 6},
        "tp 2 cannot cut the outputs of eh_proj, hidden_size 25 into 2 equal parts|24 or 26",
        {"hidden_size": 24},
        layout={"tp": 2},
    ),
    "heads of one layer": Case(
        blocks('{"attention": {"num_attention_heads": 3, "kv_channels": 6}}')
        | {"num_query_groups": 0},
        "layer 0, attention: num_attention_heads 3 is not a multiple of num_query_groups 4|"
        "use num_query_groups 3",
        blocks('{"attention": {"num_attention_heads": 3, "num_query_groups": 3}}'),
    ),
    "layers": Case(
        {"num_layers": 5},
        "5 layers cannot be split evenly over 2 stages: use 4 or 6 layers",
        {"num_layers": 6},
        layout={"pp": 2},
    ),
    "layers of chunks": Case(
        {},
        "4 layers cannot be split evenly over 2 ranks x 3 chunks = 6 stages: use 6 layers",
        {"num_layers": 6},
        layout={"pp": 2, "vpp": 3},
    ),
    "no degree": Case(
        {},
        "tp=0 is not a degree: give a whole number >= 1",
        layout={"tp": 0},
        fixed_layout={"tp": 1},
    ),
    "chunks without a pipeline": Case(
        {},
        "vpp=2 needs pipeline parallelism, but pp=1; use at least 2 pipeline ranks",
        layout={"vpp": 2},
        fixed_layout={"vpp": 2, "pp": 2},
    ),
    "ranks": Case(
        EXPERTS,
        "world size 3 is not a multiple of etp 1 x ep 2 x pp 1 = 2: use 2 or 4 ranks",
        layout={"ep": 2, "dp": 3},
        fixed_layout={"ep": 2, "dp": 4},
    ),
    "two levels of context parallelism": Case(
        {},
        "hierarchical_cp=(2, 3) must be two sizes|whose product is cp=4, such as 2 2",
        layout={"cp": 4, "hierarchical_cp": (2, 3)},
        fixed_layout={"cp": 4, "hierarchical_cp": (2, 2)},
    ),
    "optimizer instances": Case(
        {},
        "dp_outer=3 does not divide dp 4 x cp 1 = 4 data-parallel ranks: use 2 or 4",
        layout={"dp": 4, "dp_outer": 3},
        fixed_layout={"dp": 4, "dp_outer": 2},
    ),
}

_RELATIVE: Mapping[str, Any] = {"position_embedding_type": "relative"}
_POSITIONS = "position_embedding_type 'relative'"
ENCODER_DECODERS = {
    "positions of another kind": Case(
        _RELATIVE,
        f"a model of kind 'gpt' does not support {_POSITIONS}; use 'learned_absolute'",
        {"position_embedding_type": "learned_absolute"},
    ),
    "buckets without biases": Case(
        {"relative_attention_num_buckets": 16},
        "relative_attention_num_buckets 16 has no effect with position_embedding_type|leave it out",
        {"relative_attention_num_buckets": None},
        kind="t5",
    ),
    "few buckets": Case(
        {**_RELATIVE, "relative_attention_num_buckets": 3},
        "relative_attention_num_buckets 3 leaves no bucket|use relative_attention_num_buckets 4",
        {"relative_attention_num_buckets": 4},
        kind="t5",
    ),
    "a short maximum": Case(
        {**_RELATIVE, "relative_attention_max_distance": 16},
        "relative_attention_max_distance 16 must be more than half of "
        "relative_attention_num_buckets 32; use relative_attention_max_distance 17 or more",
        {"relative_attention_max_distance": 17},
        kind="t5",
    ),
    "an output of two embeddings": Case(
        {"separate_decoder_embedding": True},
        "separate_decoder_embedding leaves open|set untie_embeddings_and_output_weights too",
        {"untie_embeddings_and_output_weights": True},
        kind="t5",
    ),
    "sinks": Case(
        {"softmax_type": "learnable"},
        "an encoder-decoder has no attention sinks: softmax_type learnable",
        {"softmax_type": "vanilla"},
        kind="t5",
    ),
    "norms of queries": Case(
        {"qk_layernorm": True},
        "an encoder-decoder does not support qk_layernorm; leave it out",
        {"qk_layernorm": None},
        kind="t5",
    ),
    "windows": Case(
        {"sliding_window": 4},
        "an encoder-decoder has no windows: sliding_window 4",
        {"sliding_window": 0},
        kind="t5",
    ),
    "context parallelism": Case(
        {},
        "cp 2 cannot cut the sequences of an encoder-decoder|use cp 1",
        layout={"cp": 2},
        fixed_layout={"cp": 1},
        kind="t5",
    ),
}

_MAMBA: Mapping[str, Any] = {
    "num_attention_heads": None,
    "ffn_hidden_size": None,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
}
_HYBRID: Mapping[str, Any] = {
    "hybrid_layer_pattern": "M*-M",
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
}
_PATTERN = "hybrid_layer_pattern"
RECURRENT = {
    "a width that heads do not divide": Case(
        {**_MAMBA, "mamba_head_dim": 36},
        "mamba_head_dim 36 does not divide 2 x hidden_size 24; use mamba_head_dim 24 or 48",
        {"mamba_head_dim": 24},
        kind="mamba",
    ),
    "groups that do not divide the heads": Case(
        {**_MAMBA, "mamba_num_groups": 4},
        "mamba_num_groups 4 does not divide mamba_num_heads 6; use mamba_num_groups 3",
        {"mamba_num_groups": 3},
        kind="mamba",
    ),
    "limits of time steps": Case(
        {**_MAMBA, "mamba_dt_min": 0.1, "mamba_dt_max": 0.1},
        "mamba_dt_max 0.1 is not above mamba_dt_min 0.1; use a larger value, or 0 for no limit",
        {"mamba_dt_max": 0.0},
        kind="mamba",
    ),
    "positions without attention": Case(
        {**_MAMBA, "position_embedding_type": "rope"},
        "position_embedding_type rope needs attention|use none",
        {"position_embedding_type": "none"},
        kind="mamba",
    ),
    "groups over tensor-parallel ranks": Case(
        _MAMBA,
        "tp 4 cannot cut mamba_num_groups 2 into 4 equal parts; use tp 2",
        layout={"tp": 4},
        fixed_layout={"tp": 2},
        kind="mamba",
    ),
    "groups over context-parallel ranks": Case(
        _MAMBA,
        "cp 2 cannot cut the 1 of mamba_num_groups 2 that tp 2 leaves on a rank; use cp 1",
        layout={"tp": 2, "cp": 2},
        fixed_layout={"tp": 2, "cp": 1},
        kind="mamba",
    ),
    "an unknown symbol": Case(
        {**_HYBRID, _PATTERN: "M*-X"},
        "hybrid_layer_pattern has the unknown symbol 'X'; use M (Mamba-2), |* (attention)",
        {_PATTERN: "M*-M"},
        kind="hybrid",
    ),
    "an empty stage": Case(
        {**_HYBRID, _PATTERN: "M*||-M"},
        "hybrid_layer_pattern has a pipeline stage without layers; put layers around each",
        {_PATTERN: "M*-M"},
        kind="hybrid",
    ),
    "a long pattern": Case(
        {**_HYBRID, _PATTERN: "M" * 200_000},
        "hybrid_layer_pattern has 200000 symbols; use at most 100000",
        kind="hybrid",
    ),
    "another number of layers": Case(
        {**_HYBRID, _PATTERN: "M*-"},
        "hybrid_layer_pattern has 3 layers, but num_layers is 4; use num_layers 3 or leave it out",
        {"num_layers": 3},
        kind="hybrid",
    ),
    "no layer of experts": Case(
        {**_HYBRID, "num_experts": 4},
        "hybrid_layer_pattern has no layer E, but num_experts is 4; use num_experts 0",
        {"num_experts": 0},
        kind="hybrid",
    ),
    "no experts for a layer": Case(
        {**_HYBRID, _PATTERN: "M*EM"},
        "hybrid_layer_pattern has a layer E, but num_experts is 0; use num_experts of at least 1",
        {"num_experts": 2},
        kind="hybrid",
    ),
    "another pattern of experts": Case(
        {**_HYBRID, _PATTERN: "M*EE", "num_experts": 4, "moe_layer_freq": "2"},
        "moe_layer_freq 2 has no effect with hybrid_layer_pattern, whose symbol E|leave it out",
        {"moe_layer_freq": None},
        kind="hybrid",
    ),
    "a field of a layer that is not there": Case(
        {**_HYBRID, _PATTERN: "**--", "mamba_num_groups": None, "mamba_head_dim": 8},
        "mamba_head_dim 8 has no effect without a layer M in hybrid_layer_pattern; leave it at 64",
        {"mamba_head_dim": 64},
        kind="hybrid",
    ),
    "stages of a pattern": Case(
        {**_HYBRID, _PATTERN: "M*|-M"},
        "hybrid_layer_pattern has 2 pipeline stages, but the layout has 4; use 3 times",
        layout={"pp": 4},
        fixed_layout={"pp": 2},
        kind="hybrid",
    ),
}
HEADS: Mapping[str, Case] = {
    "a width that a head does not have": Case(
        {"task_head": "reward", "num_labels": 3},
        "num_labels 3 does not fit task_head reward, whose width is 1|use task_head "
        "'classification'",
        {"task_head": "classification"},
    ),
    "a pooling that no head reads": Case(
        {"head_pooling": "mean"},
        "head_pooling mean has no effect without task_head; leave it out",
        {"head_pooling": None},
    ),
    "a norm of another head": Case(
        {"task_head": "regression", "normalize_embedding": False},
        "normalize_embedding has an effect only with task_head 'embedding', not 'regression'; "
        "leave it out",
        {"normalize_embedding": None},
    ),
    "later tokens of a head": Case(
        {"task_head": "classification", "mtp_num_layers": 1},
        "mtp_num_layers 1 needs logits of tokens, which a model with task_head classification does "
        "not have; leave mtp_num_layers out",
        {"mtp_num_layers": None},
    ),
}
ENCODERS: Mapping[str, Case] = {
    "an offset of other positions": Case(
        {**ROPE, "position_offset": 2},
        "position_offset 2 needs position_embedding_type 'learned_absolute', not 'rope'",
        {"position_embedding_type": "learned_absolute"},
        kind="bert",
    ),
    "an offset after all positions": Case(
        {"position_offset": 16},
        "position_offset 16 leaves no position of max_position_embeddings 16; use position_offset "
        "15 or less",
        {"position_offset": 15},
        kind="bert",
    ),
    "two poolers": Case(
        {"bert_pooler": True},
        "bert_pooler has no effect with a binary head, which has a pooler; leave it out",
        {"bert_pooler": None},
        kind="bert",
    ),
}

CASES: Mapping[str, Case] = {
    f"{group}: {name}": case
    for group, cases in {
        "types": TYPES,
        "attention": ATTENTION,
        "rotary": ROTARY,
        "variants": VARIANTS,
        "latents": LATENTS,
        "block": BLOCK,
        "router": ROUTER,
        "moe": MOE,
        "layers": LAYERS,
        "layout": LAYOUTS,
        "encoder-decoder": ENCODER_DECODERS,
        "recurrent": RECURRENT,
        "heads": HEADS,
        "encoders": ENCODERS,
    }.items()
    for name, case in cases.items()
}
