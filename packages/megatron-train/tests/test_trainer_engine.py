"""What the engine of a trainer compiles, fuses and counts, and how a faulty step is described."""

import math
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from megatron_models import Measure
from megatron_optim import Optimizer, OptimizerConfig
from megatron_parallel import DataParallelConfig, Mesh, ParallelLayout
from megatron_parallel.context_parallel import ContextSplit
from megatron_train import engine as module
from megatron_train.callbacks.stopping import StopAt
from megatron_train.engine import BatchTotals, StepEngine
from megatron_train.errors import TrainError
from megatron_train.observation import NO_REPORTS, Reports
from megatron_train.split_compiler import SplitBackend
from megatron_train.tasks.task import MicroBatch

from .conftest import BigramTask
from .test_accounting import spoil


@pytest.mark.parametrize(
    ("settings", "compiled", "reason"),
    [
        ({"gradient_accumulation_fusion": False}, True, "--no-gradient-accumulation-fusion"),
        (
            {"use_torch_fsdp2": True},
            True,
            "torch's fully_shard (--use-torch-fsdp2) sums gradients itself",
        ),
        ({}, True, "compiled code (--compile) has no gradient buffers to add to"),
    ],
)
def test_gradients_are_not_fused_for_one_reason(settings, compiled, reason):
    found = StepEngine._fuse(SimpleNamespace(), DataParallelConfig(**settings), compiled)
    assert str(found) == f"gradient accumulation is not fused: {reason}"


def test_gradients_of_products_are_fused_unless_a_setting_excludes_it():
    """An embedding has no product of matrices."""
    found = StepEngine(BigramTask(), Mesh.single()).fusion
    assert str(found) == "gradient accumulation is fused for 0 of 0 weight matrices"


@pytest.fixture
def compiled(monkeypatch):
    """Returns what is compiled, instead of compiling it: stages, or the backend of layers."""
    found = []
    monkeypatch.setattr(module, "compile_stages", lambda stages: found.append(list(stages)))
    monkeypatch.setattr(
        module, "compile_layers", lambda stages, units, device, backend: found.append(backend)
    )
    return found


def test_layers_are_compiled_for_graphs_or_for_a_backward_pass_in_halves(compiled, monkeypatch):
    graphs = SimpleNamespace()
    for options in ({}, {"compile": True}, {"compile": True, "compile_scope": "layer"}):
        StepEngine(BigramTask(), Mesh.single(), graphs=graphs, **options)
    stages, backend = compiled
    assert [type(stage).__name__ for stage in stages] == ["Embedding"] and backend is graphs
    halves = SimpleNamespace(splits_backward=True)
    monkeypatch.setattr(module, "find_schedule_kind", lambda name: halves)
    StepEngine(BigramTask(), Mesh.single(), graphs=graphs, compile=True, compile_scope="layer")
    assert isinstance(compiled[-1], SplitBackend)


@pytest.mark.parametrize("given", ["gpipe", None])
def test_a_schedule_is_that_of_the_layout_unless_it_is_given(monkeypatch, given):
    settings = {}
    monkeypatch.setattr(module, "PipelineEngine", lambda *_, **more: settings.update(more))
    StepEngine(BigramTask(), Mesh.single(), schedule=given)
    assert settings["schedule"] == (given or "1f1b")


def test_graphs_begin_with_each_step_and_not_with_evaluations(make_steps):
    begun, batches = [], next(make_steps(2, 3)(0))
    graphs = SimpleNamespace(begin_step=lambda: begun.append("step"))
    engine = StepEngine(BigramTask(), Mesh.single(), graphs=graphs)
    engine.evaluate(batches)
    assert begun == []
    for number in (1, 2):
        engine.run(batches, engine.denominators(batches), number)
        engine.stages.zero()
        assert begun == ["step"] * number


# -- reports of layers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counters", "reports", "counted", "largest"),
    [
        ({"tokens": 1}, NO_REPORTS, True, False),
        ({}, Reports({"tokens": 1}, {}), True, False),
        ({}, Reports({}, {"tokens": 1}), False, True),
        ({"tokens": 1}, Reports({}, {"tokens": 1}), True, True),
        ({}, NO_REPORTS, False, False),
    ],
)
def test_layers_report_counts_or_maxima_or_both(make_steps, counters, reports, counted, largest):
    """The layer counts its tokens, and reports the largest of them."""
    task, batches = BigramTask(), next(make_steps(2, 3)(0))
    task.counters, task.measures = counters, lambda counts: {}

    def report(stage, positional, given):
        losses = given.pop("auxiliary_losses", None)
        assert (losses is None) == (not counted and not largest)
        if counted:
            losses.count("tokens", torch.tensor([given["input"].numel()]).double())
        if largest:
            losses.maximum("tokens", given["input"].max()[None].double())
        return positional, given

    task.stages[0].register_forward_pre_hook(report, with_kwargs=True)
    engine = StepEngine(task, Mesh.single())
    engine.run(batches, engine.denominators(batches), 1, None, reports)
    most = max(int(batch.fields["tokens"].max()) for batch in batches)
    assert engine.counts == ({"tokens": 36} if counted else {})
    assert engine.maxima == ({"tokens": most} if largest else {})


# -- a pool of ranks -------------------------------------------------------------------------------


