"""A router replay makes a second pass on several ranks use the experts of the first."""

from typing import Any

import pytest
import torch
from megatron_models import GPT, GPTConfig, Placement, RouterReplay
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.testing import WorkerPool

MODEL = GPTConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    ffn_hidden_size=24,
    vocab_size=50,
    max_position_embeddings=16,
    num_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=12,
    init_method_std=0.3,
)
TOKENS = torch.arange(24).view(2, 12) * 7 % 50


def observed(mesh: Mesh, config: GPTConfig, seed: int, given: Any, options: Any) -> Any:
    """Returns the experts that a pass used, and its losses.

    Args:
        mesh: Mesh of this rank.
        config: The model.
        seed: Seed of the weights.
        given: Experts to replay; None to record.
        options: Of the placement.
    """
    model = GPT(config, Placement(mesh, dtype=torch.float64, **options), seed=seed)
    used = RouterReplay(given)
    with torch.no_grad():
        losses = model(TOKENS, labels=TOKENS, router_replay=used)
    return used.experts, losses


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param({"tp": 2}, {}, id="tp2"),
        pytest.param(
            {"tp": 2, "ep": 2, "etp": 1},
            {"sequence_parallel": True, "dispatcher": "alltoall"},
            id="tp2-sp-ep2",
        ),
    ],
)
def test_ranks_replay_what_one_rank_recorded(
    worker_pool: WorkerPool, layout: dict[str, int], options: dict[str, Any]
) -> None:
    recorded, _ = observed(Mesh.single(), MODEL, 1, None, {})
    free, expected_free = observed(Mesh.single(), MODEL, 2, None, {})
    assert not all(torch.equal(free[layer], recorded[layer]) for layer in recorded)
    _, expected = observed(Mesh.single(), MODEL, 2, recorded, {})
    assert not torch.allclose(expected, expected_free)
    degrees = ParallelLayout(**layout, dp=1)
    for experts, _ in worker_pool.run_mesh(degrees, observed, MODEL, 1, None, options):
        assert all(torch.equal(experts[layer], recorded[layer]) for layer in recorded)
    for _, losses in worker_pool.run_mesh(degrees, observed, MODEL, 2, recorded, options):
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)


def test_layers_have_experts_of_their_own(worker_pool: WorkerPool) -> None:
    """A replay off by one layer gives other losses."""
    recorded, expected = observed(Mesh.single(), MODEL, 1, None, {})
    shifted = {0: recorded[1], 1: recorded[0]}
    _, losses = observed(Mesh.single(), MODEL, 1, shifted, {})
    assert not torch.allclose(losses, expected)
