"""Metrics of a task, and names of fields and losses, which engine and trainer do not interpret."""

import io
import math

import pytest
import torch
from megatron_optim import Optimizer, OptimizerConfig
from megatron_parallel import Mesh
from megatron_train.callbacks.evaluation import Evaluation
from megatron_train.callbacks.log_line import IntervalSums
from megatron_train.engine import StepEngine
from megatron_train.metrics.console import Console
from megatron_train.tasks.task import MicroBatch
from torch.nn import functional

from .conftest import BigramTask


class Accurate(BigramTask):
    """Reports the accuracy of the most probable next token."""

    metrics = ("accuracy",)
    value = 1.0  # of a correct prediction

    def denominators(self, batches):
        counts = super().denominators(batches)
        return counts | {"accuracy": counts["lm loss"]}

    def loss(self, output, batch):
        hits = (output.argmax(-1) == batch.fields["labels"]) * batch.fields["loss_mask"]
        return super().loss(output, batch) | {"accuracy": self.value * hits.sum()}


def trainer_of(make_trainer, task, **options):
    engine = StepEngine(task, Mesh.single(), **options)
    optimizer = Optimizer(engine.stages, OptimizerConfig(lr=0.1))
    return make_trainer(engine=engine, optimizer=optimizer)


def hits_by_hand(weight, batches):
    """Returns the share of unmasked tokens whose row is largest at the label."""
    right = count = 0
    for fields in (batch.fields for batch in batches):
        columns = (fields[name].flatten().tolist() for name in ("tokens", "labels", "loss_mask"))
        for token, label, kept in zip(*columns, strict=True):
            right += kept and int(weight[token].argmax()) == label
            count += kept
    return right / count


@pytest.mark.parametrize("per_token", [True, False])
def test_a_metric_is_a_mean_over_all_unmasked_tokens_without_gradient(make_trainer, per_token):
    plain = trainer_of(make_trainer, BigramTask(), per_token=per_token)
    trainer = trainer_of(make_trainer, Accurate(), per_token=per_token)
    batches = next(trainer.micro_batches(0))
    expected = hits_by_hand(trainer.task.stages[0].weight.detach().clone(), batches)
    report, other = trainer.step(iter([batches])), plain.step(iter([batches]))
    assert report.losses["accuracy"] == pytest.approx(expected, rel=1e-14) and 0 < expected < 1
    assert report.losses["lm loss"] == other.losses["lm loss"]
    assert report.grad_norm == other.grad_norm
    assert torch.equal(trainer.task.stages[0].weight, plain.task.stages[0].weight)


def test_a_metric_that_is_not_finite_does_not_skip_a_step(make_trainer):
    trainer = trainer_of(make_trainer, Accurate())
    trainer.task.value, trainer.finiteness.ends_run = math.inf, True
    report = trainer.step(trainer.micro_batches(0))
    assert report.updated and report.finite and not math.isfinite(report.losses["accuracy"])


def test_an_evaluation_prints_no_perplexity_of_metrics(make_trainer, make_steps):
    trainer, out = trainer_of(make_trainer, Accurate()), io.StringIO()
    steps = [next(make_steps(2, 2)(0)), next(make_steps(1, 1)(9))]
    expected = hits_by_hand(trainer.task.stages[0].weight.detach(), [b for s in steps for b in s])
    trainer.callbacks = [Evaluation(Console(out), lambda: steps, trainer.train_iters)]
    trainer.iteration = trainer.train_iters
    report = type("Report", (), {"iteration": trainer.train_iters})
    trainer.callbacks[0].on_step(trainer, report)
    assert f"accuracy value: {expected:.6E} |" in out.getvalue()
    assert "lm loss PPL" in out.getvalue() and "accuracy PPL" not in out.getvalue()


class OneName(BigramTask):
    """A task whose loss has the name of its only field, and which has no field `tokens`."""

    losses = ("text",)

    def denominators(self, batches):
        return {"text": float(sum(batch.tokens for batch in batches))}

    def stage_inputs(self, batch, stage, iteration):
        return {"input": batch.fields["text"][:, :-1]}

    def loss(self, output, batch):
        labels = batch.fields["text"][:, 1:].flatten()
        return {"text": functional.cross_entropy(output.flatten(0, 1), labels, reduction="sum")}


def test_a_loss_may_have_the_name_of_a_field(make_trainer):
    trainer = trainer_of(make_trainer, OneName())
    texts = [torch.tensor([[1, 2, 5, 1, 7], [3, 3, 0, 8, 4]]) + shift for shift in range(2)]
    batches = [MicroBatch({"text": text}, samples=2, tokens=8) for text in texts]
    weight = trainer.task.stages[0].weight.detach().clone().requires_grad_()
    pairs = torch.cat([torch.stack([t[:, :-1], t[:, 1:]]).flatten(1) for t in texts], 1)
    loss = functional.cross_entropy(weight[pairs[0]], pairs[1])
    (gradient,) = torch.autograd.grad(loss, weight)
    report = trainer.step(iter([batches]))
    assert report.losses == {"text": pytest.approx(loss.item(), rel=1e-14)}
    assert (report.samples, report.tokens) == (4, 16)
    assert report.grad_norm == pytest.approx(float(gradient.norm()), rel=1e-14)


class Summarizing(Accurate):
    """Reports the squared share of correct predictions, which is no mean over tokens."""

    tallies = ("accuracy",)

    def summaries(self, sums):
        return {"squared hits": sums["accuracy"] ** 2}


def test_summaries_are_computed_from_the_sums_of_a_whole_evaluation(make_trainer, make_steps):
    trainer, out = trainer_of(make_trainer, Summarizing()), io.StringIO()
    steps = [next(make_steps(2, 2)(0)), next(make_steps(1, 1)(9))]
    weight = trainer.task.stages[0].weight.detach()
    batches = [batch for step in steps for batch in step]
    count = sum(float(batch.fields["loss_mask"].sum()) for batch in batches)
    hits = hits_by_hand(weight, batches) * count
    found = trainer.evaluate(steps)
    assert found.keys() == {"lm loss", "squared hits"}
    assert found["squared hits"] == pytest.approx(hits**2, rel=1e-14)
    trainer.callbacks = [Evaluation(Console(out), lambda: steps, trainer.train_iters)]
    trainer.iteration = trainer.train_iters
    trainer.callbacks[0].on_step(trainer, type("Report", (), {"iteration": trainer.train_iters}))
    assert f"squared hits value: {hits**2:.6E} |" in out.getvalue()
    assert "squared hits PPL" not in out.getvalue()


def test_a_step_and_a_log_line_report_summaries_instead_of_tallies(make_trainer):
    trainer = trainer_of(make_trainer, Summarizing())
    batches = next(trainer.micro_batches(0))
    count = sum(float(batch.fields["loss_mask"].sum()) for batch in batches)
    hits = hits_by_hand(trainer.task.stages[0].weight.detach().clone(), batches) * count
    report = trainer.step(iter([batches]))
    assert report.losses.keys() == {"lm loss", "squared hits"}
    assert report.losses["squared hits"] == pytest.approx(hits**2, rel=1e-14)
    interval = IntervalSums()
    for _ in range(2):
        interval.add(report)
    assert interval.losses(trainer.task)["squared hits"] == pytest.approx(4 * hits**2, rel=1e-14)
