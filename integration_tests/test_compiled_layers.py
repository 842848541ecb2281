"""Layers that are compiled one by one (`--compile-scope layer`), with equal ones sharing code."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from megatron_models import (
    GPTConfig,
    LowPrecisionConfig,
    Placement,
    gpt_chunks,
    low_precision_placement,
)
from megatron_models.low_precision import product as products
from megatron_optim import Optimizer, OptimizerConfig
from megatron_parallel import DataParallelConfig, Mesh, ParallelLayout
from megatron_parallel.sharding import collect_states
from megatron_parallel.testing import WorkerPool
from megatron_train import engine as step_engine
from megatron_train.cuda_graphs import GraphBackend
from megatron_train.engine import StepEngine
from megatron_train.split_compiler import SplitBackend
from megatron_train.tasks.gpt import GPTTask
from megatron_train.tasks.task import MicroBatch
from rerun import Rerun

CONFIG = GPTConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=97,
    max_position_embeddings=16,
    normalization="RMSNorm",
    position_embedding_type="rope",
    activation="swiglu",
)

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


def engine(
    mesh: Mesh, hidden_dropout: float, data_parallel=None, attention_dropout=0.0, **options
) -> StepEngine:
    """Returns the engine of a small model in float64."""
    stages = gpt_chunks(CONFIG, Placement(mesh, dtype=torch.float64), seed=5)
    task = GPTTask(stages, None, hidden_dropout=hidden_dropout, attention_dropout=attention_dropout)
    return StepEngine(task, mesh, data_parallel, **options)


def batch(seed: int) -> MicroBatch:
    """Returns a random micro-batch."""
    tokens = torch.randint(97, (2, 17), generator=torch.Generator().manual_seed(seed))
    fields = {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.ones(2, 16),
        "sample_ids": torch.tensor([7, 9]),
    }
    return MicroBatch.from_fields(fields, token_field="tokens")


def gradients(one: StepEngine, seed: int = 0) -> tuple[float, dict[str, torch.Tensor]]:
    """Returns the loss sum and all gradients of a step."""
    batches = [batch(seed)]
    sums = one.run(batches, one.denominators(batches), 1)
    return float(sums["lm loss"]), {n: g.clone() for n, g in one.stages.gradients().items()}


@pytest.fixture(scope="module")
def patient_pool():
    """Yields ranks that wait while others compile."""
    with WorkerPool(2, timeout=180, collective_timeout=120) as pool:
        yield pool


@pytest.fixture(params=BACKENDS)
def compiler(request, monkeypatch):
    """Traces functions, and in slow tests also generates code for them, which takes much longer."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=request.param))


def test_equal_layers_share_one_graph_and_nothing_else_changes(compiler):
    drops = {"hidden_dropout": 0.25, "attention_dropout": 0.25}
    loss, expected = gradients(engine(Mesh.single(), **drops))
    compiled = engine(Mesh.single(), **drops, compile=True, compile_scope="layer")
    found, actual = gradients(compiled)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 2  # one of four layers, one of the output layer with the loss
    assert found == pytest.approx(loss, rel=1e-13)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-11, atol=1e-13, msg=name)


def test_recorded_layers_equal_plain_ones():
    """Each step has other dropout, batches and weights; the passes of a layer are recorded once."""
    torch.compiler.reset()
    capture, found = Rerun(), []
    graphs = GraphBackend(capture, 1, inner="eager")
    for options in ({}, {"compile": True, "compile_scope": "layer", "graphs": graphs}):
        one, losses = engine(Mesh.single(), 0.25, **options), []
        optimizer = Optimizer(one.stages, OptimizerConfig(lr=1e-2))
        for step in range(1, 4):
            batches = [batch(10 * step + number) for number in range(2)]
            sums = one.run(batches, one.denominators(batches), step)
            losses += [float(sums["lm loss"]), float(optimizer.step(1e-2).grad_norm)]
            one.stages.zero()
        losses.append(float(one.evaluate(batches)["lm loss"]))
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-12)
    passes = 2 * (CONFIG.num_layers + 1)  # of the layers, and of the output layer with the loss
    assert (capture.recorded, capture.replayed) == (passes, 3 * passes)


