"""Rotary positions with three axes: text, the angles of each section, and cached passes."""

import math
from dataclasses import replace

import pytest
import torch
from megatron_kernels import rope_tables
from megatron_models import (
    GPT,
    ConfigError,
    GPTConfig,
    HybridConfig,
    Placement,
    StaticKVCache,
)
from megatron_models.components.rotary.module import RotaryTable
from megatron_parallel import Mesh

ROPE = GPTConfig(
    num_layers=3,
    hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=61,
    max_position_embeddings=16,
    position_embedding_type="rope",
    no_rope_freq="2",
)
AXES = replace(ROPE, position_embedding_type="mrope", mrope_section=(1, 3, 2))
DOUBLE = Placement(Mesh.single(), dtype=torch.float64)


def drawn(*shape: int, below: int) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(5))


HYBRID = HybridConfig(
    num_layers=3,
    hidden_size=48,
    num_attention_heads=4,
    vocab_size=61,
    max_position_embeddings=16,
    position_embedding_type="rope",
    hybrid_layer_pattern="M*-",
    mamba_num_groups=2,
    mamba_head_dim=8,
    mamba_state_dim=4,
    init_method_std=0.2,
)


@pytest.mark.parametrize("rope", [ROPE, HYBRID], ids=["gpt", "hybrid"])
def test_text_has_the_logits_of_rotary_positions(rope: GPTConfig | HybridConfig) -> None:
    tokens = drawn(2, 11, below=61)
    axes = replace(rope, position_embedding_type="mrope", mrope_section=(1, 3, 2))
    expected, model = (GPT(config, DOUBLE).eval() for config in (rope, axes))
    one = torch.stack([torch.arange(11), torch.arange(11) + 4])
    three = one.expand(3, -1, -1)
    with torch.no_grad():
        assert torch.equal(model(tokens), expected(tokens))
        shifted = expected(tokens, positions=one)
        assert torch.equal(model(tokens, positions=one), shifted)
        assert torch.equal(model(tokens, positions=three), shifted)
        for axis in range(3):
            changed = three.clone()
            changed[axis, :, 5:] -= 3
            assert not torch.allclose(model(tokens, positions=changed), shifted, rtol=1e-6)


@pytest.mark.parametrize(
    ("sections", "interleaved", "axes"),
    [
        ((1, 3, 2), False, (0, 1, 1, 1, 2, 2)),
        ((2, 2, 2), True, (0, 1, 2, 0, 1, 2)),
        ((4, 1, 1), True, (0, 1, 2, 0, 0, 0)),
        ((5, 0, 1), True, (0, 0, 2, 0, 0, 0)),
    ],
)
def test_each_pair_turns_by_its_axis(
    sections: tuple[int, ...], interleaved: bool, axes: tuple[int, ...]
) -> None:
    config = replace(AXES, mrope_section=sections, mrope_interleaved=interleaved)
    rotation = config.rotary_spec(12)
    assert rotation is not None
    positions = drawn(3, 2, 7, below=16)
    cos, sin = RotaryTable(rotation, 16, DOUBLE)(7, 0, positions)
    assert cos.shape == sin.shape == (7, 2, 6)
    for pair, axis in enumerate(axes):
        for row in range(2):
            for token in range(7):
                angle = int(positions[axis, row, token]) * 10000.0 ** (-2 * pair / 12)
                assert math.isclose(cos[token, row, pair], math.cos(angle), abs_tol=1e-12)
                assert math.isclose(sin[token, row, pair], math.sin(angle), abs_tol=1e-12)


def test_scaling_by_length_reaches_every_axis() -> None:
    scaled = {
        "rope_scaling_type": "dynamic",
        "rope_scaling_original_length": 4,
        "rope_scaling_factor": 2.0,
    }
    plain, axes = replace(ROPE, **scaled).rotary_spec(12), replace(AXES, **scaled).rotary_spec(12)
    assert plain is not None and axes is not None
    positions = drawn(3, 2, 7, below=8)
    found = RotaryTable(axes, 16, DOUBLE)(7, 0, positions, 8)
    expected = [RotaryTable(plain, 16, DOUBLE)(7, 0, each, 8) for each in positions]
    unscaled = rope_tables(positions[0], torch.ones(6, dtype=torch.float64), torch.float64)
    for part, table in enumerate(found):
        assert torch.equal(table[..., :1], expected[0][part][..., :1])
        assert torch.equal(table[..., 1:4], expected[1][part][..., 1:4])
        assert torch.equal(table[..., 4:], expected[2][part][..., 4:])
        assert not torch.equal(table, unscaled[part])


def test_cached_passes_take_positions_of_three_axes() -> None:
    model = GPT(AXES, DOUBLE).eval()
    tokens, positions = drawn(2, 9, below=61), drawn(3, 2, 9, below=16)
    cache = StaticKVCache(AXES, model.mesh, 2, 9, dtype=torch.float64)
    with torch.no_grad():
        whole = model(tokens, positions=positions)
        parts = [
            model(tokens[:, a:b], positions=positions[..., a:b], cache=cache)
            for a, b in ((0, 4), (4, 5), (5, 9))
        ]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)


def test_axes_that_a_model_does_not_have_are_refused() -> None:
    tokens, three = drawn(2, 9, below=61), drawn(3, 2, 9, below=16)
    with pytest.raises(ConfigError, match=r"\[3, 2, 9\]; this model takes \[b, s\], without"):
        GPT(ROPE, DOUBLE)(tokens, positions=three)
    with pytest.raises(ConfigError, match=r"\[2, 2, 9\]; .* takes \[b, s\] or \[3, b, s\]$"):
        GPT(AXES, DOUBLE)(tokens, positions=three[:2])


def test_a_record_keeps_the_sections() -> None:
    assert GPTConfig.from_dict({**AXES.to_dict(), "mrope_section": [1, 3, 2]}) == AXES
