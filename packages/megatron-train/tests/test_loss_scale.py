"""Runs with a loss scale: equal to runs without one, but for steps whose gradients overflow."""

import math

import pytest
import torch
from megatron_optim import LossScaleConfig, Optimizer, OptimizerConfig
from megatron_parallel import Mesh
from megatron_train.callbacks.log_line import IntervalSums
from megatron_train.engine import StepEngine
from megatron_train.errors import TrainError
from megatron_train.finiteness import FinitenessCheck
from megatron_train.tasks.task import MicroBatch
from megatron_train.trainer import Callback

from .test_accounting import spoil
from .test_auxiliary_losses import Penalised
from .test_trainer import weights


class Reports(Callback):
    def __init__(self):
        self.all = []

    def on_step(self, trainer, report):
        self.all.append(report)


@pytest.fixture
def scaled(make_trainer):
    """Returns a function that makes a trainer with a loss scale."""

    def make(config, overflows=(), behind=0, **changes):
        reports = Reports()
        trainer = make_trainer(callbacks=[reports], **changes)
        rule = OptimizerConfig(lr=0.1)
        trainer.optimizer = Optimizer(trainer.engine.stages, rule, loss_scale=config)
        ends_run = trainer.finiteness.ends_run
        trainer.finiteness = FinitenessCheck(trainer.engine, trainer.optimizer, ends_run=ends_run)
        trainer._steps_behind = behind
        run = trainer.engine.run

        def overflow(batches, denominators, iteration, *rest):
            sums = run(batches, denominators, iteration, *rest)
            if iteration in overflows:
                trainer.engine.stages.gradients()["weight"][0, 0] = math.inf
            return sums

        trainer.engine.run = overflow
        return trainer, reports.all

    return make


def test_losses_and_updates_are_those_without_a_scale(make_trainer, scaled):
    plain = make_trainer()
    plain.run()
    trainer, reports = scaled(LossScaleConfig(initial_loss_scale=2.0**20, loss_scale_window=3))
    trainer.run()
    torch.testing.assert_close(weights(trainer), weights(plain), rtol=1e-13, atol=1e-14)
    found = [report.loss_scale for report in reports]
    assert found == [2.0**20] * 3 + [2.0**21] * 3 + [2.0**22] * 2
    assert all(report.losses["lm loss"] < 5 for report in reports)


def test_auxiliary_losses_are_scaled_like_the_others():
    def gradient(scale):
        mesh = Mesh.single()
        engine = StepEngine(Penalised(mesh, False), mesh)
        tokens = {"tokens": torch.tensor([[1, 2, 5, 1]])}
        batches = [MicroBatch.from_fields(tokens, token_field="tokens")]
        sums = engine.run(batches, engine.denominators(batches), 1, scale)
        return engine.stages.gradients()["weight"].clone(), sums

    one, plain = gradient(None)
    eight, same = gradient(torch.tensor(8.0))
    assert torch.equal(eight, 8 * one) and plain == same


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("check", [False, True])
def test_an_overflow_skips_its_step_and_is_no_fault(scaled, behind, check):
    config = LossScaleConfig(initial_loss_scale=2.0**10, hysteresis=2)
    trainer, reports = scaled(config, {3, 4, 6}, behind, check_for_nan=check)
    trainer.run()
    assert [report.updated for report in reports] == [n not in (3, 4, 6) for n in range(1, 9)]
    assert all(report.finite for report in reports)
    assert [report.loss_scale for report in reports] == [1024] * 4 + [512] * 2 + [256] * 2
    sums = IntervalSums()
    for report in reports:
        sums.add(report)
    assert (sums.skipped, sums.nan) == (3, 0)
    assert trainer.optimizer.scalars()["steps"] == 5


@pytest.mark.parametrize("behind", [0, 1])
def test_a_loss_that_is_not_finite_ends_a_run_with_a_scale(scaled, behind):
    trainer, _ = scaled(LossScaleConfig(), (), behind, check_for_nan=True)
    trainer.micro_batches = spoil(trainer.micro_batches, {2})
    with pytest.raises(TrainError, match=r"^step 3: lm loss is inf"):
        trainer.run()


def test_overflows_end_the_run_only_if_the_scale_cannot_fall(scaled):
    config = LossScaleConfig(initial_loss_scale=2.0**20, min_loss_scale=4.0, hysteresis=1)
    trainer, _ = scaled(config, range(100), train_iters=100, check_for_nan=True)
    with pytest.raises(TrainError, match=r"10 steps up to step 28, although the loss scale was 4"):
        trainer.run()
    trainer, _ = scaled(LossScaleConfig(loss_scale=64.0), range(100), train_iters=100)
    with pytest.raises(TrainError, match="up to step 10, although the loss scale was 64"):
        trainer.run()


@pytest.mark.parametrize("config", [LossScaleConfig(), LossScaleConfig(loss_scale=64.0)], ids=str)
def test_spikes_under_a_scale_are_no_overflows(scaled, config):
    trainer, reports = scaled(config, train_iters=100)
    trainer._veto = lambda *_: lambda norm: norm > 0
    with pytest.raises(TrainError, match="10 steps up to step 10 were skipped as spikes, the last"):
        trainer.run()
    assert len(reports) == 9 and {report.loss_scale for report in reports} == {
        config.loss_scale or config.initial_loss_scale
    }
