import re
from dataclasses import fields, replace
from importlib.metadata import entry_points

import pytest
from megatron_models.errors import ConfigError
from megatron_models.families.neutral import NEUTRAL, WINDOWS, WITHOUT_EFFECT
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.families import gpt2, llama, mixtral
from megatron_models.parameters import parameter_shapes

NO_EFFECT = {each.name for each in fields(GPTConfig) if each.metadata.get("no_effect")}
OPERATIONS = {
    "transpose": set(),
    "concat": {"dim", "sizes"},
    "reshape": {"shape", "source"},
    "interleave_qkv": {"heads", "groups", "head_dim", "parts"},
    "stack": {"dim"},
    "rope_permute": {"heads", "head_dim"},
    "slice_rows": {"rows"},
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 3,
    "n_embd": 24,
    "n_head": 4,
    "n_inner": 40,
    "n_positions": 16,
    "vocab_size": 61,
    "layer_norm_epsilon": 1e-6,
    "activation_function": "gelu_new",
    "initializer_range": 0.01,
    "tie_word_embeddings": True,
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "vocab_size": 61,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.01,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
}
MIXTRAL = {k: v for k, v in LLAMA.items() if k not in ("attention_bias", "mlp_bias")} | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
ROTARY_SWIGLU = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
}
CASES = [
    (gpt2.FAMILY, GPT2),
    (gpt2.FAMILY, GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu"}),
    (llama.FAMILY, LLAMA),
    (llama.FAMILY, LLAMA | {"tie_word_embeddings": True, "rope_scaling": None}),
    (llama.FAMILY, LLAMA | {"attention_bias": True, "mlp_bias": True}),
    (llama.FAMILY, LLAMA | {"attention_bias": True}),
    (llama.FAMILY, LLAMA | {"mlp_bias": True}),
    (llama.FAMILY, LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    (mixtral.FAMILY, MIXTRAL),
    (mixtral.FAMILY, MIXTRAL | {"num_experts_per_tok": 1}),
]


def expand(row, config):
    """Returns our names in a row, like megatron-ckpt."""
    pattern, where = row[0], row[3] if len(row) == 4 else {}
    assert where.keys() <= {"if"}
    if where and not getattr(config, where["if"].removeprefix("$")):
        return []
    if "{i}" not in pattern:
        return [pattern]
    return [pattern.replace("{i}", str(index)) for index in range(config.num_layers)]


def test_families_are_found_by_their_entry_points():
    found = {entry.name: entry.load() for entry in entry_points(group="megatron.families")}
    assert found["gpt2"] is gpt2.FAMILY
    assert found["llama"] is llama.FAMILY
    assert found["mixtral"] is mixtral.FAMILY


@pytest.mark.parametrize("changes", [{}, {"num_experts": 4}])
def test_every_family_names_what_it_cannot_express(changes, small):
    config = small(**changes, softmax_type="learnable")
    for entry in entry_points(group="megatron.families"):
        family = entry.load()
        if family.kind == "gpt" and "softmax_type" not in family.settings:
            assert any("softmax_type" in found for found in family.differences(config)), entry.name


@pytest.mark.parametrize(("family", "theirs"), CASES)
def test_rows_cover_every_parameter_exactly_once(family, theirs):
    config = family.config_from_hf(theirs)
    names = [name for row in family.active_rows(config) for name in expand(row, config)]
    assert sorted(names) == sorted(parameter_shapes(config))


@pytest.mark.parametrize("family", [gpt2.FAMILY, llama.FAMILY, mixtral.FAMILY])
def test_rows_use_only_the_closed_list_of_operations_and_existing_fields(family, small):
    config = small()
    for ours, theirs, operations, *where in family.rows:
        assert theirs
        for name in (each["if"] for each in where if each):
            assert isinstance(getattr(config, name.removeprefix("$")), bool)
        assert all(("{i}" in name) == ("{i}" in ours) for name in theirs)
        for name, arguments in operations:
            assert set(arguments) <= OPERATIONS[name]
            for value in arguments.values():
                if isinstance(value, str):
                    assert re.fullmatch(r"\$\w+", value)
                    assert isinstance(getattr(config, value[1:]), int)


@pytest.mark.parametrize(("family", "theirs"), CASES)
def test_configuration_round_trip(family, theirs):
    config = family.config_from_hf(theirs)
    back = family.config_to_hf(config)
    assert {key: back[key] for key in theirs} == theirs
    assert family.config_from_hf(back) == config


def test_rotary_settings_in_both_formats_may_have_the_base_in_one():
    older = LLAMA["rope_scaling"]
    for both in (
        {"rope_parameters": older | {"rope_theta": 5e5}, "rope_scaling": older},
        {"rope_parameters": older, "rope_scaling": older | {"rope_theta": 5e5}},
    ):
        bare = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
        assert llama.FAMILY.config_from_hf(bare | both) == llama.FAMILY.config_from_hf(LLAMA)
        with pytest.raises(ConfigError, match=r"rope_theta is 10000.0 and 500000.0"):
            llama.FAMILY.config_from_hf(LLAMA | both | {"rope_theta": 1e4})
        with pytest.raises(ConfigError, match="not one map"):
            llama.FAMILY.config_from_hf(bare | both | {"rope_scaling": older | {"factor": 2.0}})


def test_a_given_attention_factor_of_yarn_takes_precedence_over_magnitudes():
    fixed = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3}
    scaling = fixed | {"mscale": 0.7, "mscale_all_dim": 0.4}
    config = llama.FAMILY.config_from_hf(LLAMA | {"rope_scaling": scaling})
    assert config == llama.FAMILY.config_from_hf(LLAMA | {"rope_scaling": fixed})
    assert llama.FAMILY.config_from_hf(llama.FAMILY.config_to_hf(config)) == config


def test_rope_parameters_of_transformers_5_are_read_too():
    parameters = LLAMA["rope_scaling"] | {"rope_theta": 500000.0}
    newer = {k: v for k, v in LLAMA.items() if not k.startswith("rope")}
    newer["rope_parameters"] = parameters
    assert llama.FAMILY.config_from_hf(newer) == llama.FAMILY.config_from_hf(LLAMA)


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        (gpt2.FAMILY, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (gpt2.FAMILY, {"activation_function": "mish"}, "mish"),
        (gpt2.FAMILY, {"n_layer": None}, "n_layer"),
        (llama.FAMILY, {"hidden_act": "gelu"}, "hidden_act"),
        (llama.FAMILY, {"rope_scaling": {"rope_type": "axial", "factor": 4.0}}, "axial"),
        (llama.FAMILY, {"rope_scaling": {"rope_type": "llama3"}}, "factor"),
        (llama.FAMILY, {"num_key_value_heads": 3}, "num_query_groups 3"),
        (mixtral.FAMILY, {"sliding_window": 0}, "sliding_window = 0"),
        (mixtral.FAMILY, {"num_local_experts": None}, "num_local_experts"),
    ],
)
def test_an_unsupported_foreign_model_is_refused_by_name(family, change, words):
    known = {"gpt2": GPT2, "llama": LLAMA, "mixtral": MIXTRAL}
    theirs = known[family.name] | change
    with pytest.raises(ConfigError, match=words):
        family.config_from_hf(theirs)


