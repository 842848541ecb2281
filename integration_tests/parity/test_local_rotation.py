"""Layers with a window have the rotary base of Gemma 3 and OLMo-3 of transformers."""

import dataclasses
from typing import Any

import pytest
import torch
from megatron_kernels import rope_frequencies
from megatron_models.components.attention.spec import AttentionSpec
from megatron_models.models.gpt.families import llama
from megatron_models.models.gpt.families.local_rope import local_rope
from megatron_models.models.gpt.families.rope import rope
from megatron_models.models.gpt.families.windows import except_every, windows
from megatron_models.models.gpt.layers import attention_mixer
from transformers import Gemma3TextConfig, Olmo3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding

SIZES: dict[str, Any] = {
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 8,
    "vocab_size": 9,
    "max_position_embeddings": 4096,
    "sliding_window": 16,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
LINEAR = {"rope_type": "linear", "factor": 8.0}
GEMMA3 = (
    Gemma3TextConfig,
    Gemma3RotaryEmbedding,
    local_rope(rope(1e6), base=1e4, name="rope_local_base_freq"),
    windows(except_every(6, "sliding_window_pattern"), reads=("sliding_window_pattern",)),
    {"head_dim": 16},
)
OLMO3 = (
    Olmo3Config,
    Olmo3RotaryEmbedding,
    local_rope(rope(5e5), base=5e5),
    windows(except_every(4)),
    {},
)
#: Content of files of both versions of transformers.
CASES: list[tuple[Any, dict[str, Any]]] = [
    (GEMMA3, {}),
    (GEMMA3, {"rope_theta": 2e4}),
    (GEMMA3, {"rope_local_base_freq": 300.0, "sliding_window_pattern": 3}),
    (GEMMA3, {"rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR}),
    (GEMMA3, {"rope_parameters": {"full_attention": LINEAR}}),
    (
        GEMMA3,
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 400.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 400.0},
            }
        },
    ),
    (
        GEMMA3,
        {
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 400.0},
                "sliding_attention": {**YARN, "rope_theta": 400.0},
            }
        },
    ),
    (OLMO3, {}),
    (OLMO3, {"rope_theta": 5e5, "rope_scaling": YARN}),
    (
        OLMO3,
        {
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 900.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 900.0},
            }
        },
    ),
    (OLMO3, {"rope_parameters": {"full_attention": YARN, "sliding_attention": None}}),
]


@pytest.mark.parametrize(("case", "given"), CASES)
@pytest.mark.parametrize("saved", [False, True])
def test_frequencies_of_every_layer_equal_those_of_transformers(
    case: Any, given: dict[str, Any], saved: bool
) -> None:
    config_class, embedding, rotation, windowed, more = case
    family = dataclasses.replace(
        llama.FAMILY,
        model_type=config_class.model_type,
        custom=(rotation, windowed, llama.BIASES),
        neutral={},
    )
    content = {**SIZES, **more, **given}
    theirs = config_class(**_copied(content))
    if saved:  # by transformers 5
        kept = {*content, "rope_parameters", "layer_types"} - {"rope_theta", "rope_scaling"}
        kept -= {"rope_local_base_freq", "sliding_window_pattern"}
        content = {name: value for name, value in theirs.to_dict().items() if name in kept}
    ours = family.config_from_hf(_copied(content))
    for config in (theirs, config_class.from_dict(family.config_to_hf(ours))):
        table = embedding(config)
        kinds = config.layer_types
        assert len(set(kinds)) == 2
        for number, kind in enumerate(kinds):
            mixer = attention_mixer(ours, number)
            assert isinstance(mixer, AttentionSpec)
            assert mixer.rotation is not None
            assert (mixer.sliding_window > 0) == (kind == "sliding_attention")
            scaling = mixer.rotation.scaling_at(SIZES["max_position_embeddings"])
            found = rope_frequencies(16, mixer.rotation.base, scaling=scaling)
            expected = getattr(table, f"{kind}_inv_freq")
            torch.testing.assert_close(found.float(), expected, rtol=1e-6, atol=0)
            magnitude = 1.0 if scaling is None else scaling.attention_factor
            assert magnitude == pytest.approx(getattr(table, f"{kind}_attention_scaling"))
    assert family.config_from_hf(family.config_to_hf(ours)) == ours


def _copied(content: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy; transformers changes maps that it is given."""
    return {
        name: _copied(value) if isinstance(value, dict) else value
        for name, value in content.items()
    }
