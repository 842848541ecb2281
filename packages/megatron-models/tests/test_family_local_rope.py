"""Rotary bases of layers with a window in a ``config.json`` and ours express each other."""

import dataclasses
import re

import pytest
from megatron_models import ConfigError
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.families import llama
from megatron_models.models.gpt.families.local_rope import local_rope
from megatron_models.models.gpt.families.rope import rope
from megatron_models.models.gpt.families.windows import except_every, windows
from megatron_models.models.gpt.layers import attention_mixer

FULL, LOCAL = "full_attention", "sliding_attention"
THEIRS = {
    "num_hidden_layers": 4,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 9,
    "max_position_embeddings": 64,
    "sliding_window": 5,
}
NAMED = local_rope(rope(1e6, kinds=("linear",)), base=1e4, name="rope_local_base_freq")
EQUAL = local_rope(rope(5e5, kinds=("linear",)), base=5e5)
LINEAR = {"rope_type": "linear", "factor": 2.0}


def family(rule):
    return dataclasses.replace(
        llama.FAMILY, custom=(rule, windows(except_every(2)), llama.BIASES), neutral={}
    )


def bases(config):
    """Returns the base of each layer, negative if it is scaled."""
    rotations = [attention_mixer(config, number).rotation for number in range(config.num_layers)]
    return [-each.base if each.scaling else each.base for each in rotations]


def by_type(full, local):
    return {"rope_parameters": {FULL: full, LOCAL: local}}


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        (NAMED, {}, [1e4, 1e6] * 2),
        (NAMED, {"rope_theta": 3e4}, [1e4, 3e4] * 2),
        (NAMED, {"rope_local_base_freq": 7.0, "rope_scaling": LINEAR}, [7.0, -1e6] * 2),
        (NAMED, by_type({"rope_theta": 5.0, **LINEAR}, None), [1e4, -5.0] * 2),
        (NAMED, by_type(None, {"rope_theta": 5.0}), [5.0, 1e6] * 2),
        (NAMED, by_type({"rope_theta": 9.0}, {"rope_theta": 9.0}), [9.0] * 4),
        (
            NAMED,
            by_type({"rope_theta": 9.0, **LINEAR}, {"rope_theta": 9.0, **LINEAR}),
            [-9.0] * 4,
        ),
        (EQUAL, {}, [5e5] * 4),
        (EQUAL, {"rope_scaling": LINEAR, "rope_theta": 5e5}, [5e5, -5e5] * 2),
        (EQUAL, by_type({"rope_theta": 9.0}, {"rope_theta": 8.0}), [8.0, 9.0] * 2),
        (NAMED, {"layer_types": [FULL] * 4, "sliding_window": None}, [1e6] * 4),
    ],
)
def test_the_base_of_each_layer_is_read_and_written(rule, values, expected):
    own = family(rule)
    config = own.config_from_hf(THEIRS | values)
    assert bases(config) == expected
    written = own.config_to_hf(config)
    assert own.config_from_hf(written) == config
    maps = written["rope_parameters"]
    assert [maps[kind]["rope_theta"] for kind in (LOCAL, FULL)] == [abs(x) for x in expected[:2]]
    if rule is NAMED:
        assert written["rope_local_base_freq"] == maps[LOCAL]["rope_theta"]


@pytest.mark.parametrize(
    ("rule", "values", "words"),
    [
        (EQUAL, {"rope_theta": 1e4}, "rope_theta = 10000.0 and no base of sliding_attention"),
        (EQUAL, {"rope_local_base_freq": 1e4}, "rope_local_base_freq = 10000.0"),
        (NAMED, {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters = {'rope_theta'"),
        (NAMED, {"rope_parameters": {FULL: 3}}, "rope_parameters = {'full_attention': 3}"),
        (NAMED, {"rope_parameters": [FULL]}, "rope_parameters = ['full_attention']"),
        (NAMED, by_type({}, LINEAR), "{'factor': 2.0, 'rope_type': 'linear'} of sliding"),
        (NAMED, by_type({}, {"rope_theta": 0.0}), "{'rope_theta': 0.0} of sliding_attention"),
        (NAMED, by_type({}, {"rope_theta": -1.0}), "rotary_base_local"),
        (NAMED, by_type({}, {"rope_theta": "1e4"}), "rotary_base_local"),
        (NAMED, by_type({}, {"rope_type": "yarn"}), "type 'yarn' is not supported"),
        (NAMED, by_type({}, {"partial_rotary_factor": 0.5}), "'partial_rotary_factor' = 0.5"),
        (
            NAMED,
            by_type({}, {"rope_theta": 9.0}) | {"rope_local_base_freq": 8.0},
            "rope_theta is 8.0 and 9.0",
        ),
        (NAMED, {"original_max_position_embeddings": 8}, "embeddings' = 8 are not supported"),
    ],
)
def test_rotations_that_differ_in_more_than_the_base_are_refused(rule, values, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        family(rule).config_from_hf(THEIRS | values)


def test_a_family_with_one_base_refuses_another_of_layers_with_a_window():
    config = family(NAMED).config_from_hf(THEIRS)
    with pytest.raises(ConfigError, match=re.escape("rotary_base_local = 0.0, this one has")):
        llama.FAMILY.config_to_hf(config)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"position_embedding_type": "rope"}, "no layer has one"),
        ({"sliding_window": 2}, "needs rotary positions"),
    ],
)
def test_a_base_that_no_layer_has_is_refused(values, words):
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    with pytest.raises(ConfigError, match=words):
        GPTConfig(**sizes, max_position_embeddings=8, rotary_base_local=9.0, **values)
