import dataclasses
import json
import math
import subprocess
import sys

import pytest
from megatron_models.errors import ConfigError
from megatron_models.models.gpt.config import GPTConfig

ROPE = {"position_embedding_type": "rope"}


def test_unset_sizes_are_derived_as_in_megatron(small):
    plain = small(ffn_hidden_size=0)
    assert (plain.num_query_groups, plain.kv_channels, plain.ffn_hidden_size) == (4, 6, 96)
    gated = small(hidden_size=4096, ffn_hidden_size=0, activation="swiglu")
    assert gated.ffn_hidden_size == 10880  # int(4 * 4096 * 2 / 3) // 64 * 64


def test_vocabulary_padding_does_not_depend_on_the_layout(small):
    assert small(vocab_size=50257).padded_vocab_size == 50304
    assert small(vocab_size=256).padded_vocab_size == 256
    assert small(vocab_size=257, make_vocab_size_divisible_by=1).padded_vocab_size == 257


@pytest.mark.parametrize("untied", [False, True])
def test_token_embedding_and_output_matrix_are_those_of_the_vocabulary(small, untied):
    """As marked in megatron-core: tied weights too, but not position embeddings."""
    config = small(untie_embeddings_and_output_weights=untied)
    cut = {name: spec.sharding for name, spec in config.parameters().items()}
    marked = {name for name, sharding in cut.items() if sharding.vocabulary}
    assert marked == {"embedding.word.weight"} | ({"output.weight"} if untied else set())
    assert cut["embedding.position.weight"].hidden_matrix
    assert not cut["embedding.word.weight"].hidden_matrix
    assert not cut["final_norm.weight"].hidden_matrix
    biases = {name: sharding for name, sharding in cut.items() if name.endswith("bias")}
    assert "layers.0.attention.qkv.bias" in biases  # of two dims
    assert not any(sharding.hidden_matrix for sharding in biases.values())


def test_output_projections_start_smaller_by_the_root_of_twice_the_layers(small):
    assert small(num_layers=8).output_std == pytest.approx(0.02 / math.sqrt(16))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 100, "num_attention_heads": 3}, ["100", "3", "kv_channels"]),
        ({"num_query_groups": 3}, ["num_attention_heads 4", "num_query_groups 3"]),
        ({"num_layers": 0}, ["num_layers", "0"]),
        ({"num_layers": 2.0}, ["num_layers", "integer", "2.0"]),
        ({"num_layers": True}, ["num_layers", "integer", "True"]),
        ({"num_layers": None}, ["num_layers", "None"]),
        ({"vocab_size": "61"}, ["vocab_size", "integer", "'61'"]),
        ({"num_layers": 10**9}, ["num_layers is 1000000000, more than 100000"]),
        ({"num_experts": 10**6}, ["num_experts is 1000000, more than 100000"]),
        ({"vocab_size": 10**400}, ["vocab_size", f"more than {2**40}"]),
        ({"rotary_base": 10**400}, ["rotary_base must be a number, not 1000"]),
        ({"norm_epsilon": float("nan")}, ["norm_epsilon", "nan"]),
        ({"rotary_percent": 1.5}, ["rotary_percent", "1.5"]),
        ({"activation": "swigl"}, ["activation", "'swigl'", "did you mean 'swiglu'"]),
        ({"normalization": "layernorm"}, ["normalization", "LayerNorm"]),
        ({"position_embedding_type": "rope", "kv_channels": 5}, ["kv_channels 5", "even"]),
        (
            {
                "position_embedding_type": "rope",
                "rope_scaling_type": "llama3",
                "rope_scaling_low_freq_factor": 4.0,
            },
            ["rope_scaling_low_freq_factor 4.0", "rope_scaling_high_freq_factor 4.0"],
        ),
    ],
)
def test_values_that_do_not_fit_are_refused_with_their_names_and_numbers(small, changes, words):
    with pytest.raises(ConfigError) as caught:
        small(**changes)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_sequence_longer_than_the_positions_is_refused_with_both_numbers(small):
    config = small()
    config.check_sequence_length(16)
    with pytest.raises(ConfigError, match=r"17 .* 16"):
        config.check_sequence_length(17)


@pytest.mark.parametrize(
    ("changes", "unused"),
    [
        ({}, []),
        ({"rotary_base": 5.0, "yarn_beta_fast": 8.0}, ["rotary_base", "yarn_beta_fast"]),
        ({**ROPE, "rotary_base": 5.0, "rope_scaling_factor": 2.0}, ["rope_scaling_factor"]),
        ({**ROPE, "rope_scaling_type": "linear", "rope_scaling_factor": 2.0}, []),
        ({**ROPE, "rope_scaling_type": "ntk", "mscale": 2.0}, ["mscale"]),
        ({**ROPE, "rope_scaling_type": "yarn", "mscale": 2.0}, []),
    ],
)
def test_settings_of_a_rotation_that_is_not_there_are_named(small, changes, unused):
    assert list(small(**changes).unused_fields()) == unused


def test_json_round_trip(config):
    assert GPTConfig.from_json(config.to_json()) == config
    assert GPTConfig.from_json(json.loads(config.to_json())) == config


def test_all_wrong_keys_are_named_at_once(small):
    values = small().to_dict()
    del values["num_layers"], values["vocab_size"]
    values |= {"num_layrs": 2, "one": 1, "two": 2}
    with pytest.raises(ConfigError) as caught:
        GPTConfig.from_dict(values)
    assert str(caught.value) == (
        "unknown model configuration key 'num_layrs' (did you mean 'num_layers'?); unknown model "
        "configuration key 'one'; unknown model configuration key 'two'; the model configuration "
        "lacks num_layers, vocab_size"
    )
    with pytest.raises(ConfigError, match=r"'k4'; and 16 more$"):
        GPTConfig.from_dict({f"k{number}": 0 for number in range(20)})


def test_five_wrong_keys_are_all_that_there_are(small):
    with pytest.raises(ConfigError, match=r"'k3'; unknown model configuration key 'k4'$"):
        GPTConfig.from_dict(small().to_dict() | {f"k{number}": 0 for number in range(5)})
    with pytest.raises(ConfigError, match=r"'k4'; and 1 more$"):
        GPTConfig.from_dict(small().to_dict() | {f"k{number}": 0 for number in range(6)})


def test_unknown_key_names_the_nearest(small):
    values = small().to_dict()
    values["num_layer"] = values.pop("num_layers")
    with pytest.raises(ConfigError, match="'num_layer' \\(did you mean 'num_layers'"):
        GPTConfig.from_dict(values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "list"),
        ("[" * 100_000, "nested too deeply"),
        ('{"num_layers": 2}', "lacks hidden_size, .*num_attention_heads"),
    ],
)
def test_json_that_is_no_configuration_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        GPTConfig.from_json(text)


def test_every_field_can_become_a_flag():
    flags = [field.metadata["flag"] for field in dataclasses.fields(GPTConfig)]
    assert len(set(flags)) == len(flags)
    for field in dataclasses.fields(GPTConfig):
        assert field.metadata["flag"].startswith("--")
        assert field.metadata["help"]


def test_planning_a_model_never_imports_torch():
    code = (
        "import sys; from megatron_models import GPTConfig, training_flops, parameter_count;"
        "from megatron_models.models.gpt.families import gpt2, llama;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
