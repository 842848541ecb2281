"""The training loop on one rank, compared with torch and with itself."""

import json
import math
from dataclasses import replace

import pytest
import torch
from megatron_optim import (
    LearningRateSchedule,
    ParameterAverages,
    SpikeConfig,
    SpikeDetector,
    WeightDecaySchedule,
)
from megatron_parallel import Mesh
from megatron_train.callbacks.evaluation import Evaluation
from megatron_train.callbacks.log_line import LogLine
from megatron_train.callbacks.stopping import StopAt
from megatron_train.engine import StepEngine
from megatron_train.errors import TrainError
from megatron_train.metrics.console import Console
from megatron_train.metrics.peak import Peak
from megatron_train.trainer import Callback

from .conftest import BigramTask


class Listener(Callback):
    def __init__(self):
        self.reports = []

    def on_step(self, trainer, report):
        self.reports.append(report)

    @property
    def losses(self):
        return [report.losses["lm loss"] for report in self.reports]


class Lines(Console):
    def __init__(self):
        super().__init__()
        self.lines = []

    def print_line(self, text):
        self.lines.append(text)


def weights(trainer):
    return trainer.task.stages[0].weight.detach().clone()


@pytest.mark.parametrize(("micro", "accumulation"), [(1, 6), (2, 3), (3, 2)])
def test_accumulation_equals_one_big_batch(make_trainer, micro, accumulation):
    whole, parts = make_trainer(6, 1), make_trainer(micro, accumulation)
    a, b = Listener(), Listener()
    whole.callbacks, parts.callbacks = [a], [b]
    whole.run()
    parts.run()
    assert b.losses == pytest.approx(a.losses, rel=1e-13)
    assert torch.allclose(weights(whole), weights(parts), rtol=0, atol=1e-13)
    norms = [(x.grad_norm, y.grad_norm) for x, y in zip(a.reports, b.reports, strict=True)]
    assert all(y == pytest.approx(x, rel=1e-12) for x, y in norms)


def test_the_loss_is_the_sum_over_unmasked_tokens_divided_by_their_number(make_trainer):
    trainer = make_trainer(2, 3)
    batches = next(trainer.micro_batches(0))
    logits = torch.cat([trainer.task.stages[0](b.fields["tokens"]) for b in batches]).flatten(0, 1)
    labels = torch.cat([b.fields["labels"] for b in batches]).flatten()
    mask = torch.cat([b.fields["loss_mask"] for b in batches]).flatten().bool()
    expected = torch.nn.functional.cross_entropy(logits[mask], labels[mask])
    report = trainer.step(iter([batches]))
    assert report.losses["lm loss"] == pytest.approx(expected.item(), rel=1e-14)
    assert report.denominators["lm loss"] == mask.sum()
    assert (report.samples, report.tokens, report.flops) == (6, 36, 360.0)


def test_a_continued_run_has_bit_identical_losses(make_trainer):
    whole, first, second = make_trainer(), make_trainer(), make_trainer()
    everything, before, after = Listener(), Listener(), Listener()
    whole.callbacks = [everything]
    first.callbacks = [before, StopAt(3, None)]
    second.callbacks = [after]
    whole.run()
    stop = first.run()
    assert stop is not None and stop.reason == "--exit-interval 3"
    second.load_state(first.state())
    second.optimizer.load_scalars(first.optimizer.scalars())
    pairs = zip(first.optimizer.views().items(), second.optimizer.views().values(), strict=True)
    for (_, source), target in pairs:
        target[0].tensor.copy_(source[0].tensor)
    with torch.no_grad():
        second.task.stages[0].weight.copy_(weights(first))
    second.run()
    assert before.losses + after.losses == everything.losses
    assert torch.equal(weights(second), weights(whole))


def test_schedules_depend_on_the_samples_consumed_before_the_step(make_trainer):
    listener = Listener()
    trainer = make_trainer(callbacks=[listener])
    trainer.run()
    rates = [report.learning_rate for report in listener.reports]
    assert rates == [trainer.learning_rate.at(6 * step) for step in range(8)]
    assert [report.consumed_samples for report in listener.reports] == list(range(6, 49, 6))


def test_embeddings_may_have_a_schedule_of_their_own(make_trainer):
    own = LearningRateSchedule(max_lr=0.5, decay_samples=50)
    trainer, rates = make_trainer(decoupled_learning_rate=own, train_iters=2), []
    step = trainer.optimizer.step

    def noting(rate, decay, decoupled, **more):
        rates.append((rate, decoupled))
        return step(rate, decay, decoupled, **more)

    trainer.optimizer.step = noting
    trainer.run()
    assert rates == [(trainer.learning_rate.at(n), own.at(n)) for n in (0, 6)]
    assert make_trainer().decoupled_learning_rate == make_trainer().learning_rate