SOFTCAP = "has attn_logit_softcapping = 0.0, this one has 50.0; it cannot be exported"


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        (gpt2.FAMILY, {"position_embedding_type": "rope"}, "position_embedding_type"),
        (gpt2.FAMILY, {"num_query_groups": 2}, "num_query_groups"),
        (gpt2.FAMILY, {"kv_channels": 12}, "kv_channels"),
        (gpt2.FAMILY, {"activation": "swiglu"}, "swiglu"),
        (llama.FAMILY, {}, "position_embedding_type"),
        (llama.FAMILY, {}, "this one has 'gelu'; it cannot be exported to that family"),
        (llama.FAMILY, ROTARY_SWIGLU | {"num_experts": 4}, "num_experts = 0, this one has 4"),
        (llama.FAMILY, ROTARY_SWIGLU | {"softmax_type": "learnable"}, "softmax_type"),
        (llama.FAMILY, ROTARY_SWIGLU | {"attn_logit_softcapping": 50.0}, SOFTCAP),
        (gpt2.FAMILY, {"attn_logit_softcapping": 50.0}, SOFTCAP),
        (
            mixtral.FAMILY,
            ROTARY_SWIGLU
            | {"add_bias_linear": False, "num_experts": 4, "attn_logit_softcapping": 50.0},
            SOFTCAP,
        ),
        (mixtral.FAMILY, {}, "moe_layers"),
        (mixtral.FAMILY, {"num_experts": 4, "moe_layer_freq": "2"}, "moe_layers"),
    ],
)
def test_a_model_that_the_family_cannot_express_is_not_exported(small, family, changes, words):
    with pytest.raises(ConfigError, match=words):
        family.config_to_hf(small(**changes))