def documents(kept, ranks):
    """Returns a row of a pool with some tokens that have a loss, split over some ranks."""
    mask = (torch.arange(8) < kept).double()[None]
    fields = {"tokens": torch.zeros(1, 8, dtype=torch.int64), "loss_mask": mask}
    split = None if ranks is None else ContextSplit.zigzag(8, ranks)
    return MicroBatch(fields, samples=2, tokens=8, context_split=split)


@pytest.fixture
def pool(monkeypatch):
    """Returns a function that makes the engine of a rank of two whose other rank has numbers."""
    summed = []

    def start(*others):
        engine = object.__new__(StepEngine)
        engine.mesh = Mesh(ParallelLayout(dp=2, hybrid_cp=True), 0)
        engine.task, engine._per_token = BigramTask(), True

        def add(total, axis, *, purpose):
            summed.append(axis.size)
            total.add_(torch.tensor(others, dtype=torch.float64))

        monkeypatch.setattr(module, "all_reduce", add)
        return engine, summed

    return start


def test_a_batch_of_a_pool_is_the_sum_of_what_its_ranks_count(pool):
    engine, summed = pool(1.0, 40.0, 400.0)
    found = engine.batch_totals([documents(3, 1), documents(8, 2)])
    assert found == BatchTotals(samples=5, tokens=56, flops=560.0) and summed == [2]


def test_tokens_that_ranks_share_count_once(pool):
    engine, _ = pool(6.0)
    rows = [documents(3, 1), documents(8, 2), documents(1, None)]
    assert engine.evaluation_denominators(rows) == {"lm loss": 3 + 8 / 2 + 1 + 6}
    assert engine.denominators(rows) == {"lm loss": 14}
    engine, _ = pool(0.0)
    assert engine.evaluation_denominators([documents(0, 2)]) == {"lm loss": 0}
    assert engine.denominators([documents(0, 2)]) == {"lm loss": 1}  # so that the loss is 0


@pytest.mark.parametrize(
    ("layout", "axis"),
    [
        (ParallelLayout(dp=2), "dp"),
        (ParallelLayout(dp=2, tp=2, pp=2), "dp"),
        (ParallelLayout(dp=1, cp=2), "dp_cp"),
        (ParallelLayout(dp=2, hybrid_cp=True), "dp_cp"),
    ],
)
def test_losses_are_summed_over_ranks_that_share_a_sequence(layout, axis):
    engine = object.__new__(StepEngine)
    engine.mesh = Mesh(layout, 0)
    assert engine._data == axis


def test_micro_batches_are_copied_to_a_device_other_than_the_host():
    def own(kind):
        mesh = SimpleNamespace(device=torch.device(kind))
        return StepEngine._own(SimpleNamespace(mesh=mesh, _cuts=False), batch)

    batch = documents(3, None)
    assert own("cpu") is batch
    assert {field.device.type for field in own("meta").fields.values()} == {"meta"}


# -- the end of a run ------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "stops"), [(2, True), (3, False)])
def test_a_request_to_stop_after_the_last_step_is_none(make_trainer, at, stops):
    trainer = make_trainer(train_iters=3, callbacks=[StopAt(at, None)])
    assert (trainer.run() is not None) == stops and trainer.iteration == at


def faulty(make_trainer, change, **options):
    """Returns the error of a run whose first step is changed after its backward pass."""
    trainer = make_trainer(check_for_nan=True, **options)
    run = trainer.engine.run

    def changed(*words):
        sums = run(*words)
        return change(trainer.engine, sums) or sums

    trainer.engine.run = changed
    with pytest.raises(TrainError) as caught:
        trainer.run()
    return str(caught.value)


REMEDY = (
    "lower --lr, lengthen the warm-up, inspect the data of this step, or skip such steps with "
    "--no-check-for-nan-in-loss-and-grad"
)


def test_a_norm_that_overflows_is_named_if_no_gradient_does(make_trainer):
    def enlarge(engine, sums):
        engine.stages.gradients()["weight"].fill_(1e200)

    assert faulty(make_trainer, enlarge) == (
        f"step 1: the gradient is finite, but its norm is inf; {REMEDY}"
    )


class Losing(BigramTask):
    """A task of which two layers count something, and one of them may lose rows."""

    counters = MappingProxyType({})

    def measures(self, counts):
        return {
            2: [Measure("rows", "lost rows", counts["rows"][0], "largest", "raise the bound")],
            5: [Measure("load", "largest load", counts["rows"][0], "largest")],
        }


def test_layers_that_make_a_step_unusable_have_remedies_of_their_own(make_trainer):
    engine = StepEngine(Losing(), Mesh.single())
    optimizer = Optimizer(engine.stages, OptimizerConfig(lr=0.1))

    def lose(engine, sums):
        engine.counts = {"rows": torch.tensor([6.0]).double()}
        return {name: value * math.inf for name, value in sums.items()}

    found = faulty(make_trainer, lose, engine=engine, optimizer=optimizer)
    assert found == "step 1: layer 2: 6 lost rows, raise the bound; lm loss is inf"


def test_a_step_with_two_faults_names_both(make_trainer):
    trainer = make_trainer(check_for_nan=True)
    trainer.micro_batches = spoil(trainer.micro_batches, {0})
    with pytest.raises(TrainError) as caught:
        trainer.run()
    first, second, *rest = str(caught.value).removeprefix("step 1: ").split("; ")
    assert first == "lm loss is inf" and second.startswith("the gradient of 'weight'")
    assert "; ".join(rest) == REMEDY