def test_listed_steps_read_their_samples_and_change_nothing(make_trainer):
    console, listener, whole = Lines(), Listener(), Listener()
    trainer = make_trainer(callbacks=[listener, LogLine(console, 100, peak=None)])
    trainer._iterations_to_skip = frozenset({1, 4, 8})
    make_trainer(callbacks=[whole]).run()
    before, seen = weights(trainer), []
    for number in (1, 2):  # the first step changes nothing, the second does
        trainer.train_iters = number
        trainer.run()
        seen.append(torch.equal(weights(trainer), before))
    trainer.train_iters = 8
    trainer.run()
    assert seen == [True, False]
    steps = [report.iteration for report in listener.reports]
    assert steps == [2, 3, 5, 6, 7] and (trainer.iteration, trainer.consumed_samples) == (8, 48)
    assert [r.consumed_samples for r in listener.reports] == [6 * step for step in steps]
    assert [r.learning_rate for r in listener.reports] == [
        whole.reports[step - 1].learning_rate for step in steps
    ]
    assert console.lines == [
        f"step {step} is in --iterations-to-skip: 6 samples are not trained on"
        for step in (1, 4, 8)
    ]
    assert trainer.optimizer.scalars()["steps"] == 5


def test_a_trainer_may_continue_with_saved_schedules(make_trainer):
    first, second = make_trainer(), make_trainer()
    second.learning_rate = replace(first.learning_rate, max_lr=2.0, decay_style="cosine")
    second.weight_decay = WeightDecaySchedule(0.2, 0.3, 7, "linear")
    state = json.loads(json.dumps(second.state()))
    first.load_schedules(state)
    for name in ("learning_rate", "decoupled_learning_rate", "weight_decay"):
        assert getattr(first, name) == getattr(second, name)
    del state["schedules"]["weight_decay"]["end"]
    with pytest.raises(TrainError, match=r"the schedule weight_decay is \{'samples': 7"):
        first.load_schedules(state)
    del state["schedules"]
    with pytest.raises(TrainError, match="no record of its schedules; set them with flags"):
        first.load_schedules(state)


def test_a_step_that_is_not_finite_is_skipped_and_counted(make_trainer):
    console, listener = Lines(), Listener()
    trainer = make_trainer(callbacks=[listener, LogLine(console, 2, peak=None)], train_iters=2)
    good = make_trainer(train_iters=1)
    good.run()

    def spoiled(consumed):
        for number, batches in enumerate(good.micro_batches(consumed)):
            if number == 1:
                batches[1].fields["loss_mask"][0, 0] = math.inf
            yield batches

    trainer.micro_batches = spoiled
    trainer.run()
    assert [(r.updated, r.finite) for r in listener.reports] == [(True, True), (False, False)]
    assert torch.equal(weights(trainer), weights(good))
    assert f"lm loss: {listener.losses[0]:.6E}" in console.lines[0]
    assert "skipped iterations:   1 | number of nan iterations:   1 |" in console.lines[0]
    assert all(p.grad is None or not p.grad.any() for p in trainer.task.stages[0].parameters())


def test_an_infinite_loss_with_a_finite_gradient_changes_nothing(make_trainer):
    trainer = make_trainer()
    batches = next(trainer.micro_batches(0))
    first = batches[0].fields
    token, label = first["tokens"][0, 0], first["labels"][0, 0]
    with torch.no_grad():
        trainer.task.stages[0].weight[token, label] = -math.inf
    before = weights(trainer)
    report = trainer.step(iter([batches]))
    assert report.losses["lm loss"] == math.inf
    assert not report.updated and not report.finite
    assert torch.equal(weights(trainer), before)


def test_a_run_without_finite_steps_fails(make_trainer):
    trainer = make_trainer(train_iters=100)
    with torch.no_grad():
        trainer.task.stages[0].weight.fill_(math.nan)
    with pytest.raises(TrainError, match="no finite loss and gradient in 10 steps up to step 10"):
        trainer.run()


def test_log_lines_cover_each_step_once_across_a_restart(make_trainer):
    console, listener = Lines(), Listener()
    trainer = make_trainer(callbacks=[listener, LogLine(console, 4, peak=Peak(1e15, ""))])
    trainer.run()
    peak, *lines = console.lines
    assert peak.startswith("MFU is measured against 1e+15 FLOP/s") and len(lines) == 2

    resumed = Lines()
    first = make_trainer(callbacks=[LogLine(resumed, 4, peak=None), StopAt(3, None)])
    first.run()
    assert resumed.lines == []
    second = make_trainer(callbacks=[LogLine(resumed, 4, peak=None)], train_iters=4)
    second.load_state(first.state())
    with torch.no_grad():
        second.task.stages[0].weight.copy_(weights(first))
    second.run()
    interval = listener.reports[:4]
    total = sum(report.sums["lm loss"] for report in interval)
    expected = total / sum(report.denominators["lm loss"] for report in interval)
    assert f"lm loss: {expected:.6E}" in lines[0]
    assert len(resumed.lines) == 1 and "iteration        4/       4" in resumed.lines[0]
    assert f"lm loss: {expected:.6E}" in resumed.lines[0]


