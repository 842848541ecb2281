"""Maximal update parametrization: activations change equally in models of all widths."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from megatron_models import GPTConfig
from megatron_models.components.mup.config import MupConfig
from widths.coordinates import BASE, LENGTH, changes, slope
from widths.training import Training, final_loss, model_config

WIDTHS = (64, 128, 256, 512)
FLAT = 0.35
"""Largest power of the width with which a change may grow or shrink over these widths."""

MODELS = {
    "untied": {},
    "tied": {"untie_embeddings_and_output_weights": False},
    "experts": {"num_experts": 4},
}


@pytest.fixture(autouse=True)
def one_thread():
    """Makes sums independent of the number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config_of(width: int, mup: bool, model: str = "untied", **fields: float) -> GPTConfig:
    config = model_config(width, mup=mup, base=BASE, length=LENGTH)
    if model == "experts":
        fields["moe_ffn_hidden_size"] = width
    return replace(config, **MODELS[model], **fields)


def slopes(configs: list[GPTConfig]) -> dict[str, float]:
    found = [changes(config) for config in configs]
    return {name: slope(WIDTHS, [each[name] for each in found]) for name in found[0]}


@pytest.mark.parametrize("model", MODELS)
def test_activations_change_equally_at_all_widths(model: str) -> None:
    found = slopes([config_of(width, True, model) for width in WIDTHS])
    assert all(abs(power) <= FLAT for power in found.values()), found


@pytest.mark.parametrize("model", MODELS)
def test_without_mup_changes_grow_with_the_width(model: str) -> None:
    found = slopes([config_of(width, False, model) for width in WIDTHS])
    embedding = found.pop("embedding")
    assert abs(embedding) <= FLAT
    assert found.pop("logits") >= 0.5 and all(power >= 1.0 for power in found.values()), found


def test_the_check_finds_a_forgotten_learning_rate_and_a_forgotten_divisor() -> None:
    with mock.patch.object(MupConfig, "ratios_of", lambda self, parameters: {}):
        found = slopes([config_of(width, True) for width in WIDTHS])
    assert found["layer 0, attention"] >= 1.0
    divisor = 1.0 + 1e-9  # not the default, which is replaced
    found = slopes([config_of(width, True, logits_scaling=divisor) for width in WIDTHS])
    assert abs(found["layer 1, mlp"]) >= 2 * FLAT


def test_both_parametrizations_are_the_same_at_the_base_width() -> None:
    losses = [
        final_loss(Training(config_of(BASE, mup), size=2, length=LENGTH), lr=0.01, steps=5)
        for mup in (False, True)
    ]
    assert losses[0] == losses[1]
