"""Steps by Transformer Engine on two tensor-parallel ranks equal those on one rank.

The library is a plain replacement. Without a recipe, results differ by rounding in float32. With
one, a number may be rounded to another neighbour in few bits, so that single gradients differ more.
"""

from typing import Any

import fake_transformer_engine
import pytest
import torch
from megatron_models import (
    GPTConfig,
    LowPrecisionConfig,
    Placement,
    gpt_chunks,
    low_precision_placement,
)
from megatron_parallel import Mesh, ParallelLayout, parameter_views
from megatron_parallel.testing import WorkerPool
from megatron_train.engine import StepEngine
from megatron_train.tasks.gpt import GPTTask
from megatron_train.tasks.task import MicroBatch

MODEL = GPTConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    vocab_size=50,
    max_position_embeddings=16,
    activation="swiglu",
    normalization="RMSNorm",
)
BACKENDS = {
    "linear": "transformer_engine",
    "rms_norm": "transformer_engine",
    "add_rms_norm": "separate",
}
RECIPES = {
    "plain": LowPrecisionConfig(),
    "delayed": LowPrecisionConfig(fp8_format="hybrid", fp8_amax_history_len=2),
    "tensorwise": LowPrecisionConfig(fp8_format="hybrid", fp8_recipe="tensorwise"),
    "mxfp8": LowPrecisionConfig(fp8_format="hybrid", fp8_recipe="mxfp8"),
}


def batch(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    text = torch.randint(MODEL.vocab_size, (4, 17), generator=generator)
    return {
        "tokens": text[:, :-1],
        "labels": text[:, 1:],
        "loss_mask": torch.ones(4, 16),
        "document_ids": torch.zeros(4, 16, dtype=torch.int32),
        "positions": torch.arange(16, dtype=torch.int32).expand(4, 16).contiguous(),
    }


def steps(mesh: Mesh, recipe: str, cut: bool) -> Any:
    """Returns losses, this rank's shards of gradients, histories, bytes of all-gathers,
    and what was fused.

    They are of two steps of two micro-batches with the same weights; gradients are the last ones.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake_transformer_engine.install(monkeypatch, on_cpu=True)
        placement = Placement(mesh, sequence_parallel=cut, backends=BACKENDS)
        stages = gpt_chunks(MODEL, low_precision_placement(MODEL, RECIPES[recipe], placement))
        engine = StepEngine(GPTTask(stages, None), mesh)
        losses, states = [], engine.stages.states
        for _ in range(2):
            engine.stages.zero()
            drawn = (batch(number) for number in (1, 3))
            batches = [MicroBatch.from_fields(fields, token_field="tokens") for fields in drawn]
            denominators = engine.denominators(batches)
            with mesh.counting() as traffic:
                sums = engine.run(batches, denominators, 1)
            engine.stages.update_states()
            losses.append(float(sums["lm loss"] / denominators["lm loss"]))
        views = parameter_views(engine.stages.gradients(), engine.stages.table, mesh)
        parts = [(name, v.offsets, v.tensor.clone()) for name, held in views.items() for v in held]
        values = {name: each.value for name, each in states.items()}
        return losses, parts, values, traffic.of("tp", "all_gather").nbytes, str(engine.fusion)


PART = 32 * 64 * 4
"""Bytes of a rank's part of the activations of a micro-batch, in float32."""
BYTES = {
    "plain": 2 * 15 * PART,
    "mxfp8": 2 * 15 * PART,
    "delayed": 2 * 7 * PART + 2 * 8 * PART // 4,
    "tensorwise": 2 * 7 * PART + 2 * 8 * PART // 4,
}
"""Bytes that a rank gathers in two micro-batches; what norms write in few bits is a quarter."""


@pytest.mark.parametrize("cut", [True, False], ids=["sequence-parallel", "tensor-parallel"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_equal_those_of_one_rank(worker_pool: WorkerPool, recipe: str, cut: bool) -> None:
    losses, whole, histories, *_ = steps(Mesh.single(), recipe, False)
    expected = {name: gradient for name, _, gradient in whole}
    limit = 1e-5 if recipe == "plain" else 0.05
    assert len(histories) == (8 if recipe == "delayed" else 0)
    seen = set()
    layout = ParallelLayout(tp=2, dp=1)
    for found, parts, others, gathered, fusion in worker_pool.run_mesh(layout, steps, recipe, cut):
        assert fusion.endswith("fused for 9 of 9 weight matrices"), fusion
        assert gathered == cut * BYTES[recipe], gathered
        assert found == pytest.approx(losses, rel=limit / 50)
        for name, offsets, gradient in parts:
            seen.add(name)
            box = tuple(slice(o, o + n) for o, n in zip(offsets, gradient.shape, strict=True))
            truth = expected[name][box]
            assert (gradient - truth).norm() <= limit * truth.norm(), name
        for name, history in histories.items():
            torch.testing.assert_close(others[name], history, rtol=1e-3, atol=0)
    assert seen == expected.keys()
