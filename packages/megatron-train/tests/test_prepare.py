"""Micro-batches that a task prepares: a teacher's probabilities, compared with torch."""

import pytest
import torch
from megatron_optim import Optimizer, OptimizerConfig
from megatron_parallel import Mesh
from megatron_train.engine import StepEngine
from torch.nn import functional

from .conftest import VOCABULARY, BigramTask


class Distilled(BigramTask):
    """Learns a teacher's distribution of the next token."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        shape = (VOCABULARY, VOCABULARY)
        self.teacher = torch.nn.Parameter(torch.randn(shape, generator=generator).double())
        self.calls = []

    def prepare(self, batches, iteration):
        self.calls.append(iteration)
        outputs = [self.teacher.log_softmax(-1)[batch.fields["tokens"]] for batch in batches]
        assert not any(each.requires_grad for each in outputs)
        pairs = zip(batches, outputs, strict=True)
        return [batch.with_fields(teacher=each) for batch, each in pairs]

    def denominators(self, batches):
        assert all("teacher" in batch.fields for batch in batches)
        return super().denominators(batches)

    def loss(self, output, batch):
        fields = batch.fields
        teacher = fields["teacher"]
        divergence = functional.kl_div(
            output.log_softmax(-1), teacher, reduction="none", log_target=True
        )
        return {"lm loss": (divergence.sum(-1) * fields["loss_mask"]).sum()}


@pytest.fixture
def distilled(make_trainer):
    engine = StepEngine(Distilled(), Mesh.single())
    optimizer = Optimizer(engine.stages, OptimizerConfig(lr=0.1))
    return make_trainer(engine=engine, optimizer=optimizer)


def by_hand(trainer, batches):
    """Returns the divergence from the teacher over unmasked tokens, by torch's distributions."""
    total = count = 0.0
    for fields in (batch.fields for batch in batches):
        rows = fields["tokens"][fields["loss_mask"].bool()]
        teacher, student = (
            torch.distributions.Categorical(logits=table.detach()[rows])
            for table in (trainer.task.teacher, trainer.task.stages[0].weight)
        )
        divergence = torch.distributions.kl_divergence(teacher, student)
        total, count = total + divergence.sum().item(), count + len(rows)
    return total / count


def test_a_step_and_an_evaluation_get_the_prepared_micro_batches(distilled):
    batches = next(distilled.micro_batches(0))
    expected = by_hand(distilled, batches)
    assert distilled.evaluate([batches])["lm loss"] == pytest.approx(expected, rel=1e-12)
    report = distilled.step(iter([batches]))
    assert report.losses["lm loss"] == pytest.approx(expected, rel=1e-12)
    assert distilled.task.calls == [None, 1]
    for _ in range(3):
        distilled.step(iter([batches]))
    assert by_hand(distilled, batches) < 0.9 * expected
    assert distilled.task.teacher.grad is None
