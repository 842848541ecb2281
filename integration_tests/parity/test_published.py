"""Models with published configurations, in small sizes, equal those of transformers.

transformers reads the same keys and values, and so does the conversion: the folder of weights holds
the published ``config.json`` with its spellings. By default, one size of several families is
converted; all others are slow tests.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from families import parity
from families.case import cases
from families.published import Published, published
from families.theirs import in_dtype, their_model, write
from megatron_ckpt.families import detect_family
from torch import nn

FAST = ("falcon", "gemma3", "gpt_neox", "llama4", "phi3", "t5")
"""Families with spellings that others do not have: copies of fields, absent and empty ones."""


def each() -> Any:
    """Parametrizes a test over published configurations; one of each family of `FAST` is fast."""
    seen, params = set(), []
    for one in published():
        fast = one.family in FAST and one.family not in seen
        seen.add(one.family)
        name = f"{one.family}-{one.model.rpartition('/')[2]}"
        params.append(pytest.param(one, id=name, marks=() if fast else (pytest.mark.slow,)))
    return pytest.mark.parametrize("one", params)


def their_small_model(one: Published) -> Any:
    """Returns a model of theirs, with a head of its own if the configuration does not tie it.

    transformers 5 builds every T5 with a tied head, and loads the head of T5 1.1 from its file.
    """
    theirs = their_model(one.case, {})
    if one.family == "t5" and one.config.get("tie_word_embeddings") is False:
        shape = theirs.lm_head.weight.shape
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        theirs.lm_head.weight = nn.Parameter(drawn / shape[1] ** 0.5)
    return theirs


def test_every_family_has_a_published_configuration_and_none_has_more_than_three() -> None:
    found = [one.family for one in published()]
    assert set(found) == cases().keys()
    assert max(map(found.count, found)) <= 3
    assert all(one.source for one in published())


@pytest.mark.parametrize("one", published(), ids=lambda one: one.model)
def test_published_configurations_are_read_in_their_sizes(one: Published) -> None:
    config = {name: one.config[name] for name in one.config if name != "quantization_config"}
    family = detect_family(config["architectures"])
    found: Any = family.config_from_hf(config)
    assert found.hidden_size == config.get("hidden_size") or found.hidden_size in config.values()
    assert found.vocab_size == config.get("vocab_size", found.vocab_size)


@each()
def test_small_models_of_published_configurations_are_equal(one: Published, tmp_path: Path) -> None:
    theirs, kind = their_small_model(one), one.case.kind
    source = write(theirs, tmp_path / "theirs")
    (source / "config.json").write_text(json.dumps(one.shrunken))
    inputs = kind.inputs(theirs)
    expected = kind.theirs(theirs, inputs)
    outputs = kind.ours(parity.our_model(source), inputs)
    error = parity.largest_error(outputs, expected)
    if error > parity.LIMIT:  # an epsilon of 1e-6 enlarges the rounding of Qwen3-Next in both
        assert one.family == "qwen3_next"
        exact = kind.theirs(in_dtype(theirs, torch.float64), inputs)
        limit = parity.largest_error(expected, exact)
        assert parity.largest_error(outputs, exact) <= limit < 1e-2
    assert parity.round_trip_of(one.case, theirs, source, tmp_path) <= parity.LIMIT
