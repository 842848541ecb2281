"""Windows in a ``config.json`` and ours express each other."""

import dataclasses

import pytest
from megatron_models import ConfigError
from megatron_models.models.gpt.families import llama, llama4
from megatron_models.models.gpt.families.windows import (
    every_layer,
    except_every,
    from_layer,
    windows,
)

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
THEIRS = {
    "num_hidden_layers": 4,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 9,
    "max_position_embeddings": 64,
}
RULES = {
    "all": windows(listed=False),
    "mixed": windows(except_every(3), absent=4096),
    "named": windows(except_every(3, "sliding_window_pattern"), reads=("sliding_window_pattern",)),
    "switched": windows(
        from_layer(1, "max_window_layers"), absent=16, switch=False, reads=("max_window_layers",)
    ),
    "chunks": windows(every_layer, name="attention_chunk_size", absent=32),
}


def family(rule):
    return dataclasses.replace(llama.FAMILY, custom=(*llama.FAMILY.custom, RULES[rule]))


def windowed(config, name="sliding_window"):
    """Returns the window of each layer."""
    size = getattr(config, name)
    return [size if each and size else None for each in config.windowed_layers]


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        ("all", {}, [None] * 4),
        ("all", {"sliding_window": None}, [None] * 4),
        ("all", {"sliding_window": 5}, [5] * 4),
        ("all", {"sliding_window": 1}, [1] * 4),
        ("all", {"sliding_window": 5, "layer_types": [SLIDING] * 4}, [5] * 4),
        ("mixed", {}, [4096, 4096, None, 4096]),
        ("mixed", {"sliding_window": 5}, [5, 5, None, 5]),
        (
            "mixed",
            {"sliding_window": 5, "layer_types": [FULL, SLIDING, SLIDING, FULL]},
            [None, 5, 5, None],
        ),
        ("mixed", {"layer_types": [FULL] * 4, "sliding_window": None}, [None] * 4),
        ("named", {"sliding_window": 6, "sliding_window_pattern": 2}, [6, None, 6, None]),
        ("named", {"sliding_window": 6, "sliding_window_pattern": 1}, [None] * 4),
        ("switched", {}, [None] * 4),
        ("switched", {"sliding_window": 5}, [None] * 4),
        ("switched", {"use_sliding_window": True}, [None, 16, 16, 16]),
        ("switched", {"use_sliding_window": True, "max_window_layers": 3}, [None] * 3 + [16]),
        ("switched", {"use_sliding_window": True, "max_window_layers": 9}, [None] * 4),
    ],
)
def test_the_window_of_each_layer_is_read_and_written(rule, values, expected):
    own = family(rule)
    config = own.config_from_hf(THEIRS | values)
    assert windowed(config) == expected
    written = own.config_to_hf(config)
    assert own.config_from_hf(written) == config
    if not any(expected):  # null only if the family has it
        assert written["sliding_window"] == (4096 if rule == "mixed" else None)
    types = [FULL if each is None else SLIDING for each in expected]
    assert written.get("layer_types", types) == types
    assert ("layer_types" in written) == (rule != "all")
    assert written.get("use_sliding_window", any(expected)) == any(expected)


def test_chunks_are_windows_with_other_names():
    own = family("chunks")
    values = {"attention_chunk_size": 8, "layer_types": [CHUNKED, FULL, CHUNKED, FULL]}
    config = own.config_from_hf(THEIRS | values)
    assert windowed(config, "attention_chunk_size") == [8, None, 8, None]
    assert values.items() <= own.config_to_hf(config).items()
    assert own.config_from_hf(THEIRS).attention_chunk_size == 32


@pytest.mark.parametrize(
    ("rule", "values", "words"),
    [
        ("all", {"sliding_window": 0}, "sliding_window = 0"),
        ("all", {"sliding_window": True}, "sliding_window = True"),
        ("all", {"sliding_window": 5, "layer_types": [FULL] * 4}, "layer_types"),
        ("all", {"layer_types": [SLIDING] * 4}, "layer_types"),
        ("all", {"attention_chunk_size": 5}, "attention_chunk_size = 5"),
        ("mixed", {"sliding_window": None}, "sliding_window = None"),
        ("mixed", {"layer_types": [SLIDING] * 3}, "layer_types"),
        ("mixed", {"layer_types": [CHUNKED] * 4}, "layer_types"),
        ("mixed", {"layer_types": 3}, "layer_types = 3"),
        ("mixed", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("named", {"sliding_window": 5, "sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        ("switched", {"use_sliding_window": "yes"}, "use_sliding_window = 'yes'"),
        ("switched", {"layer_types": [SLIDING] * 4}, "sliding_window = None"),
        ("switched", {"use_sliding_window": True, "max_window_layers": "1"}, "max_window_layers"),
    ],
)
def test_windows_that_transformers_does_not_compute_are_refused(rule, values, words):
    with pytest.raises(ConfigError, match=words):
        family(rule).config_from_hf(THEIRS | values)


def test_a_family_without_types_of_layers_refuses_layers_that_differ():
    config = family("mixed").config_from_hf(THEIRS)
    with pytest.raises(ConfigError, match="window_attn_skip_freq = '', this one has '3'"):
        family("all").config_to_hf(config)


def test_layers_of_llama_4_have_chunks_or_no_positions():
    """A file without lists of layers has an interval."""
    theirs = {
        **THEIRS,
        "num_key_value_heads": 2,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 8,
    }
    config = llama4.FAMILY.config_from_hf(theirs)
    assert windowed(config, "attention_chunk_size") == [8, None, 8, None]
    assert config.unrotated_layers == (False, True, False, True)
