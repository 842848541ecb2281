"""Wrong configurations of attention."""

from refusals.cases.case import LATENT, LINEAR, ROPE, TEMPERATURE, Case

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
        {"qk_layernorm_scope": None},
    ),
    "a norm of projections with LayerNorm": Case(
        {"qk_layernorm": True, "qk_layernorm_scope": "projection"},
        "qk_layernorm_scope projection needs normalization 'RMSNorm', not 'LayerNorm'",
        {"normalization": "RMSNorm"},
    ),
    "two norms of heads": Case(
        {**ROPE, "qk_l2_norm": True, "qk_layernorm": True},
        "qk_l2_norm and qk_layernorm exclude each other; choose one",
        {"qk_l2_norm": None},
    ),
    "an L2 norm without rotation": Case(
        {"qk_l2_norm": True},
        "qk_l2_norm needs rotary positions, not position_embedding_type learned_absolute",
        ROPE,
    ),
    "scaled biases without biases": Case(
        {"scale_alibi": True},
        "scale_alibi has no effect with position_embedding_type learned_absolute; leave it out",
        {"scale_alibi": None},
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
        {"window_attn_skip_freq": None},
    ),
    "chunks in no layer": Case(
        {"window_attn_skip_freq": "[0]*4", "attention_chunk_size": 4},
        "[0]*4 leaves no layer with attention_chunk_size 4; set attention_chunk_size to 0",
        {"window_attn_skip_freq": None},
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
        {"attn_temperature_floor": None},
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
    "an epsilon of norms that latents do not have": Case(
        {**LATENT, "latent_norm_epsilon": 1e-6},
        "latent_norm_epsilon 1e-06 has no effect without qk_layernorm; leave it at 0",
        {"latent_norm_epsilon": 0.0},
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
