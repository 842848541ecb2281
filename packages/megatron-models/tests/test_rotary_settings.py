"""Bounds of the settings of rotary positions, by hand."""

import pytest
from megatron_models import ConfigError

ROPE = {"position_embedding_type": "rope"}
AXES = {"position_embedding_type": "mrope", "mrope_interleaved": True}
LONG = {**ROPE, "rope_scaling_type": "longrope"}


@pytest.mark.parametrize(
    ("pairs", "sections", "axes"),
    [
        (5, (2, 2, 1), (0, 1, 2, 0, 1)),
        (4, (2, 1, 1), (0, 1, 2, 0)),
        (3, (1, 1, 1), (0, 1, 2)),
        (6, (2, 2, 2), (0, 1, 2, 0, 1, 2)),
        (4, (4, 0, 0), (0, 0, 0, 0)),
    ],
)
def test_height_and_width_alternate_as_often_as_there_are_pairs(small, pairs, sections, axes):
    config = small(**AXES, kv_channels=2 * pairs, mrope_section=sections)
    assert config.rotation.axes == axes


@pytest.mark.parametrize(
    ("pairs", "sections", "words"),
    [
        (4, (1, 2, 1), "at most 1 for the height and 1 for the width, .* use 2, 1 and 1"),
        (5, (1, 2, 2), "at most 2 for the height and 1 for the width, .* use 2, 2 and 1"),
        (6, (1, 3, 2), "at most 2 for the height and 2 for the width, .* use 2, 2 and 2"),
        (64, (1, 1, 1), "sum to 64, half of the .* use 22, 21 and 21"),
        (64, (), "sum to 64, half of the .* use 16, 24 and 24"),  # those of Qwen2-VL
        (64, (0, 0, 0), "sum to 64, half of the .* use 16, 24 and 24"),
        (64, (1, 2), "must be 3 numbers .* use 16, 24 and 24"),
        (8, (-1, 6, 3), r"not \(-1, 6, 3\); use 1, 5 and 2"),
    ],
)
def test_sections_that_do_not_fit_are_refused_with_some_that_do(small, pairs, sections, words):
    with pytest.raises(ConfigError, match=words):
        small(**AXES, kv_channels=2 * pairs, mrope_section=sections)


@pytest.mark.parametrize("factors", ["1,0,1", "1,inf,1", "1,-1,1", "1,x,1", "1,1", "1,1,1,1", ""])
@pytest.mark.parametrize("name", ["short", "long"])
def test_factors_have_to_be_positive_and_finite(small, name, factors):
    given = {"rope_scaling_short_factors": "1,1,1", "rope_scaling_long_factors": "1,2,3"}
    assert small(**LONG, **given).rotation is not None
    given[f"rope_scaling_{name}_factors"] = factors
    with pytest.raises(ConfigError, match=f"rope_scaling_{name}_factors must be 3 positive numb"):
        small(**LONG, **given)


@pytest.mark.parametrize(
    ("kv_channels", "percent", "channels"),
    [(6, 1.0, 6), (6, 0.4, 2), (8, 0.5, 4), (2, 1.0, 2), (6, 0.3, None), (6, 0.5, None)],
)
def test_an_even_number_of_channels_is_rotated(small, kv_channels, percent, channels):
    sizes = {"kv_channels": kv_channels, "rotary_percent": percent}
    if channels is not None:
        assert small(**ROPE, **sizes).rotary_dim == channels
        return
    found = int(kv_channels * percent)
    with pytest.raises(ConfigError, match=f"gives {found}; make it even and positive"):
        small(**ROPE, **sizes)


@pytest.mark.parametrize("percent", [0.0, -0.5, 1.1])
def test_a_share_of_channels_lies_above_0_and_not_above_1(small, percent):
    with pytest.raises(ConfigError, match=r"rotary_percent must lie in \(0, 1\]"):
        small(**ROPE, rotary_percent=percent)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("0", (False,) * 5),
        ("1", (True,) * 5),
        ("2", (False, True, False, True, False)),
        (" 3 ", (False, False, True, False, False)),
        ("[0,1]*2+[1]", (False, True, False, True, True)),
    ],
)
def test_every_so_manyth_layer_from_1_has_no_rotation(small, text, layers):
    assert small(**ROPE, num_layers=5, no_rope_freq=text).unrotated_layers == layers


def test_scaled_lengths_have_a_smaller_bound_below_a_larger_one(small):
    yarn = {**ROPE, "rope_scaling_type": "yarn", "yarn_beta_slow": 2.0}
    assert small(**yarn, yarn_beta_fast=2.5).rotation is not None
    with pytest.raises(ConfigError, match=r"use a smaller one, such as 0\.5$"):
        small(**yarn, yarn_beta_fast=2.0)
    llama3 = {**ROPE, "rope_scaling_type": "llama3", "rope_scaling_low_freq_factor": 3.0}
    with pytest.raises(ConfigError, match=r"such as 0\.625$"):
        small(**llama3, rope_scaling_high_freq_factor=2.5)
