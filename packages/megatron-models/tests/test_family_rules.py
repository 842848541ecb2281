"""Rules of families of decoders by hand: which layers have what, and values that are refused."""

import math
import re
from dataclasses import replace

import pytest
from megatron_models import ConfigError

from .test_family_defaults import DEFAULTS, SIZES


def read(name, changes):
    module, given, _ = DEFAULTS[name]
    return module.FAMILY.config_from_hf({**given, **changes})


def write(name, changes, **fields):
    return DEFAULTS[name][0].FAMILY.config_to_hf(replace(read(name, changes), **fields))


READ = [
    ("deepseek_v3", {"first_k_dense_replace": 0}, {"moe_layers": (True,) * 6}),
    ("deepseek_v3", {"first_k_dense_replace": 5}, {"moe_layers": (False,) * 5 + (True,)}),
    ("deepseek_v2", {"first_k_dense_replace": 1}, {"moe_layers": (False,) + (True,) * 5}),
    ("deepseek_v3", {"num_nextn_predict_layers": 2}, {"mtp_num_layers": 2}),
    ("deepseek_v3", {"num_mtp_layers": 0}, {"mtp_num_layers": 0}),
    ("deepseek_v3", {"num_nextn_predict_layers": 2, "num_mtp_layers": 2}, {"mtp_num_layers": 2}),
    ("deepseek_v3", {"num_hidden_layers": 4}, {"mtp_num_layers": 1}),
    ("deepseek_v3", {"n_shared_experts": 3}, {"moe_shared_expert_intermediate_size": 6144}),
    ("deepseek_v3", {"q_lora_rank": None}, {"q_lora_rank": 0}),
    (
        "deepseek_v3",
        {"attention_bias": True},
        {"add_qkv_bias": True, "add_attention_out_bias": True},
    ),
    ("deepseek_v3", {"head_dim": 64, "qk_rope_head_dim": 64}, {"qk_pos_emb_head_dim": 64}),
    ("deepseek_v3", {"rms_norm_eps": 0.5}, {"norm_epsilon": 0.5, "latent_norm_epsilon": 1e-6}),
    ("deepseek_v3", {"norm_topk_prob": False}, {"normalizes_weights": False}),
    ("deepseek_v3", {"norm_topk_prob": None}, {"normalizes_weights": False}),
    ("deepseek_v3", {"num_experts_per_tok": 1}, {"normalizes_weights": True}),
    (
        "deepseek_v3",
        {"num_experts_per_tok": 1, "norm_topk_prob": False},
        {"normalizes_weights": False},
    ),
    ("deepseek_v3", {"n_group": 4, "topk_group": 4}, {"moe_router_num_groups": 0}),
    ("deepseek_v3", {"rope_interleave": False}, {"rotary_interleaved": False}),
    (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
        {"moe_router_num_groups": 8, "moe_router_group_topk": 3, "moe_router_group_score_topk": 1},
    ),
    (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 8},
        {"moe_router_num_groups": 0},
    ),
    ("deepseek_v2", {"topk_method": "greedy", "n_group": 8}, {"moe_router_num_groups": 0}),
    ("deepseek_v32", {"first_k_dense_replace": 1}, {"moe_layers": (False,) + (True,) * 5}),
    (
        "deepseek_v32",
        {"mlp_layer_types": ["sparse", "dense"] * 3},
        {"moe_layers": (True, False) * 3},
    ),
    ("llama4", {"interleave_moe_layer_step": 2}, {"moe_layers": (False, True) * 3}),
    ("llama4", {"moe_layers": [4, 0]}, {"moe_layers": (True,) + (False,) * 3 + (True, False)}),
    ("llama4", {"intermediate_size": 24}, {"moe_shared_expert_intermediate_size": 24}),
    ("llama4", {"attn_temperature_tuning": False}, {"attn_temperature_scale": 0.0}),
    ("llama4", {"attn_scale": 0}, {"attn_temperature_scale": 0.0}),
    ("llama4", {"attn_scale": 0.5, "floor_scale": 3}, {"attn_temperature_floor": 3}),
    (
        "llama4",
        {"no_rope_layers": [1] * 6},
        {"attn_temperature_scale": 0.0, "windowed_layers": (True,) * 6},
    ),
    (
        "llama4",
        {"no_rope_layers": [1, 0, 1, 1, 0, 1, 0]},
        {"unrotated_layers": (False, True, False, False, True, False)},
    ),
    ("llama4", {"no_rope_layers": []}, {"unrotated_layers": (False,) * 3 + (True,) + (False,) * 2}),
    (
        "llama4",
        {"no_rope_layer_interval": 1},
        {"unrotated_layers": (True,) * 6, "attention_chunk_size": 0},
    ),
    ("llama4", {"num_experts_per_tok": 2}, {"normalizes_weights": False}),
    ("llama4", {"use_qk_norm": False}, {"qk_l2_norm": False}),
    ("glm4", {"attention_bias": False}, {"add_qkv_bias": False}),
    *(
        (name, {"tie_word_embeddings": tied}, {"untie_embeddings_and_output_weights": not tied})
        for name in ("llama", "gemma2", "smollm3", "falcon", "gpt_neox", "gpt2")
        for tied in (False, True)
    ),
    ("falcon", {"bias": True}, {"add_bias_linear": True}),
    ("qwen3_moe", {"decoder_sparse_step": 2}, {"moe_layers": (False, True) * 3}),
    ("qwen3_moe", {"mlp_only_layers": [0, 5]}, {"moe_layers": (False, *(True,) * 4, False)}),
    ("qwen3_moe", {"num_local_experts": 16}, {"num_experts": 16}),
    ("qwen3_moe", {"num_experts": 16, "num_local_experts": 16}, {"num_experts": 16}),
    ("qwen3_moe", {"norm_topk_prob": True}, {"moe_router_pre_softmax": False}),
    (
        "qwen3_next",
        {"full_attention_interval": 2},
        {"linear_layers": (True, False) * 2, "mtp_num_layers": 1},
    ),
    ("qwen3_next", {"full_attention_interval": 3}, {"mtp_num_layers": 0}),
    ("qwen3_next", {"mlp_only_layers": [3]}, {"mtp_num_layers": 0}),
    ("qwen3_next", {"mlp_only_layers": [2]}, {"mtp_num_layers": 1}),
    ("qwen3_next", {"num_nextn_predict_layers": 0}, {"mtp_num_layers": 0}),
    (
        "qwen3_next",
        {"layer_types": ["full_attention", "linear_attention"] * 2},
        {"linear_layers": (False, True) * 2, "mtp_num_layers": 0},
    ),
    ("gemma2", {"query_pre_attn_scalar": 9}, {"softmax_scale": 1 / 3}),
    ("gemma2", {"attn_logit_softcapping": None}, {"attn_logit_softcapping": 0.0}),
    ("granite", {"attention_multiplier": 2}, {"softmax_scale": 2.0}),
    ("smollm3", {"no_rope_layer_interval": 2}, {"unrotated_layers": (False, True) * 3}),
    ("smollm3", {"no_rope_layer_interval": 1}, {"unrotated_layers": (True,) * 6}),
    ("smollm3", {"no_rope_layers": [0, 1] * 4}, {"no_rope_freq": "[1, 0, 1, 0, 1, 0]"}),
    ("smollm3", {"no_rope_layers": [1, 1, 0] * 2}, {"no_rope_freq": "3"}),
    ("smollm3", {"no_rope_layers": [1] * 6}, {"no_rope_freq": "0"}),
    (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 8},
        {"windowed_layers": (False,) * 3 + (True,) + (False,) * 2},
    ),
    (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 8, "no_rope_layers": [1, 0] * 3},
        {"windowed_layers": (False, True) * 3},
    ),
    (
        "gpt_oss",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling_type": "linear", "rope_scaling_factor": 2.0},
    ),
    ("gpt_oss", {"attention_bias": False}, {"has_qkv_bias": False, "has_mlp_bias": True}),
    ("gpt_oss", {"swiglu_limit": 3.0}, {"activation_func_clamp_value": 3.0}),
    ("gpt_neox", {"use_parallel_residual": False}, {"parallel_residual": "none"}),
    ("gpt_neox", {"partial_rotary_factor": 0.25, "rope_theta": 1e4}, {"rotary_percent": 0.25}),
    ("gpt_neox", {"rotary_pct": 0.5, "partial_rotary_factor": 0.5}, {"rotary_percent": 0.5}),
    (
        "gpt_neox",
        {"rope_parameters": {"rope_theta": 5e3}, "rope_theta": 5e3},
        {"rotary_base": 5e3},
    ),
    ("falcon", {"alibi": True}, {"position_embedding_type": "alibi", "scale_alibi": True}),
    ("falcon", {"ffn_hidden_size": None}, {"ffn_hidden_size": 4 * 4096}),
    ("falcon", {"multi_query": False}, {"num_query_groups": 32}),
    ("falcon", {"parallel_attn": False}, {"parallel_residual": "none", "num_query_groups": 1}),
    (
        "falcon",
        {"num_kv_heads": 4},
        {"num_query_groups": 1},
    ),  # multi-query, in which it is not read
    (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 4},
        {"num_query_groups": 4, "parallel_residual": "two_norms"},
    ),
    (
        "falcon",
        {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
        {"num_query_groups": 32, "parallel_residual": "shared_norm"},
    ),
]