def test_a_message_shows_three_of_the_fields_that_a_family_cannot_express():
    config = llama.FAMILY.config_from_hf(LLAMA)
    changes = {"attn_logit_softcapping": 1.0, "softmax_scale": 0.5, "norm_placement": "post"}
    with pytest.raises(ConfigError, match=r"; norm_placement = .*'post'; it cannot be exported"):
        llama.FAMILY.config_to_hf(replace(config, **changes))
    with pytest.raises(ConfigError, match="; and 1 more; it cannot be exported") as caught:
        llama.FAMILY.config_to_hf(replace(config, **changes, residual_multiplier=0.5))
    assert str(caught.value).count(", this one has ") == 3


def test_names_of_experts_are_expanded(small):
    config = small(num_experts=3, untie_embeddings_and_output_weights=True)
    rows = {ours: theirs for ours, theirs, *_ in mixtral.FAMILY.active_rows(config)}
    block = "model.layers.{i}.block_sparse_moe.experts."
    assert rows["layers.{i}.mlp.experts.up.weight"] == tuple(
        f"{block}{e}.{part}.weight" for e in range(3) for part in ("w1", "w3")
    )


@pytest.mark.parametrize(
    ("family", "values", "words"),
    [
        (llama, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (llama, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config = {'quant"),
        (llama, {"residual_multiplier": 0.22}, "residual_multiplier = 0.22"),
        (llama, {"embedding_multiplier": 12.0}, "embedding_multiplier = 12.0"),
        (llama, {"attention_multiplier": 0.0078}, "attention_multiplier = 0.0078"),
        (llama, {"logits_scaling": 8.0}, "logits_scaling = 8.0"),
        (llama, {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        (llama, {"sliding_window": 15}, "only None or at least max_position_embeddings = 16"),
        (llama, {"sliding_window": "16"}, "sliding_window = '16'"),
        (llama, {"attention_chunk_size": 8}, "attention_chunk_size = 8"),
        (llama, {"use_sliding_window": True}, "use_sliding_window = True and no sliding_window"),
        (gpt2, {"sliding_window": 15}, "only None or at least n_positions = 16"),
        (llama, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = ['full"),
        (llama, {"pretraining_tp": 2}, "pretraining_tp = 2"),
        (llama, {"rope_scaling": {"rope_type": "axial", "factor": 4.0}}, "type 'axial'"),
        (llama, {"rope_scaling": {"rope_type": ["yarn"]}}, "type ['yarn']"),
        (
            llama,
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0}},
            "attention_factor = 0",
        ),
        (
            llama,
            {"rope_scaling": {"rope_type": "longrope", "short_factor": 2, "long_factor": [1.0]}},
            "short_factor of the rotary settings is 2, not a list",
        ),
        (
            llama,
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "'partial_rotary_factor' = 0.5",
        ),
        (
            llama,
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 2}},
            "'mscale' = 2",
        ),
        (llama, {"rope_parameters": {"rope_theta": 1e4}}, "rope_theta is 500000.0 and 10000.0"),
        (llama, {"rope_scaling": [3]}, "rotary settings are [[3]], not one map"),
        (llama, {"field_of_a_fork": 1.5}, "'field_of_a_fork' = 1.5 are not supported: the family"),
        (llama, {"field_of_a_fork": False}, "'field_of_a_fork' = False are not supported: the"),
        (llama, {"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false'"),
        (llama, {"attention_bias": "no"}, "attention_bias = 'no'"),
        (llama, {"model_type": "gemma"}, "model_type = 'gemma' are not supported, only 'llama'"),
        (llama, {"auto_map": {"AutoModel": "m.M"}}, "auto_map = {'AutoModel': 'm.M'}"),
        (gpt2, {"field_of_a_fork": []}, "'field_of_a_fork' = [] are not supported: the family"),
        (mixtral, {"norm_topk_prob": False}, "norm_topk_prob = False"),
        (mixtral, {"mlp_bias": True}, "mlp_bias = True"),
        (mixtral, {"routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5"),
        (mixtral, {"residual_multiplier": 0.5}, "residual_multiplier = 0.5"),
        (gpt2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        (gpt2, {"rope_scaling": {"factor": 2.0}}, "rope_scaling = {'factor': 2.0}"),
        (gpt2, {"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}"),
    ],
)
def test_settings_that_change_the_computation_are_refused(family, values, words):
    base = {llama: LLAMA, mixtral: MIXTRAL, gpt2: GPT2}[family]
    if "rope_parameters" in values:
        base = {**base, "rope_scaling": None}
    with pytest.raises(ConfigError, match=re.escape(words)):
        family.FAMILY.config_from_hf({**base, **values})


@pytest.mark.parametrize("family", [gpt2, llama, mixtral])
def test_settings_without_effect_are_accepted(family):
    base = {llama: LLAMA, mixtral: MIXTRAL, gpt2: GPT2}[family]
    plain = family.FAMILY.config_from_hf(base)
    for key, choices in NEUTRAL.items():
        for value in choices:
            assert family.FAMILY.config_from_hf({**base, key: value}) == plain
    for key in (*WITHOUT_EFFECT, *family.FAMILY.without_effect):
        assert family.FAMILY.config_from_hf({**base, key: 3}) == plain
    more = {"layer_types": ["full_attention"] * 3, "field_of_a_fork": None}
    assert family.FAMILY.config_from_hf({**base, **more}) == plain


def test_neutral_values_switch_a_setting_off():
    """Factors of 1, counts of 0, lists of nothing, and switches; transformers computes the rest."""
    factors = {"embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"}
    factors |= {"lm_head_multiplier", "scale_emb", "mup_width_multiplier"}
    factors |= {"partial_rotary_factor", "rotary_pct"}
    others = {"pruned_heads": [{}, []], "no_rope_layers": [[]], "is_causal": [True]}
    others |= {key: [1, 1.0] for key in factors}
    others |= {key: [0] for key in ("num_nextn_predict_layers", "num_kv_shared_layers")}
    for name, values in NEUTRAL.items():
        found = [(type(value), value) for value in values]
        switch = [(bool, False)] if name not in others and len(values) > 1 else []
        given = [(type(value), value) for value in others.get(name, [])]
        assert found == [(type(None), None), *switch, *given], name
    assert others.keys() < NEUTRAL.keys()


@pytest.mark.parametrize("family", [gpt2, llama])
def test_a_window_as_long_as_the_positions_is_accepted(family):
    base = {llama: LLAMA, gpt2: GPT2}[family]
    plain = family.FAMILY.config_from_hf(base)
    for name, kind in WINDOWS.items():
        for window in (16, 4096):
            more = {name: window, "layer_types": ["full_attention", kind, kind]}
            assert family.FAMILY.config_from_hf({**base, **more}) == plain
    both = {"sliding_window": 16, "use_sliding_window": True}
    assert family.FAMILY.config_from_hf({**base, **both}) == plain


def test_training_settings_of_mixtral_are_accepted():
    theirs = MIXTRAL | {"router_jitter_noise": 0.1, "router_aux_loss_coef": 0.02}
    assert mixtral.FAMILY.config_from_hf(theirs) == mixtral.FAMILY.config_from_hf(MIXTRAL)


@pytest.mark.parametrize("given", ["add_qkv_bias", "add_attention_out_bias"])
def test_a_llama_has_biases_on_both_sides_of_attention_or_on_none(given):
    config = replace(llama.FAMILY.config_from_hf(LLAMA), **{given: True})
    with pytest.raises(ConfigError, match="has_qkv_bias"):
        llama.FAMILY.config_to_hf(config)