def by_layer_in_halves(mesh: Mesh) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Returns the loss and all gradients of a step of four micro-batches, plain and compiled."""
    found = []
    batches = [batch(seed) for seed in range(4)]
    with patch.object(step_engine, "SplitBackend", partial(SplitBackend, "eager")):
        for options in ({}, {"compile": True, "compile_scope": "layer"}):
            one = engine(mesh, 0.0, schedule="zb-v", **options)
            sums = one.run(batches, one.denominators(batches), 1)
            gradients = {name: g.clone() for name, g in one.stages.gradients().items()}
            found.append((float(sums["lm loss"]), gradients))
    return found


def test_compiled_layers_run_backward_passes_in_halves(patient_pool):
    layout = ParallelLayout(pp=2, dp=1, vpp=2, stage_mapping="v")
    for plain, compiled in patient_pool.run_mesh(layout, by_layer_in_halves):
        assert compiled[0] == pytest.approx(plain[0], rel=1e-13)
        for name, gradient in plain[1].items():
            torch.testing.assert_close(compiled[1][name], gradient, rtol=1e-11, atol=1e-13)


def by_layer_with_fsdp(mesh: Mesh, backend: str) -> list[tuple[float, float]]:
    """Returns loss and sum of squared gradients with and without compiled layers."""
    found = []
    with patch("torch.compile", partial(torch.compile, backend=backend)):
        for options in ({}, {"compile": True, "compile_scope": "layer"}):
            one = engine(mesh, 0.25, DataParallelConfig(use_torch_fsdp2=True), **options)
            loss, shards = gradients(one, seed=mesh.axis("dp").index)
            found.append((loss, sum(float(g.square().sum()) for g in shards.values())))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_of_fully_sharded_models_are_compiled(patient_pool, backend):
    layout = ParallelLayout(dp=2)
    for plain, compiled in patient_pool.run_mesh(layout, by_layer_with_fsdp, backend):
        assert compiled == pytest.approx(plain, rel=1e-11)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scope", ["layer", pytest.param("stage", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "recipe",
    [
        "tensorwise",
        "delayed",
        *(pytest.param(r, marks=pytest.mark.slow) for r in ("blockwise", "mxfp8")),
    ],
)
def test_weights_in_few_bits_are_converted_before_compiled_code_runs(compiler, recipe, scope):
    """Compiled steps equal eager ones, after weights and scales changed between them."""
    few = LowPrecisionConfig(fp8_format="e4m3", fp8_recipe=recipe)

    def steps(**options):
        mesh = Mesh.single()
        placement = low_precision_placement(CONFIG, few, Placement(mesh, dtype=torch.float64))
        task = GPTTask(gpt_chunks(replace(CONFIG, num_layers=2), placement, seed=5), None)
        one = StepEngine(task, mesh, **options)
        found = []
        for number in range(2):
            batches = [batch(number), batch(number + 3)]
            sums = one.run(batches, one.denominators(batches), 1)
            found.append(float(sums["lm loss"]))
            grads = {name: grad.clone() for name, grad in one.stages.gradients().items()}
            histories = collect_states(task.stages)
            assert bool(histories) == (recipe == "delayed")
            for history in histories.values():
                assert (history.observed() > 0).all()
                history.step()
            found += [float(history.value.sum()) for history in histories.values()]
            one.stages.zero()
            with torch.no_grad():
                for name, parameter in one.stages.parameters.items():
                    parameter.sub_(grads[name], alpha=0.5)
            found.append(float(one.evaluate(batches)["lm loss"]))
        return found, grads

    losses, expected = steps()
    assert len(set(losses)) == len(losses)
    with patch.object(products.LowPrecisionProduct, "converted", counting(calls := [])):
        found, grads = steps(compile=True, compile_scope=scope)
    assert found == pytest.approx(losses, rel=1e-12)
    for name, gradient in expected.items():
        torch.testing.assert_close(grads[name], gradient, rtol=1e-9, atol=1e-12)
    # Compiled code converts no weight: 2 steps and 2 evaluations of 2 layers with 4 products.
    assert calls.count("weight") == 4 * 8
    if scope == "layer":  # one graph of both layers, and one of output and loss; in both modes
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


def counting(calls: list[str]):
    own = products.LowPrecisionProduct.converted

    def counted(self, matrix, operand, **wanted):
        if not torch.compiler.is_compiling() or operand == "weight":
            calls.append(operand)
        return own(self, matrix, operand, **wanted)

    return counted


def by_layer_with_late_weights(mesh: Mesh) -> list[tuple[list[float], list[int]]]:
    """Returns losses of two steps, and how many gathers were waited for where each layer began."""
    found = []
    shares = DataParallelConfig(
        use_distributed_optimizer=True, overlap_param_gather=True, ddp_bucket_size=4000
    )
    with patch("torch.compile", partial(torch.compile, backend="eager")):
        for options in ({}, {"compile": True, "compile_scope": "layer"}):
            torch.compiler.reset()
            torch._dynamo.utils.counters.clear()
            one = engine(mesh, 0.25, shares, **options)
            optimizer = Optimizer(one.stages, OptimizerConfig(lr=1e-2))
            losses, waited = [], []
            for step in range(2):
                losses.append(gradients(one, seed=mesh.axis("dp").index)[0])
                optimizer.step(1e-2)
                one.stages.zero()
                if step == 0:
                    shards = one.stages.shards[0]
                    for layer in one.task.stages[0].layers.values():
                        layer.register_forward_pre_hook(
                            lambda *_, s=shards, into=waited: into.append(len(s.gathers()))
                        )
            found.append((losses, waited))
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    return found


def test_compiled_layers_wait_for_their_own_weights(patient_pool):
    for plain, compiled in patient_pool.run_mesh(
        ParallelLayout(dp=2), by_layer_with_late_weights, timeout=120
    ):
        assert compiled[0] == pytest.approx(plain[0], rel=1e-12)
        assert plain[0][0] != plain[0][1]
        first, *_, last = waited = compiled[1]
        assert waited == sorted(waited)
        assert first < last  # later gathers were in flight when the first layer began


def by_layer_with_experts(mesh: Mesh) -> list[tuple[list[float], int]]:
    """Returns losses and sums of squared gradients of two steps, and the number of graphs."""
    config = replace(CONFIG, num_layers=1, num_experts=4, moe_aux_loss_coeff=0.01)
    found = []
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with patch("torch.compile", partial(torch.compile, backend="eager")):
        for options in ({}, {"compile": True, "compile_scope": "layer"}):
            place = Placement(mesh, dtype=torch.float64, dispatcher="alltoall")
            task = GPTTask(gpt_chunks(config, place, seed=5), None)
            one, values, graphs = StepEngine(task, mesh, **options), [], []
            for step in range(2):
                loss, computed = gradients(one, seed=mesh.axis("dp").index + 2 * step)
                values += [loss, sum(float(g.square().sum()) for g in computed.values())]
                one.stages.zero()
                graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            found.append((values, graphs))
    return found


def test_experts_with_changing_numbers_of_rows_compute_between_graphs(patient_pool):
    layout = ParallelLayout(dp=2, ep=2)
    for plain, compiled in patient_pool.run_mesh(layout, by_layer_with_experts):
        assert compiled[0] == pytest.approx(plain[0], rel=1e-12)
        assert plain[0][0] != plain[0][2]
        # Rows of experts change from batch to batch, but nothing is compiled again.
        first, second = compiled[1]
        assert 0 < first == second