@pytest.mark.parametrize(("name", "changes", "expected"), READ)
def test_a_field_of_a_file_is_read_as_its_class_reads_it(name, changes, expected):
    config = read(name, changes)
    assert {field: getattr(config, field) for field in expected} == expected
    family = DEFAULTS[name][0].FAMILY
    assert family.config_from_hf(family.config_to_hf(config)) == config


REFUSED = [
    ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
    ("deepseek_v3", {"first_k_dense_replace": True}, "first_k_dense_replace = True"),
    ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts = 0"),
    (
        "deepseek_v3",
        {"num_nextn_predict_layers": 2, "num_mtp_layers": 1},
        "num_mtp_layers = 1 are not supported, only 2",
    ),
    ("deepseek_v3", {"num_key_value_heads": 64}, "num_key_value_heads = 64"),
    ("deepseek_v3", {"num_attention_heads": 64}, "num_key_value_heads = 128"),
    ("deepseek_v3", {"attention_bias": "no"}, "attention_bias = 'no'"),
    ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank = 0"),
    ("deepseek_v3", {"head_dim": 32}, "head_dim = 32 are not supported, only 64"),
    ("deepseek_v3", {"norm_topk_prob": "yes"}, "norm_topk_prob = 'yes'"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "topk_group": 3}, "n_group = None"),
    ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank = None"),
    ("deepseek_v32", {"layer_types": ["full_attention"] * 6}, "layer_types = ['full_attention'"),
    ("deepseek_v32", {"mlp_layer_types": ["sparse"] * 5}, "mlp_layer_types = ['sparse'"),
    ("deepseek_v32", {"mlp_layer_types": ["thin"] * 6}, "give 'sparse' or 'dense' for each layer"),
    ("deepseek_v32", {"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
    ("llama4", {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step = 0"),
    ("llama4", {"interleave_moe_layer_step": 7}, "moe_layers = [] have no experts"),
    ("llama4", {"moe_layers": [True]}, "moe_layers = [True]"),
    ("llama4", {"attn_temperature_tuning": "x"}, "attn_temperature_tuning = 'x'"),
    ("llama4", {"attn_scale": -0.1}, "attn_scale = -0.1"),
    ("llama4", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers = [1, 0, 1]"),
    ("llama4", {"no_rope_layer_interval": 0}, "no_rope_layer_interval = 0"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
    ("qwen3_moe", {"decoder_sparse_step": 7}, "decoder_sparse_step = 7 have no experts"),
    ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers = 3"),
    ("qwen3_moe", {"mlp_only_layers": ["3"]}, "mlp_only_layers = ['3']"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts = 0"),
    (
        "qwen3_moe",
        {"num_experts": 4, "num_local_experts": 8},
        "num_experts = 4 and num_local_experts = 8",
    ),
    ("qwen3_next", {"full_attention_interval": 0}, "full_attention_interval = 0"),
    ("qwen3_next", {"full_attention_interval": 1}, "have no linear attention"),
    ("qwen3_next", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2"),
    ("qwen3_next", {"num_nextn_predict_layers": True}, "num_nextn_predict_layers = True"),
    ("qwen3_next", {"layer_types": ["linear_attention"] * 3}, "layer_types = ['linear_attention'"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0"),
    ("gemma2", {"query_pre_attn_scalar": math.inf}, "query_pre_attn_scalar = inf"),
    ("gemma2", {"query_pre_attn_scalar": 10**400}, "a value has the wrong type or size"),
    ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping = -1.0"),
    ("gemma2", {"hidden_size": True}, "hidden_size = True"),
    ("granite", {"attention_multiplier": 0}, "attention_multiplier = 0"),
    ("granite", {"attention_multiplier": math.inf}, "attention_multiplier = inf"),
    ("smollm3", {"no_rope_layers": [1, 2, 1, 1, 1, 1]}, "no_rope_layers = [1, 2, 1"),
    ("smollm3", {"no_rope_layers": [1] * 5}, "no_rope_layers = [1, 1, 1, 1, 1]"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval = 0"),
    ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit = 0"),
    ("gpt_oss", {"swiglu_limit": None}, "swiglu_limit = None"),
    ("gpt_oss", {"attention_bias": "no"}, "attention_bias = 'no'"),
    ("gpt_neox", {"rope_theta": 5e3}, "rope_theta = 5000.0 are not supported, only 10000.0"),
    ("gpt_neox", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ("gpt_neox", {"attention_bias": None}, "attention_bias = None"),
    ("falcon", {"multi_query": 1}, "multi_query = 1"),
    ("falcon", {"alibi": "yes"}, "alibi = 'yes'"),
    (
        "falcon",
        {"new_decoder_architecture": True, "parallel_attn": False},
        "new_decoder_architecture and parallel_attn = False",
    ),
    ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn = 2"),
    (
        "falcon",
        {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3},
        "num_ln_in_parallel_attn = 3 are not supported, only None or 1 or 2",
    ),
    ("falcon", {"multi_query": False, "num_kv_heads": 4}, "num_kv_heads = 4"),
]


@pytest.mark.parametrize(("name", "changes", "words"), REFUSED)
def test_what_a_class_does_not_compute_so_is_refused(name, changes, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        read(name, changes)


WRITTEN = [
    ("deepseek_v3", {}, {}, {"first_k_dense_replace": 3, "n_shared_experts": 1, "n_group": 8}),
    ("deepseek_v3", {"n_group": 1, "topk_group": 1}, {}, {"n_group": 1, "topk_group": 1}),
    ("deepseek_v2", {}, {}, {"topk_method": "greedy", "n_group": None, "topk_group": None}),
    ("deepseek_v32", {}, {}, {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 3}),
    ("llama4", {"moe_layers": [1, 4]}, {}, {"moe_layers": [1, 4]}),
    ("llama4", {"attn_scale": 0}, {}, {"attn_temperature_tuning": False, "attn_scale": 0.0}),
    ("qwen3_moe", {"mlp_only_layers": [2]}, {}, {"mlp_only_layers": [2], "decoder_sparse_step": 1}),
    ("gemma2", {"query_pre_attn_scalar": 144}, {}, {"query_pre_attn_scalar": 144}),
    ("gemma2", {"query_pre_attn_scalar": 1}, {}, {"query_pre_attn_scalar": 1}),
    ("gemma2", {}, {"softmax_scale": 0.0}, {"query_pre_attn_scalar": 256}),
    ("granite", {}, {"softmax_scale": 0.0}, {"attention_multiplier": 128**-0.5}),
    ("smollm3", {}, {}, {"no_rope_layers": [1, 1, 1, 0, 1, 1]}),
    ("gpt_oss", {}, {"rope_scaling_type": "none"}, {"rope_scaling": {"rope_type": "default"}}),
    ("falcon", {}, {}, {"new_decoder_architecture": False, "num_ln_in_parallel_attn": 1}),
    (
        "falcon",
        {},
        {"num_query_groups": 4},
        {"new_decoder_architecture": True, "multi_query": False, "num_ln_in_parallel_attn": 1},
    ),
    (
        "falcon",
        {},
        {"parallel_residual": "two_norms"},
        {"new_decoder_architecture": True, "multi_query": True, "num_ln_in_parallel_attn": 2},
    ),
    (
        "falcon",
        {"parallel_attn": False},
        {},
        {"parallel_attn": False, "num_ln_in_parallel_attn": None},
    ),
]


@pytest.mark.parametrize(("name", "changes", "fields", "expected"), WRITTEN)
def test_a_model_is_written_as_its_class_reads_it(name, changes, fields, expected):
    assert expected.items() <= write(name, changes, **fields).items()


NOT_WRITTEN = [
    ("deepseek_v3", {"moe_layer_freq": "[1,0,1,1,1,1]"}, "moe_layers = (True, True, True"),
    ("deepseek_v3", {"moe_router_group_score_topk": 1}, "moe_router_group_score_topk = 2, this on"),
    (
        "deepseek_v3",
        {"latent_norm_epsilon": 1e-5},
        "latent_norm_epsilon = 1e-06, this one has 1e-05",
    ),
    ("deepseek_v3", {"add_qkv_bias": True}, "add_qkv_bias = False, this one has True"),
    (
        "deepseek_v3",
        {"moe_shared_expert_intermediate_size": 2049},
        "moe_shared_expert_intermediate_size = a multiple of 2048, this one has 2049",
    ),
    (
        "deepseek_v3",
        {"moe_shared_expert_intermediate_size": 0},
        "moe_shared_expert_intermediate_size = a multiple of 2048, this one has 0",
    ),
    ("deepseek_v32", {"q_lora_rank": 0}, "q_lora_rank = a number above 0, this one has 0"),
    (
        "llama4",
        {"moe_shared_expert_intermediate_size": 16},
        "shared_expert_intermediate_size = 8192",
    ),
    (
        "llama4",
        {"moe_router_norm_topk_prob": "yes"},
        "normalizes_weights = False, this one has True",
    ),
    ("qwen3_next", {"mtp_num_layers": 2}, "mtp_num_layers = 0 or 1, this one has 2"),
    ("qwen3_next", {"linear_attention_freq": "[0,1,1,1]"}, "mtp_num_layers = 0, this one has 1"),
    ("qwen3_next", {"moe_layer_freq": "[1,1,1,0]"}, "mtp_num_layers = 0, this one has 1"),
    ("gemma2", {"softmax_scale": 0.3}, "softmax_scale = 1 / sqrt(n) with a whole number n"),
    ("gemma2", {"softmax_scale": 2.0}, "softmax_scale = 1 / sqrt(n) with a whole number n"),
    ("gemma2", {"embedding_multiplier": 63.0}, "embedding_multiplier = 64.0, this one has 63.0"),
    ("gpt_oss", {"activation_func_clamp_value": 0.0}, "activation_func_clamp_value = a number abo"),
    ("gpt_oss", {"add_bias_linear": False}, "has_mlp_bias = True, this one has False"),
    (
        "gpt_oss",
        {"add_bias_linear": False, "add_mlp_bias": True, "add_qkv_bias": True},
        "has_attention_out_bias = True, this one has False",
    ),
    (
        "falcon",
        {"parallel_residual": "none", "num_query_groups": 4},
        "num_query_groups = 1 or 32 without parallel_residual, this one has 4",
    ),
    ("falcon", {"position_embedding_type": "none"}, "position_embedding_type = 'rope' or 'alibi'"),
    ("falcon", {"position_embedding_type": "alibi"}, "scale_alibi = True, this one has False"),
    ("qwen3", {"add_qkv_bias": True}, "has_qkv_bias = False, this one has True"),
    ("qwen3", {"add_mlp_bias": True}, "has_mlp_bias = False, this one has True"),
]


@pytest.mark.parametrize(("name", "fields", "words"), NOT_WRITTEN)
def test_a_model_that_its_class_does_not_compute_is_not_written(name, fields, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        write(name, {}, **fields)


GROUPED = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "gpt_oss",
    "llama4",
)
TIED = {"tie_word_embeddings": None}
NULL = [
    *((name, {"num_key_value_heads": None}, {"num_query_groups": 32}) for name in GROUPED),
    *((name, {"head_dim": None}, {"kv_channels": 128}) for name in ("llama", "gpt_oss", "llama4")),
    *(
        (name, TIED, {"untie_embeddings_and_output_weights": True})
        for name in ("llama", "smollm3", "deepseek_v2")
    ),
    ("deepseek_v3", {"rope_interleave": None}, {"rotary_interleaved": False}),
    *(
        (name, {"norm_topk_prob": None}, {"moe_router_pre_softmax": True})
        for name in ("qwen3_moe", "qwen3_next")
    ),
]


@pytest.mark.parametrize(("name", "changes", "expected"), NULL)
def test_null_is_a_size_that_is_derived_or_a_switch_that_is_off(name, changes, expected):
    config = read(name, changes)
    assert {field: getattr(config, field) for field in expected} == expected


@pytest.mark.parametrize(
    ("name", "field", "start"),
    [
        ("deepseek_v32", "moe_layer_freq", "[0, 0, 0, 1, 1, "),
        ("llama4", "moe_layer_freq", "[0, 1, 0, 1, "),
        ("llama4", "attn_temperature_scale", "0.1"),
        ("qwen3_moe", "moe_layer_freq", "[0, 1, 0, 1, "),
        ("qwen3_next", "linear_attention_freq", "[1, 1, 1, 0, 1, "),
    ],
)
def test_rules_hold_for_the_largest_number_of_layers(name, field, start):
    (rule,) = (each for each in DEFAULTS[name][0].FAMILY.custom if field in each.fields)
    step = dict.fromkeys(("interleave_moe_layer_step", "decoder_sparse_step"), 2)
    found = rule.read("T", {"num_hidden_layers": 100_000, **step})
    assert str(found[field]).startswith(start)
    assert rule.read("T", {"num_hidden_layers": 100_001, **step}) == {}  # refused elsewhere


def test_windows_of_the_largest_number_of_layers_are_read():
    config = read("gemma2", {"num_hidden_layers": 100_000})
    assert config.windowed_layers[:3] == (True, False, True) and config.sliding_window == 4096
    with pytest.raises(ConfigError, match="num_layers is 100001, more than 100000"):
        read("gemma2", {"num_hidden_layers": 100_001})


def test_a_refused_field_does_not_hide_those_of_later_rules():
    with pytest.raises(ConfigError, match=r"hidden_size = True.*final_logit_softcapping = -1\.0"):
        read("gemma2", {"hidden_size": True, "final_logit_softcapping": -1.0})
    given = {k: v for k, v in SIZES.items() if k != "hidden_size"}
    with pytest.raises(ConfigError, match=r"lacks 'hidden_size'.*final_logit_softcapping = -1\.0"):
        DEFAULTS["gemma2"][0].FAMILY.config_from_hf({**given, "final_logit_softcapping": -1.0})
    with pytest.raises(ConfigError) as caught:
        read("qwen3_next", {"mlp_only_layers": 3})
    assert "mlp_only_layers = 3" in str(caught.value) and "wrong type" not in str(caught.value)
