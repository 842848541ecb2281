"""What planted defects change and what ranks record, without training several ranks."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron_models.components.moe.module import MoE
from megatron_optim import OptimizerConfig
from megatron_parallel import GradientBuffers, Mesh, Sharding, View
from megatron_parallel.context_parallel import ContextSplit
from megatron_parallel.data_parallel.bucket import Bucket
from megatron_parallel.tensor_parallel import linear
from megatron_train.cli.main import build_parser
from megatron_train.config.described_run import resolve_run
from megatron_train.engine import StepEngine
from megatron_train.prove import proof as proof_module
from megatron_train.prove.defects import CATALOGUE
from megatron_train.prove.planting import planting
from megatron_train.prove.proof import prove
from megatron_train.prove.record import (
    RecordingOptimizer,
    make_asymmetric,
    record_run,
    watch_routes,
)
from megatron_train.prove.shrink import shrink_run
from torch import nn

from .conftest import BigramTask
from .test_prove_compare import RANKS, WHOLE, changed


def planted(name, mesh=None):
    return planting({each.name: each.plant for each in CATALOGUE}[name], mesh)


def axis(size=1, index=0, name=""):
    return SimpleNamespace(size=size, index=index, name=name)


# -- defects ---------------------------------------------------------------------------------------


def test_the_gradient_of_an_input_stays_that_of_a_rank():
    x, true = torch.arange(6.0), linear.start_all_reduce
    with planted("input-not-summed"):
        assert linear.start_all_reduce(x, axis(3, 1)).wait() is x
        assert linear.start_reduce_scatter(x, axis(3, 1)).wait().tolist() == [2.0, 3.0]
    assert linear.start_all_reduce is true


@pytest.mark.parametrize(
    ("name", "summed"), [("norms-not-summed", ["embedding"]), ("tied-not-summed", ["tp"])]
)
def test_a_sum_over_one_kind_of_ranks_is_left_out(name, summed, monkeypatch):
    seen = []
    monkeypatch.setattr(
        Bucket, "reduce_extra_axes", lambda self: seen.extend(a.name for a in self.extra_axes)
    )
    with planted(name):
        Bucket.reduce_extra_axes(
            SimpleNamespace(extra_axes=(axis(name="tp"), axis(name="embedding")))
        )
    assert seen == summed


def test_one_bucket_is_not_summed(monkeypatch):
    launched = []
    monkeypatch.setattr(Bucket, "launch", lambda self, largest: launched.append(self.label))
    buckets = [SimpleNamespace(label=text, launched=False) for text in ("1 of 12", "11 of 12")]
    with planted("bucket-left-out"):
        for bucket in buckets:
            Bucket.launch(bucket, None)
    assert launched == ["11 of 12"] and [b.launched for b in buckets] == [True, False]


def test_each_rank_of_a_sequence_has_the_mask_of_the_next():
    split, mask = ContextSplit.zigzag(12, 3), torch.arange(12.0)[None]
    parts = [split.take(mask, rank) for rank in range(3)]
    with planted("mask-of-next-rank"):
        for rank, following in enumerate((1, 2, 0)):
            assert torch.equal(split.take(mask, rank), parts[following])
            assert torch.equal(split.take(mask.long(), rank), parts[rank].long())  # tokens stay


def test_micro_batches_are_confused_or_left_out(monkeypatch):
    monkeypatch.setattr(StepEngine, "denominators", lambda self, batches: batches)
    monkeypatch.setattr(StepEngine, "run", lambda self, *arguments: arguments)
    monkeypatch.setattr(StepEngine, "_loss", lambda self, output, batch: (output, batch))
    with planted("micro-batch-not-counted"):
        assert StepEngine.denominators(None, [1, 2, 3]) == [1, 2]
    with planted("mask-of-first-micro-batch"):
        for batches in ("ab", "cd"):  # two steps
            assert StepEngine.run(None, batches, 5) == (batches, 5)
            found = [StepEngine._loss(None, number, one) for number, one in enumerate(batches)]
            assert found == [(0, batches[0]), (1, batches[0])]


def test_experts_have_wrong_gradients_or_places(monkeypatch):
    monkeypatch.setattr(
        GradientBuffers,
        "gradients",
        lambda self: {"mlp.experts.up": torch.tensor(6.0), "norm": torch.tensor(6.0)},
    )
    mesh = SimpleNamespace(axis=lambda name: axis(3 if name == "ep" else 1))
    with planted("experts-divided", mesh):
        assert GradientBuffers.gradients(None) == {"mlp.experts.up": 2.0, "norm": 6.0}
    experts = Sharding((8, 4), "expert_tp", 1, experts=True)
    ranks = [SimpleNamespace(axis=lambda name, i=i: axis(4, i)) for i in range(4)]
    with planted("experts-in-other-order"):
        held = [list(experts.expert_indices(rank)) for rank in ranks]
    assert held == [[6, 7], [4, 5], [2, 3], [0, 1]]


def test_every_copy_counts_as_the_first():
    with planted("norm-counts-copies"):
        assert Sharding((4,)).replica(None) == Sharding((4,)).replica(None, sharded=True) == 0


# -- records ---------------------------------------------------------------------------------------


def view(tensor, shape=None, offsets=None):
    shape = tuple(tensor.shape) if shape is None else shape
    offsets = (0,) * tensor.ndim if offsets is None else offsets
    return View(tensor, shape, offsets, tuple(tensor.shape), 0)


def test_gains_and_biases_move_by_values_of_their_names_in_every_layout():
    def moved(states=(), **views):
        stages = SimpleNamespace(states=dict(states), views=lambda: views)
        make_asymmetric(SimpleNamespace(stages=stages))

    gain, half, other = (torch.ones(n, dtype=torch.float64) for n in (4000, 1000, 4000))
    weight, biases, lora = (torch.zeros(2, 300, dtype=torch.float64) for _ in range(3))
    expert, history = torch.zeros(4), torch.zeros(3)
    states = {
        "expert": SimpleNamespace(of_parameter=False, value=expert),
        "history": SimpleNamespace(of_parameter=True, value=history),
    }
    views = {"expert": [view(expert)], "gain": [view(gain)], "weight": [view(weight)]}
    views |= {"other": [view(other)], "experts_bias": [view(biases)], "lora_b": [view(lora)]}
    moved(states, **views)
    assert gain.mean() == pytest.approx(1.0, abs=0.015) and gain.std() == pytest.approx(
        0.2, rel=0.1
    )
    assert not torch.allclose(gain, other)
    assert biases.count_nonzero() == lora.count_nonzero() == 600
    assert weight.count_nonzero() == expert.count_nonzero() == 0
    assert (history == history[0]).all() and history[0] > 5.0
    moved(gain=[view(half, (4000,), (1500,))])  # a rank's shard of the same parameter
    assert torch.equal(half, gain[1500:2500])


class Routed(MoE):
    """A layer of experts without experts, whose router sends tokens where a test needs them."""

    def __init__(self):
        nn.Module.__init__(self)
        self.router = nn.Identity()


def mesh_of(tp=(1, 0), cp=(1, 0), dp=(1, 0), pool=False):
    axes = {"tp": axis(*tp), "cp": axis(*cp), "dp": axis(*dp)}
    return SimpleNamespace(axis=axes.get, layout=SimpleNamespace(hybrid_cp=pool))


def routes_of(mesh, length, *rows):
    """Returns what is recorded of a router that sends tokens to experts once for each of `rows`."""
    layer = Routed()
    stage = SimpleNamespace(layers={"2": SimpleNamespace(), "3": SimpleNamespace(mlp=layer)})
    routes = watch_routes([stage, SimpleNamespace()], mesh, length)
    for experts in rows:
        layer.router(SimpleNamespace(experts=experts))
    return {key: experts.flatten().tolist() for key, experts in routes.items()}


def test_routes_are_kept_by_layer_micro_batch_and_slice():
    one, two = torch.arange(4).view(4, 1), torch.arange(10, 14).view(4, 1)
    # The first of two ranks holds the tokens 0, 1, 6 and 7 of 8; samples of dp alternate.
    assert routes_of(mesh_of(cp=(2, 0), dp=(3, 1)), 8, one, two) == {
        (3, 1, 0): [0, 1],
        (3, 1, 6): [2, 3],
        (3, 4, 0): [10, 11],
        (3, 4, 6): [12, 13],
    }
    assert routes_of(mesh_of(tp=(2, 1), cp=(2, 0)), 8, one[:2]) == {(3, 0, 6): [0, 1]}
    assert routes_of(mesh_of(tp=(4, 2)), 8, one) == {(3, 0, 4): [0, 1, 2, 3]}  # of two samples
    assert routes_of(mesh_of(pool=True), 8, one) == {}


def test_tokens_that_fill_the_last_rank_are_not_kept():
    """10 tokens are 3 on each of 4 ranks, and 1 on the last."""
    rows = torch.arange(3).view(3, 1)
    assert routes_of(mesh_of(tp=(4, 2)), 10, rows) == {(3, 0, 6): [0, 1, 2]}
    assert routes_of(mesh_of(tp=(4, 3)), 10, rows) == {(3, 0, 9): [0]}


@pytest.mark.parametrize("every_step", [False, True])
def test_gradients_of_all_steps_or_of_the_first_and_last_are_recorded(make_trainer, every_step):
    with pytest.raises(TypeError, match="the trainer has a Optimizer, not a RecordingOptimizer"):
        record_run(make_trainer(), 6)
    engine = StepEngine(BigramTask(), Mesh.single())
    optimizer = RecordingOptimizer(engine.stages, OptimizerConfig(lr=0.1, clip_grad=1e-3))
    assert optimizer.ends() == ([], [])
    trainer = make_trainer(engine=engine, optimizer=optimizer, train_iters=3)
    found = record_run(trainer, 6, every_step=every_step)
    assert len(found.losses) == len(found.norms) == 3 and found.routes == {}
    norms = [math.sqrt(sum(float(g.square().sum()) for *_, g in one)) for one in found.gradients]
    assert norms == pytest.approx(found.norms if every_step else found.norms[::2])
    assert len(set(norms)) == len(norms)
    ((name, offsets, weights),) = found.parameters
    assert (name, offsets) == ("weight", (0, 0))
    assert torch.equal(weights, engine.stages.parameters[name])


# -- proofs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    sizes = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --world-size 2"
    words = ["prove", "gpt", *sizes.split(), "--distributed-timeout-minutes", "3"]
    return shrink_run(resolve_run(build_parser().parse_args(words)), 3, 2)


class Pool:
    """Processes whose ranks have recorded something; each training has 3 steps."""

    def __init__(self, ranks=RANKS):
        self.ranks, self.calls = ranks, []

    def run_mesh(self, layout, function, run, defect, file, *, timeout):
        self.calls.append((layout.world_size, run, defect))
        assert timeout >= 60
        with Path(file).open("ab") as steps:
            steps.write(b"...")
        return [WHOLE] if layout.world_size == 1 else self.ranks

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.calls.append("ended")


def test_a_proof_compares_the_layout_with_one_rank(small):
    seen, pool = [], Pool()
    found = prove(small, progress=lambda *counts: seen.append(counts), pool=pool)
    assert pool.calls == [(1, small.one_rank, None), (2, small.run, None)]
    assert seen[-1] == (6, 6)
    assert found.equal and found.first is None and found.parameters == 8
    assert 0.0 <= found.seconds < 60.0
    wrong = prove(small, "bucket-left-out", pool=(pool := Pool(changed(1, 1, "b", 0.25))))
    assert [defect for *_, defect in pool.calls] == [None, "bucket-left-out"]
    assert not wrong.equal and (wrong.first.step, wrong.first.ranks) == (2, (1,))


def test_processes_of_a_proof_have_the_time_limit_of_the_run_and_end_with_it(small, monkeypatch):
    made = []

    def start(count, *, collective_timeout):
        made.append((count, collective_timeout, Pool()))
        return made[0][2]

    monkeypatch.setattr(proof_module, "WorkerPool", start)
    assert prove(small).equal
    ((count, seconds, pool),) = made
    assert (count, seconds, pool.calls[-1]) == (2, 180, "ended")


def test_ranks_of_a_large_gradient_are_those_beyond_its_relative_limit():
    """5e-7 of 1000 is within 1e-9 of it, and 0.001 is not."""
    large = [("a", (0,), torch.tensor([1000.0, 0.0], dtype=torch.float64))]
    whole = replace(WHOLE, losses=[1.0], norms=[1.0], gradients=[large], parameters=large)
    ranks = [replace(whole, gradients=[[("a", (0,), large[0][2] + more)]]) for more in (5e-7, 1e-3)]
    found = proof_module.first_deviation(ranks, whole)
    assert (found.size, found.ranks) == (pytest.approx(1e-6), (1,))
