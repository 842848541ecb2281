"""Every type of rotary scaling equals that of transformers, in float64 and at far positions."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families.parity import LIMIT, error, our_logits, our_model
from megatron_models import StaticKVCache
from megatron_models.components.rotary.module import RotaryTable
from megatron_models.families.family import Family
from megatron_models.models.gpt.families.llama import FAMILY
from megatron_models.placement import Placement
from megatron_parallel import Mesh
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

POSITIONS = 131_072
FAR = torch.tensor([[0, 1, 77, 4095, 4096, 60_000, POSITIONS - 1]])
SHORT = [1.0 + 0.05 * i for i in range(8)]
LONG = [2.0 + 3.0 * i for i in range(8)]
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}

#: Rotary settings, and the length of the sequence; None stands for the longest.
CASES: dict[str, tuple[dict[str, Any], int | None]] = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, None),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, None),
    "llama3": ({"rope_type": "llama3", "factor": 8.0, **LLAMA3}, None),
    "yarn": (
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        None,
    ),
    "yarn of gpt-oss": (
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
        },
        None,
    ),
    "yarn of DeepSeek": (
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 0.707,
            "mscale_all_dim": 1.2,
        },
        None,
    ),
    "yarn with a given attention factor": (
        {
            "rope_type": "yarn",
            "factor": None,
            "original_max_position_embeddings": 8192,
            "attention_factor": 1.7,
        },
        None,
    ),
    "longrope, short": (
        {
            "rope_type": "longrope",
            "short_factor": SHORT,
            "long_factor": LONG,
            "original_max_position_embeddings": 4096,
        },
        4096,
    ),
    "longrope, long": (
        {
            "rope_type": "longrope",
            "short_factor": SHORT,
            "long_factor": LONG,
            "factor": 16.0,
            "original_max_position_embeddings": 4096,
        },
        4097,
    ),
    "longrope with a given attention factor": (
        {
            "rope_type": "longrope",
            "short_factor": SHORT,
            "long_factor": LONG,
            "attention_factor": 1.1,
            "original_max_position_embeddings": 4096,
        },
        None,
    ),
}


def hf_config(family: Family, scaling: dict[str, Any]) -> dict[str, Any]:
    """Returns a ``config.json`` of 16 channels in each head."""
    return {
        "model_type": family.model_type,
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 8,
        "vocab_size": 9,
        "max_position_embeddings": POSITIONS,
        "rope_parameters": {"rope_theta": 5e5, **scaling},
    }


@pytest.mark.parametrize("case", CASES)
def test_angles_equal_those_of_transformers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling, length = CASES[case]
    settings = hf_config(FAMILY, scaling)
    config = FAMILY.config_from_hf(settings)
    assert FAMILY.config_from_hf(FAMILY.config_to_hf(config)) == config
    assert config.rotation is not None
    table = RotaryTable(config.rotation, POSITIONS, Placement(Mesh.single(), dtype=torch.float64))
    cos, sin = table(FAR.shape[1], 0, FAR, length)
    # transformers rounds to float32 unless these names stand for float64.
    for name in ("float", "float32"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    theirs = LlamaConfig(**{key: value for key, value in settings.items() if key != "model_type"})
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](
        theirs, None, seq_len=POSITIONS if length is None else length
    )
    assert frequencies.dtype == torch.float64
    angles = FAR.t()[..., None].double() * frequencies
    torch.testing.assert_close(cos, angles.cos() * factor, rtol=0, atol=1e-9)
    torch.testing.assert_close(sin, angles.sin() * factor, rtol=0, atol=1e-9)


def test_dynamic_scaling_beyond_the_original_length_equals_that_of_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    settings = hf_config(FAMILY, scaling) | {"max_position_embeddings": 512}
    theirs = LlamaConfig(**{key: value for key, value in settings.items() if key != "model_type"})
    monkeypatch.setattr(torch, "float", torch.float64)
    frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, None, seq_len=1000)
    monkeypatch.undo()
    rotation = FAMILY.config_from_hf(settings).rotation
    assert rotation is not None
    table = RotaryTable(rotation, 2048, Placement(Mesh.single(), dtype=torch.float64))
    for context, equal in ((1000, True), (1001, False), (512, False)):
        cos, _ = table(3, 997, None, context)
        angles = torch.arange(997, 1000, dtype=torch.float64)[:, None, None] * frequencies
        assert torch.allclose(cos, angles.cos(), rtol=0, atol=1e-9) == equal


def test_a_model_with_longrope_chooses_the_factors_by_the_length_of_the_pass(
    tmp_path: Path,
) -> None:
    scaling, _ = CASES["longrope, long"]
    scaling = scaling | {"original_max_position_embeddings": 16}
    settings = hf_config(FAMILY, scaling) | {"max_position_embeddings": 64}
    torch.manual_seed(3)
    config = LlamaConfig(**{key: value for key, value in settings.items() if key != "model_type"})
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = our_model(tmp_path)
    found = {}
    for length in (16, 17):
        tokens = torch.arange(length)[None] % 9
        found[length] = our_logits(ours, tokens)
        with torch.no_grad():
            assert error(found[length], theirs(tokens).logits) < LIMIT
    assert not torch.allclose(found[16], found[17][:, :16], atol=1e-3)
    # In decoding, the rule is that of the longest sequence for all lengths.
    tokens = torch.arange(32)[None] % 9
    cache = StaticKVCache(ours.config, ours.mesh, 1, 32)
    with torch.no_grad():
        parts = [ours(part, cache=cache)[..., :9] for part in tokens.split([8, 1, 23], 1)]
        expected = theirs(tokens).logits
    assert error(torch.cat(parts).transpose(0, 1), expected) < LIMIT
