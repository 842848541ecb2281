"""A router replay makes a second pass on several ranks use the experts of the first."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from megatron_models import GPT, GPTConfig, Placement, RouterReplay
from megatron_parallel import Mesh, ParallelLayout, RecomputeConfig
from megatron_parallel.collectives import all_gather
from megatron_parallel.context_parallel import ContextSplit
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
UNIFORM = RecomputeConfig(granularity="full", method="uniform", num_layers=1)
SELECTIVE = RecomputeConfig(granularity="selective", modules=("moe",))


@dataclass
class Pass:
    """What one pass computed on a rank: experts by layer, losses of its tokens, gradients."""

    experts: dict[int, torch.Tensor]
    losses: torch.Tensor | None
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def observed(mesh: Mesh, config: GPTConfig, seed: int, given: Any, options: Any) -> Pass:
    """Runs a forward pass, and with options for it a backward pass.

    Args:
        mesh: Mesh of this rank.
        config: The model.
        seed: Seed of the weights.
        given: Experts of all tokens to replay; None to record.
        options: Of the placement.
    """
    model = GPT(config, Placement(mesh, dtype=torch.float64, **options), seed=seed)
    cp, pp = mesh.axis("cp"), mesh.axis("pp")
    split = ContextSplit.zigzag(TOKENS.shape[1], cp.size)
    tokens = split.take(TOKENS, cp.index)
    if given is not None:
        given = {layer: split.take(experts, cp.index) for layer, experts in given.items()}
    used = RouterReplay(given)
    with torch.set_grad_enabled("recompute" in options):
        if model.first and model.last:
            losses = model(tokens, labels=tokens, router_replay=used)
        else:
            losses = staged(model, tokens, pp, used)
    if losses is not None and losses.requires_grad:
        losses.sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return Pass(used.experts, losses.detach(), gradients)
    return Pass(used.experts, losses)


def staged(model: GPT, tokens: Any, pp: Any, used: RouterReplay) -> torch.Tensor | None:
    """Returns the losses on the second of two stages, and None on the first."""
    sent = torch.zeros(tokens.shape[1], len(tokens), MODEL.hidden_size, dtype=torch.float64)
    if model.first:
        sent = model(tokens, router_replay=used)
    received = all_gather(sent, pp).chunk(2)[0]
    return model(received, labels=tokens, router_replay=used) if model.last else None


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param({"tp": 2}, {}, id="tp2"),
        pytest.param(
            {"tp": 2, "ep": 2, "etp": 1},
            {"sequence_parallel": True, "dispatcher": "alltoall"},
            id="tp2-sp-ep2",
        ),
        pytest.param({"cp": 2}, {}, id="cp2"),
        pytest.param({"cp": 2, "ep": 2}, {"dispatcher": "alltoall"}, id="cp2-ep2"),
        pytest.param({"pp": 2}, {}, id="pp2"),
        pytest.param({"tp": 2, "cp": 2}, {"sequence_parallel": True}, id="tp2-sp-cp2"),
    ],
)
def test_ranks_replay_what_one_rank_recorded(
    worker_pool: WorkerPool, layout: dict[str, int], options: dict[str, Any]
) -> None:
    recorded = observed(Mesh.single(), MODEL, 1, None, {}).experts
    free = observed(Mesh.single(), MODEL, 2, None, {})
    assert not all(torch.equal(free.experts[layer], recorded[layer]) for layer in recorded)
    expected = observed(Mesh.single(), MODEL, 2, recorded, {}).losses
    assert expected is not None and free.losses is not None
    assert not torch.allclose(expected, free.losses)
    degrees = ParallelLayout(**layout, dp=1)
    split = ContextSplit.zigzag(TOKENS.shape[1], degrees.cp)
    parts = [split.take(expected, rank) for rank in range(degrees.cp)]
    found = worker_pool.run_mesh(degrees, observed, MODEL, 1, None, options)
    assert {layer for each in found for layer in each.experts} == recorded.keys()
    for rank, each in enumerate(found):
        part = degrees.coordinates(rank).cp
        for layer, experts in each.experts.items():
            assert torch.equal(experts, split.take(recorded[layer], part))
    found = worker_pool.run_mesh(degrees, observed, MODEL, 2, recorded, options)
    assert any(each.losses is not None for each in found)
    for rank, each in enumerate(found):
        if each.losses is not None:
            part = parts[degrees.coordinates(rank).cp]
            torch.testing.assert_close(each.losses, part, rtol=0, atol=1e-12)


@pytest.mark.parametrize("recompute", [UNIFORM, SELECTIVE], ids=["uniform", "selective"])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2}], ids=["tp2", "cp2"])
def test_a_recomputation_replays_too(
    worker_pool: WorkerPool, layout: dict[str, int], recompute: RecomputeConfig
) -> None:
    """Experts that differ from the router's own are used in the recomputed pass as well."""
    recorded = observed(Mesh.single(), MODEL, 1, None, {}).experts
    degrees = ParallelLayout(**layout, dp=1)
    for given in (recorded, None):
        saved, again = (
            worker_pool.run_mesh(degrees, observed, MODEL, 2, given, {"recompute": plan})
            for plan in (RecomputeConfig(), recompute)
        )
        for one, other in zip(saved, again, strict=True):
            torch.testing.assert_close(other.losses, one.losses, rtol=0, atol=1e-12)
            torch.testing.assert_close(other.gradients, one.gradients, rtol=0, atol=1e-11)
            assert one.experts.keys() == other.experts.keys() == recorded.keys()
            assert all(torch.equal(one.experts[n], other.experts[n]) for n in recorded)


def test_layers_have_experts_of_their_own(worker_pool: WorkerPool) -> None:
    """A replay off by one layer gives other losses; that of the layers gives the same."""
    first = observed(Mesh.single(), MODEL, 1, None, {})
    shifted = {0: first.experts[1], 1: first.experts[0]}
    losses = observed(Mesh.single(), MODEL, 1, shifted, {}).losses
    again = observed(Mesh.single(), MODEL, 1, first.experts, {}).losses
    assert losses is not None and first.losses is not None and again is not None
    assert not torch.allclose(losses, first.losses)
    assert torch.equal(again, first.losses)
