"""Files of encoders, encoder-decoders and recurrent models: absent fields, rules and refusals."""

import re
from dataclasses import replace

import pytest
from megatron_models import ConfigError
from megatron_models.models.bert.families import bert, minilm, roberta
from megatron_models.models.encoder_decoder.families import t5
from megatron_models.models.hybrid.families import nemotron_h
from megatron_models.models.mamba.families import mamba2

TRUNK = {
    "num_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "ffn_hidden_size": 3072,
    "max_position_embeddings": 512,
    "norm_epsilon": 1e-12,
    "activation": "gelu",
    "num_tokentypes": 2,
    "init_method_std": 0.02,
}
DEFAULTS = {
    "bert": (
        bert,
        {"architectures": ["BertForMaskedLM"]},
        {**TRUNK, "vocab_size": 30522, "position_offset": 0},
    ),
    "minilm": (minilm, {"architectures": ["BertModel"]}, {**TRUNK, "vocab_size": 30522}),
    "roberta": (
        roberta,
        {"architectures": ["RobertaForSequenceClassification"]},
        {**TRUNK, "vocab_size": 50265, "position_offset": 2, "num_labels": 2},
    ),
    "t5": (
        t5,
        {},
        {
            "hidden_size": 512,
            "num_attention_heads": 8,
            "kv_channels": 64,
            "ffn_hidden_size": 2048,
            "vocab_size": 32128,
            "max_position_embeddings": 512,
            "relative_attention_num_buckets": 32,
            "relative_attention_max_distance": 128,
            "norm_epsilon": 1e-6,
            "softmax_scale": 1.0,
            "encoder_num_layers": 6,
            "num_layers": 6,
            "activation": "relu",
            "untie_embeddings_and_output_weights": False,
            "logits_scaling": 512**0.5,
        },
    ),
    "mamba2": (
        mamba2,
        {},
        {
            "num_layers": 64,
            "hidden_size": 4096,
            "vocab_size": 32768,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "mamba_state_dim": 128,
            "mamba_num_groups": 8,
            "mamba_conv_kernel": 4,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "mamba_dt_min": 0.0,
            "mamba_dt_max": 0.0,
            "norm_epsilon": 1e-5,
            "untie_embeddings_and_output_weights": True,
            "init_method_std": 0.1,
            "max_position_embeddings": 2**20,
        },
    ),
    "nemotron_h": (
        nemotron_h,
        {},
        {
            "hybrid_layer_pattern": "ME*-",
            "hidden_size": 4096,
            "vocab_size": 131072,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_query_groups": 8,
            "kv_channels": 128,
            "ffn_hidden_size": 21504,
            "activation": "squared_relu",
            "mamba_state_dim": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "mamba_num_groups": 8,
            "mamba_conv_kernel": 4,
            "mamba_dt_min": 0.001,
            "norm_epsilon": 1e-5,
            "init_method_std": 0.02,
            "num_experts": 8,
            "moe_router_topk": 2,
            "moe_router_topk_scaling_factor": 1.0,
            "moe_ffn_hidden_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "moe_router_num_groups": 0,
        },
    ),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_file_without_fields_has_the_defaults_of_transformers(name):
    module, given, expected = DEFAULTS[name]
    config = module.FAMILY.config_from_hf(given)
    assert {field: getattr(config, field) for field in expected} == expected
    back = module.FAMILY.config_from_hf(module.FAMILY.config_to_hf(config))
    assert back == config


CLASSES = {name: {"architectures": [name]} for name in bert.FAMILY.architectures}
LABELLED = CLASSES["BertForSequenceClassification"]


@pytest.mark.parametrize(
    ("module", "given", "expected"),
    [
        (
            bert,
            CLASSES["BertForPreTraining"],
            {"masked_lm_head": True, "bert_binary_head": True, "task_head": "none"},
        ),
        (bert, CLASSES["BertForNextSentencePrediction"], {"masked_lm_head": False}),
        (bert, CLASSES["BertForMultipleChoice"], {"task_head": "multiple_choice"}),
        (bert, {"architectures": ["Other", "BertForMaskedLM"]}, {"masked_lm_head": True}),
        (bert, LABELLED, {"task_head": "classification", "num_labels": 2}),
        (bert, {**LABELLED, "num_labels": 5}, {"task_head": "classification", "num_labels": 5}),
        (bert, {**LABELLED, "num_labels": 1}, {"task_head": "regression", "num_labels": 1}),
        (
            bert,
            {**LABELLED, "id2label": {"0": "a", "1": "b", "2": "c"}, "num_labels": 5},
            {"task_head": "classification", "num_labels": 3},
        ),
        (
            bert,
            {**LABELLED, "num_labels": 1, "problem_type": "single_label_classification"},
            {"task_head": "classification", "num_labels": 1},
        ),
        (
            bert,
            {**LABELLED, "num_labels": 2, "problem_type": "regression"},
            {"task_head": "regression", "num_labels": 2},
        ),
        (
            roberta,
            {"architectures": ["RobertaForMaskedLM"], "pad_token_id": 0},
            {"position_offset": 1},
        ),
        (t5, {"num_layers": 4}, {"encoder_num_layers": 4, "num_layers": 4}),
        (
            t5,
            {"num_layers": 4, "num_decoder_layers": 2},
            {"encoder_num_layers": 4, "num_layers": 2},
        ),
        (t5, {"feed_forward_proj": "gated-gelu"}, {"activation": "geglu_tanh"}),
        (t5, {"feed_forward_proj": "gated-silu"}, {"activation": "swiglu"}),
        (t5, {"feed_forward_proj": "silu"}, {"activation": "silu"}),
        (t5, {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"}, {"activation": "geglu"}),
        (t5, {"feed_forward_proj": "gelu", "is_gated_act": True}, {"activation": "geglu"}),
        (
            t5,
            {"tie_word_embeddings": False},
            {"untie_embeddings_and_output_weights": True, "logits_scaling": 1.0},
        ),
        (t5, {"scale_decoder_outputs": False}, {"logits_scaling": 1.0}),
        (t5, {"d_model": 64}, {"logits_scaling": 8.0}),
        (t5, {"n_positions": None}, {"max_position_embeddings": 512}),
        (mamba2, {"tie_word_embeddings": True}, {"untie_embeddings_and_output_weights": False}),
        (mamba2, {"tie_word_embeddings": None}, {"untie_embeddings_and_output_weights": True}),
        (mamba2, {"expand": 1, "num_heads": 64}, {"mamba_num_heads": 64, "mamba_head_dim": 64}),
        (mamba2, {"time_step_limit": [0.5, 2.0]}, {"mamba_dt_min": 0.5, "mamba_dt_max": 2.0}),
        (
            mamba2,
            {"time_step_limit": [0.0, {"__float__": "Infinity"}]},
            {"mamba_dt_min": 0.0, "mamba_dt_max": 0.0},
        ),
        (
            nemotron_h,
            {"layers_block_type": ["mamba", "attention", "mlp"]},
            {"hybrid_layer_pattern": "M*-", "num_experts": 0},
        ),
        (nemotron_h, {"hybrid_override_pattern": "M-M*"}, {"hybrid_layer_pattern": "M-M*"}),
        (
            nemotron_h,
            {"n_group": 4, "topk_group": 2},
            {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
        ),
    ],
)
def test_a_file_says_which_heads_layers_and_activations_a_model_has(module, given, expected):
    config = module.FAMILY.config_from_hf(given)
    assert {field: getattr(config, field) for field in expected} == expected
    assert module.FAMILY.config_from_hf(module.FAMILY.config_to_hf(config)) == config


@pytest.mark.parametrize(
    ("module", "given", "words"),
    [
        (bert, {"architectures": ["BertModel"]}, "BertForMultipleChoice, not ['BertModel']"),
        (bert, {"architectures": None}, "BertForMultipleChoice, not []"),
        (bert, {**LABELLED, "id2label": [1]}, "has id2label = [1], no map"),
        (bert, {**LABELLED, "num_labels": "2"}, "has num_labels = '2'"),
        (
            roberta,
            {"architectures": ["RobertaForMaskedLM"], "pad_token_id": -1},
            "pad_token_id = -1",
        ),
        (
            roberta,
            {"architectures": ["RobertaForMaskedLM"], "pad_token_id": True},
            "pad_token_id = True",
        ),
        (t5, {"feed_forward_proj": "gated-gelu-new"}, "feed_forward_proj = 'gated-gelu-new'"),
        (t5, {"feed_forward_proj": "open-gelu"}, "feed_forward_proj = 'open-gelu'"),
        (t5, {"feed_forward_proj": "gated-relu2"}, "feed_forward_proj = 'relu2'"),
        (t5, {"dense_act_fn": "mish"}, "dense_act_fn = 'mish'"),
        (t5, {"is_gated_act": 1}, "is_gated_act = 1"),
        (t5, {"scale_decoder_outputs": "yes"}, "scale_decoder_outputs = 'yes'"),
        (mamba2, {"num_heads": 127}, "num_heads * head_dim = 8128 are not supported, only 'expand"),
        (mamba2, {"time_step_limit": [0.5]}, "time_step_limit = [0.5]"),
        (mamba2, {"time_step_limit": 3}, "time_step_limit = 3"),
        (nemotron_h, {"layers_block_type": ["mamba", "conv"]}, "layers_block_type = ['mamba', 'co"),
    ],
)
def test_what_a_class_of_transformers_does_not_read_is_refused(module, given, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        module.FAMILY.config_from_hf(given)


def test_labels_are_exported_with_the_kind_of_their_problem():
    config = bert.FAMILY.config_from_hf({**LABELLED, "num_labels": 2})
    two = bert.FAMILY.config_to_hf(config)
    assert two["id2label"] == {"0": "LABEL_0", "1": "LABEL_1"}
    assert two["label2id"] == {"LABEL_0": 0, "LABEL_1": 1} and "problem_type" not in two
    one = bert.FAMILY.config_to_hf(replace(config, num_labels=1))
    assert one["problem_type"] == "single_label_classification"
    value = bert.FAMILY.config_to_hf(replace(config, task_head="regression"))
    assert value["problem_type"] == "regression" and value["architectures"] == [
        "BertForSequenceClassification"
    ]


@pytest.mark.parametrize(
    ("module", "given", "changes", "words"),
    [
        (bert, LABELLED, {"head_pooling": "mean"}, "head_pooling = 'first', this one has 'mean'"),
        (minilm, {"architectures": ["BertModel"]}, {"bert_pooler": False}, "heads = BertModel"),
        (
            roberta,
            {"architectures": ["RobertaForMaskedLM"]},
            {"position_offset": 0},
            "position_offset = at least 1, this one has 0",
        ),
        (t5, {}, {"logits_scaling": 2.0}, "logits_scaling = 1.0 or 22.6"),
        (
            t5,
            {"tie_word_embeddings": False},
            {"logits_scaling": 512**0.5},
            "logits_scaling = 1.0 with an output matrix of its own",
        ),
        (
            mamba2,
            {},
            {"mamba_num_heads": 96},
            "mamba_num_heads * mamba_head_dim = a multiple of 4096, this one has 6144",
        ),
        (
            nemotron_h,
            {"hybrid_override_pattern": "M-*"},
            {"hybrid_layer_pattern": "MG*"},
            "hybrid_layer_pattern = symbols of M*-E, this one has 'G'",
        ),
    ],
)
def test_what_a_family_cannot_express_is_named(module, given, changes, words):
    config = replace(module.FAMILY.config_from_hf(given), **changes)
    with pytest.raises(ConfigError, match=re.escape(words)):
        module.FAMILY.config_to_hf(config)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"tie_word_embeddings": True, "scale_decoder_outputs": True}),
        ({"scale_decoder_outputs": False}, {"scale_decoder_outputs": False}),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": False}),
        (
            {"feed_forward_proj": "gated-gelu"},
            {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True},
        ),
        (
            {"feed_forward_proj": "gated-silu"},
            {"feed_forward_proj": "gated-silu", "dense_act_fn": "silu", "is_gated_act": True},
        ),
        ({}, {"feed_forward_proj": "relu", "dense_act_fn": "relu", "is_gated_act": False}),
    ],
)
def test_a_t5_is_written_as_transformers_reads_it(given, expected):
    found = t5.FAMILY.config_to_hf(t5.FAMILY.config_from_hf(given))
    assert expected.items() <= found.items()
