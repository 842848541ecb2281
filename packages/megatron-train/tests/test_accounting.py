"""Numbers that a run reports equal numbers computed by hand."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from megatron_optim import WeightDecaySchedule
from megatron_parallel import Mesh, ParallelLayout
from megatron_train.callbacks.log_line import LogLine
from megatron_train.callbacks.recording import Recorder
from megatron_train.engine import BatchTotals, StepEngine
from megatron_train.errors import TrainError
from megatron_train.finiteness import MAX_NAN_STEPS
from megatron_train.metrics.console import Console
from megatron_train.metrics.peak import Peak
from megatron_train.metrics.records import read_records
from megatron_train.step_report import StepReport, StepValues

from .conftest import BigramTask


class Lines(Console):
    def __init__(self):
        super().__init__()
        self.lines = []

    def print_line(self, text):
        self.lines.append(text)


def report(iteration, **changes):
    """Returns the report of a step, by default of 4 samples and 40 tokens in half a second."""
    values = {
        "iteration": iteration,
        "consumed_samples": 4 * iteration,
        "learning_rate": 0.25,
        "seconds": 0.5,
        "samples": 4,
        "tokens": 40,
        "flops": 8e12,
    }
    measured = {
        "sums": {"lm loss": 60.0, "z loss": 3.0},
        "denominators": {"lm loss": 30.0, "z loss": 40.0},
        "grad_norm": 1.5,
        "updated": True,
        "finite": True,
    }
    measured |= {name: changes.pop(name) for name in measured if name in changes}
    return StepReport(values=StepValues(**measured), **{**values, **changes})


def skipped(iteration, loss=math.nan):
    return report(
        iteration,
        sums={"lm loss": loss, "z loss": 3.0},
        updated=False,
        finite=False,
        grad_norm=loss,
    )


def spoil(steps, numbers):
    """Returns the steps, in which those of the given numbers, from 0, have no finite loss."""

    def read(consumed):
        for number, batches in enumerate(steps(consumed)):
            if number in numbers:
                batches[0].fields["loss_mask"][0, 0] = math.inf
            yield batches

    return read


def by_hand(trainer, batches):
    """Returns the sum of losses over unmasked tokens and their number, computed by torch."""
    total = count = 0.0
    weight = trainer.task.stages[0].weight.detach()
    for batch in batches:
        fields = batch.fields
        logits, mask = weight[fields["tokens"]], fields["loss_mask"].bool()
        chosen = torch.log_softmax(logits, -1).gather(-1, fields["labels"][..., None])[..., 0]
        total, count = total - chosen[mask].sum().item(), count + mask.sum().item()
    return total, count


# -- evaluations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("per_token", [True, False])
def test_an_evaluation_is_the_mean_over_all_unmasked_tokens(make_trainer, make_steps, per_token):
    trainer = make_trainer()
    trainer.engine = StepEngine(trainer.task, Mesh.single(), per_token=per_token)
    steps = [next(make_steps(1, 2)(0)), next(make_steps(2, 3)(7)), next(make_steps(1, 1)(5))]
    parts = [by_hand(trainer, batches) for batches in steps]
    expected = sum(total for total, _ in parts) / sum(count for _, count in parts)
    assert trainer.evaluate(steps)["lm loss"] == pytest.approx(expected, rel=1e-14)
    means = [total / count for total, count in parts]
    assert abs(expected - sum(means) / 3) > 1e-4  # a mean of means would differ


def test_an_evaluation_uses_evaluation_mode_and_restores_training_mode(make_trainer, make_steps):
    trainer, modes = make_trainer(), []
    (stage,) = trainer.task.stages
    stage.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    trainer.evaluate([next(make_steps(2, 1)(0))])
    trainer.step(trainer.micro_batches(0))
    assert modes == [False, True, True, True]


def test_an_evaluation_omits_a_loss_without_tokens(make_trainer, make_steps):
    trainer, batches = make_trainer(), next(make_steps(2, 3)(0))
    assert trainer.evaluate([]) == {}
    for batch in batches:
        batch.fields["loss_mask"].zero_()
    assert trainer.evaluate([batches]) == {}


# -- samples, schedules and steps that are not finite ----------------------------------------------


def test_a_skipped_step_has_consumed_its_samples(make_trainer):
    trainer = make_trainer(train_iters=3)
    steps = spoil(trainer.micro_batches, {1})(0)
    reports = [trainer.step(steps) for _ in range(3)]
    assert [r.updated for r in reports] == [True, False, True]
    assert [r.consumed_samples for r in reports] == [6, 12, 18]
    assert [r.learning_rate for r in reports] == [trainer.learning_rate.at(n) for n in (0, 6, 12)]
    assert (trainer.iteration, trainer.consumed_samples) == (3, 18)
    # The next step takes the samples after the skipped ones.
    assert torch.equal(
        next(steps)[0].fields["tokens"], next(make_trainer().micro_batches(18))[0].fields["tokens"]
    )


def test_weight_decay_depends_on_samples_consumed_before_the_step(make_trainer, monkeypatch):
    schedule = WeightDecaySchedule(start=0.0, end=1.0, samples=60, style="linear")
    trainer, decays = make_trainer(weight_decay=schedule, train_iters=4), []
    step = trainer.optimizer.step
    monkeypatch.setattr(
        trainer.optimizer,
        "step",
        lambda lr, decay, *rest, **more: decays.append(decay) or step(lr, decay, *rest, **more),
    )
    steps = spoil(trainer.micro_batches, {1})(0)  # a skipped step counts
    for _ in range(4):
        trainer.step(steps)
    assert decays == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_steps_that_are_not_finite_are_counted_over_a_resume(make_trainer):
    first = make_trainer(train_iters=100)
    bad = spoil(first.micro_batches, range(1, 100))(0)
    for _ in range(MAX_NAN_STEPS):
        first.step(bad)  # one finite step, nine others
    state = json.loads(json.dumps(first.state()))
    assert (state["iteration"], state["consumed_samples"], state["nan_steps"]) == (10, 60, 9)

    second = make_trainer(train_iters=100)
    second.load_state(state)
    with pytest.raises(TrainError, match="no finite loss and gradient in 10 steps up to step 11"):
        second.step(spoil(second.micro_batches, {0})(60))
    third = make_trainer(train_iters=100)
    third.load_state(state)
    third.step(third.micro_batches(60))  # a finite step resets the count
    bad = spoil(third.micro_batches, range(100))(66)
    for _ in range(MAX_NAN_STEPS - 1):
        third.step(bad)
    with pytest.raises(TrainError, match="up to step 21"):
        third.step(bad)


# -- several ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "copies"),
    [
        (ParallelLayout(dp=3), 3),
        (ParallelLayout(tp=2, dp=2), 2),
        (ParallelLayout(cp=2, dp=2), 2),
        (ParallelLayout(cp=4), 1),
        (ParallelLayout(tp=2, pp=2), 1),
    ],
)
def test_the_extent_of_a_step_is_that_of_the_global_batch(make_steps, layout, copies):
    """Checks that ranks of axes other than dp, which read the same samples, count once."""
    layout = layout.resolve(layout.tp * layout.cp * layout.pp * (layout.dp or 1))
    engine = SimpleNamespace(mesh=Mesh(layout, 1), task=BigramTask())  # no process group is used
    extent = StepEngine.batch_totals(engine, next(make_steps(2, 3)(0)))
    assert extent == BatchTotals(samples=6 * copies, tokens=36 * copies, flops=360.0 * copies)


@pytest.mark.parametrize("ranks", [1, 4])
def test_numbers_of_a_log_line(ranks):
    """Checks that tokens/s are for the whole run and FLOP/s for one GPU."""
    console, calls = Lines(), []
    peak = Peak(64e12, "")
    callback = LogLine(
        console, 4, peak=peak, throughput=True, listeners=[lambda *call: calls.append(call)]
    )
    mesh = SimpleNamespace(world_size=ranks)
    trainer = SimpleNamespace(train_iters=8, task=None, engine=SimpleNamespace(mesh=mesh))
    inexact = report(3, sums={"lm loss": 30.0, "z loss": 8.0}, seconds=1.5, tokens=20, flops=16e12)
    clipped = report(4, updated=False, grad_norm=2.5, learning_rate=0.125, samples=6)
    for one in (report(1), skipped(2), inexact, clipped):
        callback.on_step(trainer, one)
    (line,) = console.lines
    # 3 s, 140 tokens and 40e12 FLOPs in total; losses without those of step 2.
    rate = 40 / 3 / ranks
    assert line.partition("] ")[2] == (
        "iteration        4/       8 | consumed samples:           16 |"
        " elapsed time per iteration (ms): 750.0 |"
        f" throughput per GPU (TFLOP/s/GPU): {rate:.1f} |"
        " learning rate: 1.250000E-01 | global batch size:     6 |"
        f" lm loss: {150 / 90:.6E} | z loss: {14 / 120:.6E} |"
        " loss scale: 1.0 | grad norm: 2.500 |"
        " number of skipped iterations:   2 | number of nan iterations:   1 |"
        f" tokens/s: 46.7 | MFU: {100 * rate / 64:.1f} % |"
    )
    assert calls == [(4, {"lm loss": 150 / 90, "z loss": 14 / 120})]
    for iteration in range(5, 9):  # values of the previous interval do not count
        callback.on_step(trainer, report(iteration))
    assert f"lm loss: {2:.6E}" in console.lines[1]
    assert "skipped iterations:   0 | number of nan iterations:   0 |" in console.lines[1]


# -- state and records -----------------------------------------------------------------------------


def test_an_unfinished_interval_of_the_log_line_is_kept_without_its_times():
    """Checks that counts and sums continue after a resume, and rates cover the new process."""
    trainer = SimpleNamespace(
        train_iters=8, task=None, engine=SimpleNamespace(mesh=SimpleNamespace(world_size=1))
    )
    first, second = (LogLine(Lines(), 4, peak=None) for _ in range(2))
    for one in (report(1, seconds=100.0), skipped(2), report(3, updated=False)):
        first.on_step(trainer, one)
    state = json.loads(json.dumps(first.state()))
    assert state == {
        "skipped": 2,
        "nan": 1,
        "sums": {"lm loss": 120.0, "z loss": 6.0},
        "denominators": {"lm loss": 60.0, "z loss": 80.0},
    }
    second.load_state(state)
    second.on_step(trainer, report(4, sums={"lm loss": 0.0, "z loss": 6.0}))
    (line,) = second._console.lines
    assert "(ms): 500.0 |" in line and "tokens/s: 80.0 |" in line
    assert "throughput" not in line and "MFU" not in line  # as by default
    assert f"lm loss: {120 / 90:.6E} | z loss: {0.1:.6E}" in line
    assert "skipped iterations:   2 | number of nan iterations:   1 |" in line


def test_a_trainer_restores_the_state_of_each_callback(make_trainer):
    def callbacks():
        return [LogLine(Lines(), 100, peak=None), SimpleNamespace(name="", load_state=None)]

    first, second = make_trainer(callbacks=callbacks()), make_trainer(callbacks=callbacks())
    first.callbacks[0].on_step(first, report(1))
    second.load_state(first.state())
    assert first.state() == second.state()
    assert list(first.state()["callbacks"]) == ["log_line"]
    bare = make_trainer()
    bare.load_state(first.state())  # callbacks may have been removed or added
    second.load_state({**first.state(), "callbacks": {}})
    assert second.state() == first.state()


def test_records_contain_exact_numbers(tmp_path):
    trainer = SimpleNamespace(iteration=2, stopped=None, task=None)
    recorder = Recorder(tmp_path, {"layout": "1 rank"}, Console())
    recorder.on_start(trainer)
    recorder.on_step(trainer, report(3, sums={"lm loss": 1.0, "z loss": 3.0}, updated=False))
    recorder.on_step(trainer, skipped(4))
    recorder.on_step(trainer, report(5))
    recorder.record_log_line(4, {"lm loss": 0.1 + 0.2})
    recorder.record_validation(4, {"lm loss": 2.5, "z loss": math.inf})
    recorder.record_test(4, {"lm loss": 3.5})
    trainer.iteration = 4
    recorder.on_end(trainer)
    records = read_records(tmp_path / "metrics.jsonl")
    step = {
        "kind": "train",
        "iteration": 3,
        "consumed_samples": 12,
        "lm loss": 1 / 30,
        "z loss": 0.075,
        "learning_rate": 0.25,
        "grad_norm": 1.5,
        "updated": False,
        "seconds": 0.5,
        "tokens": 40,
    }
    lost = {"iteration": 4, "consumed_samples": 16, "lm loss": None, "grad_norm": None}
    last = {"iteration": 5, "consumed_samples": 20, "lm loss": 2.0, "updated": True}
    assert records.train == [step, {**step, **lost}, {**step, **last}]
    assert records.log == [{"kind": "log", "iteration": 4, "lm loss": 0.1 + 0.2}]
    evaluated = {"kind": "validation", "iteration": 4, "lm loss": 2.5, "z loss": None}
    assert records.validation == [evaluated]
    assert records.events == [
        {"kind": "event", "event": "start", "iteration": 2, "layout": "1 rank"},
        {"kind": "event", "event": "test", "iteration": 4, "lm loss": 3.5},
        {"kind": "event", "event": "end", "iteration": 4, "reason": "done"},
    ]
