"""A training loop on one GPU waits for it only when a log line asks for values."""

import math

import pytest
import torch
from megatron_optim import LearningRateSchedule, WeightDecaySchedule
from megatron_parallel import DataParallelConfig
from megatron_train import Trainer, TrainError
from megatron_train.callbacks.log_line import LogLine
from megatron_train.callbacks.recording import ProgressBar, Recorder, TensorBoard
from megatron_train.metrics.console import Console

pytestmark = pytest.mark.gpu

CASES = {
    "gpt2": {},
    "dropout": {"dropout": 0.1},
    "distributed optimizer": {
        "data_parallel": DataParallelConfig(use_distributed_optimizer=True),
        "dtype": torch.bfloat16,
    },
}


class Screen(Console):
    def __init__(self):
        super().__init__(silent=True)
        self.lines = []

    def print_line(self, text):
        self.lines.append(text)


def trainer_of(job, callbacks=(), spoiled=(), **changes):
    def micro_batches(consumed):
        for iteration in range(consumed // 4 + 1, 100):
            batches = job.batches(iteration)
            if iteration in spoiled:
                batches[1].fields["loss_mask"][0, 0] = math.inf
            yield batches

    return Trainer(
        engine=job.engine,
        optimizer=job.optimizer,
        learning_rate=LearningRateSchedule(max_lr=1e-3, decay_samples=1000),
        weight_decay=WeightDecaySchedule(start=0.01, end=0.01, samples=1000),
        micro_batches=micro_batches,
        callbacks=callbacks,
        **{"train_iters": 10, "check_for_nan": True, **changes},
    )


@pytest.mark.parametrize("name", CASES)
def test_only_log_lines_wait_for_the_device(job, device, device_waits, tmp_path, name):
    console = Screen()
    recorder = Recorder(tmp_path, {}, console)
    callbacks = [
        ProgressBar(console, 100, 16),
        LogLine(console, 4, peak=None, listeners=[recorder.record_log_line]),
        recorder,
        TensorBoard(tmp_path / "board", 4),
    ]
    trainer = trainer_of(job(device, **CASES[name]), callbacks)
    steps = trainer.micro_batches(0)
    for callback in callbacks:
        callback.on_start(trainer)
    found = []
    for _ in range(8):
        with device_waits() as waits:
            report = trainer.step(steps)
            for callback in callbacks:
                callback.on_step(trainer, report)
            trainer._all_stop()
        found.append(waits)
    assert len(console.lines) == 2
    for number, waits in list(enumerate(found, 1))[1:]:  # the first step makes values once
        assert waits.total() <= (number % 4 == 0), f"step {number}: {dict(waits)}"


def test_losses_equal_those_of_a_run_that_reads_every_step(job, device):
    def losses(where):
        found = []
        trainer = trainer_of(job(where))
        trainer.callbacks = [
            LogLine(Screen(), 1, peak=None, listeners=[lambda *a: found.append(a)])
        ]
        trainer.run()
        return [loss["lm loss"] for _, loss in found]

    assert losses(device) == pytest.approx(losses(torch.device("cpu")), rel=1e-5)


@pytest.mark.parametrize("check", [True, False])
def test_a_step_that_is_not_finite_changes_nothing(job, device, check):
    good = job(device)
    trainer_of(good, train_iters=3).run()
    bad = job(device)
    trainer = trainer_of(bad, spoiled=(4,), check_for_nan=check, train_iters=4 + check)
    if check:
        with pytest.raises(TrainError, match=r"^step 4: lm loss is (inf|nan); the gradient of '"):
            trainer.run()
    else:
        trainer.run()
    assert bad.optimizer.scalars() == {"steps": 3, "skipped_steps": 1 + check}
    assert all(torch.equal(w, bad.weights()[name]) for name, w in good.weights().items())


EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01}


@pytest.mark.parametrize("config", [{}, EXPERTS, {"mtp_num_layers": 2}], ids=str)
def test_denominators_of_labels_on_the_device_stay_there(job, device, device_waits, config):
    engine = job(device, config=config).engine
    batches = job(device).batches(1)
    true = {name: float(count) for name, count in engine.denominators(batches).items()}
    prepared = [batch.to(device) for batch in batches]
    with device_waits() as waits:
        found = engine.denominators(prepared)
    assert not waits
    assert {name: float(count) for name, count in found.items()} == true
    assert all(count.device.type == "cuda" for count in found.values())
