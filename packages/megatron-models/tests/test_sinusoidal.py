"""Sinusoidal positions: the formula, and passes over parts of a sequence."""

import math

import torch
from megatron_models import GPT, GPTConfig, Placement, StaticKVCache
from megatron_models.components.embedding.module import sinusoids
from megatron_parallel import Mesh


def test_channels_are_those_of_the_formula() -> None:
    positions = torch.tensor([[0, 3, 700], [1, 2, 5]])
    found = sinusoids(positions, 7)
    assert found.shape == (3, 2, 7)
    for sequence in range(2):
        for index in range(3):
            p = int(positions[sequence, index])
            for channel in range(7):
                angle = p / 10000 ** (channel // 2 * 2 / 7)
                expected = math.cos(angle) if channel % 2 else math.sin(angle)
                assert math.isclose(
                    float(found[index, sequence, channel]), expected, rel_tol=1e-9, abs_tol=1e-12
                )


def test_cached_passes_continue_the_positions() -> None:
    config = GPTConfig(
        num_layers=2,
        hidden_size=24,
        num_attention_heads=4,
        vocab_size=61,
        max_position_embeddings=16,
        position_embedding_type="sinusoidal",
    )
    assert "embedding.position.weight" not in config.parameters()
    model = GPT(config, Placement(Mesh.single(), dtype=torch.float64)).eval()
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    cache = StaticKVCache(config, model.mesh, 2, 9, dtype=torch.float64)
    with torch.no_grad():
        whole = model(tokens)
        parts = [model(tokens[:, a:b], cache=cache) for a, b in ((0, 4), (4, 5), (5, 9))]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)
        # Positions of the caller replace the indices, and matter.
        given = torch.arange(9).expand(2, -1)
        assert torch.equal(model(tokens, positions=given), whole)
        assert not torch.allclose(model(tokens, positions=given + 3), whole, rtol=1e-6)
