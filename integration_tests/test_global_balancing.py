"""The load-balancing loss of a step counts the selections of all data-parallel ranks.

Layouts with data parallelism cannot equal one rank, since the micro-batches that count so far are
others. The truth is the definition, in float64: the logits of every micro-batch on one rank, the
selections of all micro-batches so far on all ranks, and autograd.
"""

from typing import Any

import pytest
import torch
from megatron_models import GPT, GPTConfig, Placement
from megatron_parallel import AuxiliaryLosses, Mesh, ParallelLayout, RecomputeConfig
from megatron_parallel.context_parallel import ContextSplit
from megatron_parallel.testing import WorkerPool
from torch import Tensor

COEFFICIENT, TOP, LENGTH, SAMPLES = 3.0, 2, 8, 2
MODEL = GPTConfig(
    num_layers=3,
    hidden_size=16,
    num_attention_heads=2,
    ffn_hidden_size=24,
    vocab_size=50,
    max_position_embeddings=16,
    num_experts=4,
    moe_router_topk=TOP,
    moe_ffn_hidden_size=12,
    moe_layer_freq="[1,0,1]",
    moe_global_aux_loss_coeff=COEFFICIENT,
    init_method_std=0.3,
)
NAME = "global_load_balancing_loss"
STEPS = 2
"""Micro-batches of a rank."""
TOTAL = 1000.0
"""Denominator of all losses."""


def tokens(rank: int, step: int) -> Tensor:
    """Returns a micro-batch; those of one rank use few tokens, so that loads of ranks differ."""
    count = SAMPLES * LENGTH
    return (torch.arange(count).view(SAMPLES, LENGTH) * (step + 1)) % 5 + 11 * rank


def trained(mesh: Mesh, options: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """Returns this rank's sum of the loss, and gradients of its micro-batches."""
    model = GPT(MODEL, Placement(mesh, dtype=torch.float64, **options), seed=1)
    cp, rank = mesh.axis("cp"), mesh.axis("dp").index
    split = ContextSplit.zigzag(LENGTH, cp.size)
    collected = AuxiliaryLosses({NAME: TOTAL})
    for step in range(STEPS):
        batch = split.take(tokens(rank, step), cp.index)
        losses = model(batch, labels=batch, auxiliary_losses=collected)
        (losses.sum() / TOTAL).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(collected.sums[NAME]), found


def truth(ranks: int) -> tuple[float, dict[str, Tensor]]:
    """Returns the sum of the loss over all ranks, and all gradients, by the definition."""
    model = GPT(MODEL, Placement(Mesh.single(), dtype=torch.float64), seed=1)
    routers = {name: part for name, part in model.named_modules() if name.endswith(".router")}
    assert len(routers) == 2
    inputs: dict[str, Tensor] = {}
    for name, router in routers.items():
        router.register_forward_pre_hook(
            lambda _, given, name=name: inputs.__setitem__(name, given[0])
        )
    reported = objective = torch.zeros((), dtype=torch.float64)
    chosen = {name: torch.zeros(4, dtype=torch.float64) for name in routers}
    for step in range(STEPS):
        logits: list[dict[str, Tensor]] = []
        for rank in range(ranks):
            batch = tokens(rank, step)
            objective = objective + model(batch, labels=batch).sum() / TOTAL
            logits.append({n: inputs[n] @ routers[n].weight.t() for n in routers})
            for name in routers:
                best = logits[-1][name].topk(TOP).indices.flatten()
                chosen[name] += best.bincount(minlength=4)
        for of_rank in logits:
            for name, each in of_rank.items():
                fractions = chosen[name] / chosen[name].sum()
                loss = 4 * (fractions * each.softmax(-1).mean(0)).sum() * len(each)
                reported = reported + loss.detach() / len(routers)
                objective = objective + COEFFICIENT * loss / TOTAL
    objective.backward()
    return float(reported), {name: p.grad for name, p in model.named_parameters()}


UNIFORM = RecomputeConfig(granularity="full", method="uniform", num_layers=1)
ALL = {"dispatcher": "alltoall"}


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param({"dp": 2}, {}, id="dp2"),
        pytest.param({"dp": 2}, {"recompute": UNIFORM}, id="dp2-uniform"),
        pytest.param({"dp": 2, "tp": 2}, {"sequence_parallel": True}, id="tp2-sp-dp2"),
        pytest.param({"dp": 2, "ep": 2}, {**ALL, "recompute": UNIFORM}, id="dp2-ep2-uniform"),
        pytest.param({"dp": 2, "cp": 2}, {"recompute": UNIFORM}, id="cp2-dp2-uniform"),
    ],
)
def test_ranks_count_the_selections_of_all_ranks(
    worker_pool: WorkerPool, layout: dict[str, int], options: dict[str, Any]
) -> None:
    value, gradients = truth(layout["dp"])
    alone, _ = truth(1)
    found = worker_pool.run_mesh(ParallelLayout(**layout), trained, options)
    assert sum(own for own, _ in found) == pytest.approx(value, rel=1e-12)
    assert value != pytest.approx(alone * layout["dp"], rel=1e-3)
    for name, expected in gradients.items():
        parts = [own[name] for _, own in found if name in own]
        if parts[0].shape != expected.shape or ("router" not in name and "tp" in layout):
            continue  # cut over ranks, or the same on several
        torch.testing.assert_close(sum(parts), expected, rtol=0, atol=1e-12)