def test_evaluation_uses_the_same_samples_and_changes_nothing(make_trainer, make_steps):
    console, results = Lines(), []
    source = make_steps(4, 5)
    evaluation = Evaluation(
        console,
        lambda: [next(source(1000))],
        3,
        [lambda iteration, losses: results.append((iteration, losses["lm loss"]))],
    )
    plain, evaluated = Listener(), Listener()
    make_trainer(callbacks=[plain]).run()
    trainer = make_trainer(callbacks=[evaluated, evaluation])
    trainer.run()
    assert plain.losses == evaluated.losses
    assert [iteration for iteration, _ in results] == [3, 6, 8]
    assert results[-1][1] == trainer.evaluate([next(source(1000))])["lm loss"]
    assert "validation loss at iteration 3 | lm loss value:" in console.lines[1]


def test_evaluations_use_averages_of_weights_unless_turned_off(make_trainer, make_steps):
    trainer = make_trainer(train_iters=2)
    trainer.averages = ParameterAverages(trainer.optimizer, 0.5)
    batches = [next(make_steps(2, 2)(40))]
    trainer.run()
    trained = trainer.evaluate(batches)["lm loss"]
    trainer.evaluates_averages = True
    averaged = trainer.evaluate(batches)["lm loss"]
    with torch.no_grad():
        trainer.task.stages[0].weight.copy_(trainer.averages.tensors["weight"])
    trainer.averages = None
    assert trainer.evaluate(batches)["lm loss"] == pytest.approx(averaged, rel=1e-14) != trained
    for averages, wanted, used in ((None, True, False), (object(), True, True), (1, False, False)):
        made = make_trainer(averages=averages, evaluates_averages=wanted)
        assert made.evaluates_averages == used
    assert make_trainer(averages=object()).evaluates_averages  # by default


def test_spikes_are_skipped_and_their_means_are_saved(make_trainer):
    def spikes():
        return SpikeDetector(SpikeConfig(skip_loss_spike=2.0, spike_window=1), torch.device("cpu"))

    listener = Listener()
    trainer = make_trainer(callbacks=[listener], train_iters=4, spikes=spikes())
    run = trainer.engine.run

    def spiking(batches, denominators, iteration, *rest):
        sums = run(batches, denominators, iteration, *rest)
        return {name: value * (10 if iteration == 3 else 1) for name, value in sums.items()}

    trainer.engine.run = spiking
    trainer.run()
    assert [report.updated for report in listener.reports] == [True, True, False, True]
    assert all(report.finite for report in listener.reports)
    last = listener.reports[-1]
    assert trainer.state()["spikes"] == {
        "means": [last.grad_norm, last.losses["lm loss"]],
        "updates": 3,
    }
    again = make_trainer(spikes=spikes())
    again.load_state(json.loads(json.dumps(trainer.state())))
    assert again.state()["spikes"] == trainer.state()["spikes"]
    assert "spikes" not in make_trainer().state()


def test_stop_records_the_first_reason(make_trainer):
    trainer = make_trainer(callbacks=[StopAt(2, 1e-9)])
    stop = trainer.run()
    assert stop is not None and trainer.iteration == 1
    assert stop.reason.startswith("--exit-duration-in-mins")


class Rewarded(BigramTask):
    """The bigram task with a loss named like a field."""

    losses = ("rewards",)

    def denominators(self, batches):
        return {"rewards": super().denominators(batches)["lm loss"]}

    def loss(self, output, batch):
        return {"rewards": super().loss(output, batch)["lm loss"]}


@pytest.mark.parametrize("per_token", [True, False])
def test_a_field_may_have_the_name_of_a_loss(make_trainer, make_steps, per_token):
    def trained(field):
        engine = StepEngine(Rewarded(), Mesh.single(), per_token=per_token)
        plain = next(make_steps(2, 3)(0))
        batches = [batch.with_fields(**{field: torch.tensor(4.0)}) for batch in plain]
        denominators = engine.denominators(batches)
        sums = engine.run(batches, denominators, 1)
        return (
            denominators,
            sums,
            engine.evaluate(batches),
            engine.stages.gradients()["weight"].clone(),
        )

    *expected, gradient = trained("advantages")
    *found, same = trained("rewards")
    assert found == expected
    assert torch.equal(same, gradient)


def test_names_of_the_engines_arguments_are_refused(make_steps):
    class Taken(BigramTask):
        def stage_inputs(self, batch, stage, iteration):
            return {**super().stage_inputs(batch, stage, iteration), "auxiliary_losses": 3}

    class Twice(BigramTask):
        auxiliary_losses = ("lm loss",)

    engine = StepEngine(Taken(), Mesh.single())
    with pytest.raises(TrainError, match="task Taken gives stage 0 an argument 'auxiliary_losses'"):
        engine.run(next(make_steps(2, 3)(0)), {"lm loss": 1.0}, 1)
    with pytest.raises(TrainError, match="two losses or metrics are called 'lm loss'"):
        StepEngine(Twice(), Mesh.single())
