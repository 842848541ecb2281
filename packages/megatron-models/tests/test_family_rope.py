"""Scaling of rotary positions in a ``config.json``: lengths, factors and magnitudes."""

import math
import re
from dataclasses import replace

import pytest
from megatron_models import ConfigError
from megatron_models.models.gpt.families import llama
from megatron_models.models.gpt.families.rope import rope

from .test_family_defaults import SIZES


def scaled(**settings):
    given = {**SIZES, "max_position_embeddings": 128, "rope_scaling": settings}
    return llama.FAMILY.config_from_hf(given)


def test_the_factor_of_a_stretched_rotation_is_by_default_the_ratio_of_lengths():
    original = {"rope_type": "yarn", "original_max_position_embeddings": 32}
    assert scaled(**original).rope_scaling_factor == 4.0
    assert scaled(**original, factor=3.0).rope_scaling_factor == 3.0
    assert scaled(rope_type="yarn", factor=2.0).rope_scaling_original_length == 128
    given = {**SIZES, "original_max_position_embeddings": 16, "rope_scaling": {**original}}
    config = llama.FAMILY.config_from_hf(given)  # the value outside takes precedence
    assert (config.rope_scaling_original_length, config.rope_scaling_factor) == (16, 4.0)
    single = {**original, "original_max_position_embeddings": 1}
    assert scaled(**single).rope_scaling_factor == 128.0
    for length in (0, "32"):
        with pytest.raises(ConfigError, match="rotary scaling without a factor needs"):
            scaled(rope_type="yarn", original_max_position_embeddings=length)

    given = {**SIZES, "max_position_embeddings": "64", "rope_scaling": original}
    with pytest.raises(ConfigError, match=r"without a factor needs .*, not '64' and 32"):
        llama.FAMILY.config_from_hf(given)


def test_a_length_outside_the_settings_of_llama_3_takes_precedence():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8}
    assert scaled(**scaling).rope_scaling_original_length == 8
    given = {**SIZES, "original_max_position_embeddings": 16, "rope_scaling": scaling}
    assert llama.FAMILY.config_from_hf(given).rope_scaling_original_length == 16


def test_all_channels_may_be_named_as_the_rotated_ones():
    whole = {**SIZES, "rope_parameters": {"partial_rotary_factor": 1.0}}
    assert llama.FAMILY.config_from_hf(whole) == llama.FAMILY.config_from_hf(SIZES)


def test_magnitudes_of_yarn_need_each_other_and_periods_of_0_are_absent():
    both = scaled(rope_type="yarn", factor=2.0, mscale=0.5, mscale_all_dim=0.25)
    assert (both.mscale, both.mscale_all_dim) == (0.5, 0.25)
    one = scaled(rope_type="yarn", factor=2.0, mscale=0.5, beta_fast=0, beta_slow=3.0)
    assert (one.mscale, one.mscale_all_dim) == (1.0, 0.0)
    assert (one.yarn_beta_fast, one.yarn_beta_slow) == (32.0, 3.0)
    words = re.escape("mscale and mscale_all_dim = 1.0 and 0.0, or both above 0, this one has (0.5")
    with pytest.raises(ConfigError, match=words):
        llama.FAMILY.config_to_hf(replace(one, mscale=0.5))
    with pytest.raises(ConfigError, match="mscale and mscale_all_dim"):
        llama.FAMILY.config_to_hf(replace(one, mscale=0.0, mscale_all_dim=0.5))
    assert llama.FAMILY.config_from_hf(llama.FAMILY.config_to_hf(both)) == both


@pytest.mark.parametrize(
    ("factor", "magnitude"), [(40.0, 0.1 * math.log(40) + 1), (1, 1.0), (0.5, 1.0)]
)
def test_scores_of_latents_are_scaled_without_the_other_magnitude_too(factor, magnitude):
    settings = {"rope_type": "yarn", "factor": factor, "mscale_all_dim": 0.7}
    found = rope(1e4, latent=True).read(
        "T", {"max_position_embeddings": 64, "rope_scaling": settings}
    )
    assert found["mscale_all_dim"] == 0.7 and "mscale" not in found
    assert found["rope_scaling_attention_factor"] == pytest.approx(magnitude, rel=1e-12)
    plain = rope(1e4).read("T", {"max_position_embeddings": 64, "rope_scaling": settings})
    assert "mscale_all_dim" not in plain
    for more in ({"mscale": 0.5}, {"mscale_all_dim": None}):
        given = {"max_position_embeddings": 64, "rope_scaling": {**settings, **more}}
        assert rope(1e4, latent=True).read("T", given) == rope(1e4).read("T", given)


def test_a_dynamic_rotation_begins_at_the_number_of_positions():
    config = scaled(rope_type="dynamic", factor=2.0)
    assert config.rope_scaling_original_length == 128
    assert llama.FAMILY.config_to_hf(config)["rope_scaling"] == {
        "rope_type": "dynamic",
        "factor": 2.0,
    }
    with pytest.raises(ConfigError, match="rope_scaling_original_length = 128, this one has 64"):
        llama.FAMILY.config_to_hf(replace(config, rope_scaling_original_length=64))
