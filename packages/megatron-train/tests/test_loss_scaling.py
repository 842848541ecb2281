"""Equal weights of tokens, or of micro-batches, compared with torch."""

import math

import pytest
import torch
from megatron_parallel import Mesh
from megatron_train import TrainError
from megatron_train.engine import StepEngine
from megatron_train.tasks.task import MicroBatch
from torch.nn import functional

from .conftest import BigramTask, sample


def micro_batches():
    """Returns three micro-batches of two samples with 3, 7 and 11 unmasked tokens."""
    rows = [sample(index) for index in range(6)]
    fields = (
        {name: torch.stack([rows[i][name], rows[i + 1][name]]) for name in rows[0]}
        for i in (0, 2, 4)
    )
    return [MicroBatch.from_fields(one, token_field="tokens") for one in fields]


@pytest.mark.parametrize("per_token", [True, False])
def test_the_gradient_is_that_of_the_requested_mean(per_token):
    task, batches = BigramTask(), micro_batches()
    (table,) = task.stages
    weight = table.weight.detach().clone().requires_grad_()
    sums, counts = [], []
    for fields in (batch.fields for batch in batches):
        losses = functional.cross_entropy(
            weight[fields["tokens"]].flatten(0, 1), fields["labels"].flatten(), reduction="none"
        )
        sums.append((losses * fields["loss_mask"].flatten()).sum())
        counts.append(fields["loss_mask"].sum())
    assert len({count.item() for count in counts}) == 3
    means = [s / n for s, n in zip(sums, counts, strict=True)]
    loss = sum(sums) / sum(counts) if per_token else sum(means) / len(means)
    loss.backward()

    engine = StepEngine(task, Mesh.single(), per_token=per_token)
    denominators = engine.denominators(batches)
    found = engine.run(batches, denominators, 1)
    assert math.isclose(found["lm loss"] / denominators["lm loss"], loss.item(), rel_tol=1e-14)
    assert (engine.stages.gradients()["weight"] - weight.grad).abs().max() < 1e-15


@pytest.mark.parametrize("per_token", [True, False])
def test_a_step_without_unmasked_tokens_has_no_loss_and_no_gradient(per_token):
    engine, batches = StepEngine(BigramTask(), Mesh.single(), per_token=per_token), micro_batches()
    for batch in batches:
        batch.fields["loss_mask"].zero_()
    denominators = engine.denominators(batches)
    assert denominators == {"lm loss": 1.0 if per_token else 3.0}  # tokens or micro-batches
    assert engine.run(batches, denominators, 1) == {"lm loss": 0.0}
    assert not engine.stages.gradients()["weight"].any()


def test_a_gradient_that_is_not_finite_ends_the_run_on_request(make_trainer):
    trainer = make_trainer()
    trainer.finiteness.ends_run = True
    with torch.no_grad():
        trainer.task.stages[0].weight[3] = math.nan
    with pytest.raises(TrainError, match=r"step 1: lm loss is nan; the gradient of 'weight'.*NaN"):
        trainer.run()
