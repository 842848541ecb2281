"""Fields of published files that transformers' classes do not read.

Keys and values are those of the `config.json` of Phi-4-mini-instruct, gemma-2-27b and
falcon-40b-instruct; sizes are small.
"""

import pytest
from megatron_models.errors import ConfigError
from megatron_models.models.gpt.families import falcon, gemma2, phi3

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 64,
}
TASKS = ("QuestionAnswering", "SequenceClassification", "TokenClassification")
PUBLISHED = {
    "phi3": (
        phi3.FAMILY,
        {**SIZES, "model_type": "phi3"},
        {
            "auto_map": {
                "AutoConfig": "configuration_phi3.Phi3Config",
                "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
                "AutoTokenizer": "Xenova/gpt-4o",
            },
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
        },
    ),
    "gemma2": (
        gemma2.FAMILY,
        {**SIZES, "model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 9},
        {"sliding_window_size": 4096},
    ),
    "falcon": (
        falcon.FAMILY,
        {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "vocab_size": 101,
            "model_type": "falcon",
        },
        {
            "auto_map": {
                "AutoConfig": "configuration_falcon.FalconConfig",
                "AutoModel": "modeling_falcon.FalconModel",
                "AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM",
                **{f"AutoModelFor{t}": f"modeling_falcon.FalconFor{t}" for t in TASKS},
            }
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_fields_that_transformers_does_not_read_have_no_effect(name):
    family, base, more = PUBLISHED[name]
    assert family.config_from_hf({**base, **more}) == family.config_from_hf(base)


@pytest.mark.parametrize("name", ["phi3", "falcon"])
def test_code_that_is_not_the_published_one_is_refused(name):
    family, base, more = PUBLISHED[name]
    changed = {**more["auto_map"], "AutoModelForCausalLM": "modeling_fork.ForkForCausalLM"}
    with pytest.raises(ConfigError, match="auto_map = "):
        family.config_from_hf({**base, **more, "auto_map": changed})
    with pytest.raises(ConfigError, match="'field_of_a_fork' = 3"):
        family.config_from_hf({**base, **more, "field_of_a_fork": 3})


def test_one_message_names_all_refused_fields():
    base = {**SIZES, "model_type": "phi3", "hidden_act": "relu", "rope_scaling": {"type": "axial"}}
    base |= {"mlp_bias": True, "interpolate_factor": 2, "field_of_a_fork": 3, "sliding_window": "x"}
    del base["hidden_size"]
    with pytest.raises(ConfigError) as caught:
        phi3.FAMILY.config_from_hf(base)
    message = str(caught.value)
    for words in (
        "mlp_bias = True",
        "interpolate_factor = 2",
        "'field_of_a_fork' = 3",
        "lacks 'hidden_size'",
        "hidden_act = 'relu'",
        "'axial'",
        "'x'",
    ):
        assert message.count(words) == 1, message
    assert "\n" not in message
