"""What a trainer does around its steps: averages, times, waits, saves, and what layers report."""

from types import SimpleNamespace

import pytest
import torch
from megatron_ckpt import Checkpoint, CheckpointStore
from megatron_optim import ParameterAverages, SpikeConfig, SpikeDetector
from megatron_train.callbacks.stopping import StopAt
from megatron_train.metrics.console import Console
from megatron_train.observation import NO_REPORTS
from megatron_train.saving import Saver
from megatron_train.trainer import Callback

from .test_accounting import spoil
from .test_trainer import weights


class Noted(Callback):
    """Notes its calls, and the weights after each step."""

    def __init__(self):
        self.calls, self.weights = [], []

    def on_step(self, trainer, report):
        self.calls.append("step")
        self.weights.append(weights(trainer))

    def on_end(self, trainer):
        self.calls.append("end")


def test_averages_follow_each_update_and_no_skipped_step(make_trainer):
    noted = Noted()
    trainer = make_trainer(train_iters=3, callbacks=[noted])
    trainer.averages = ParameterAverages(trainer.optimizer, 0.75)
    trainer.micro_batches = spoil(trainer.micro_batches, {1})
    expected = weights(trainer)
    trainer.run()
    for after in (noted.weights[0], noted.weights[2]):
        expected = 0.75 * expected + 0.25 * after
    found = trainer.averages.tensors["weight"].view(expected.shape)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)


def test_all_weights_have_arrived_when_a_run_ends(make_trainer):
    noted = Noted()
    trainer = make_trainer(train_iters=1, callbacks=[noted])
    trainer.engine.stages.wait_for_parameters = lambda: noted.calls.append("wait")
    trainer.run()
    assert noted.calls[noted.calls.index("step") :] == ["step", "wait", "end"]


def test_the_time_of_a_step_is_that_between_its_start_and_its_report(make_trainer, monkeypatch):
    clock = iter([100.0, 103.5])
    time = SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr("megatron_train.trainer.time", time)
    trainer = make_trainer()
    assert trainer.step(trainer.micro_batches(0)).seconds == 3.5


def test_a_single_rank_stops_without_an_exchange(make_trainer, monkeypatch):
    monkeypatch.setattr("megatron_train.trainer.all_reduce", None)
    trainer = make_trainer(train_iters=3, callbacks=[StopAt(None, 0.0)])
    assert trainer.run() is not None and trainer.iteration == 1


@pytest.mark.parametrize(("saved", "kept"), [(True, False), (False, True), (True, True)])
def test_means_of_spikes_continue_only_where_both_runs_have_them(make_trainer, saved, kept):
    def made(detects):
        config, cpu = SpikeConfig(skip_loss_spike=9.0, spike_window=1), torch.device("cpu")
        spikes = SpikeDetector(config, cpu) if detects else None
        return make_trainer(spikes=spikes, train_iters=1)

    first, second = made(saved), made(kept)
    first.run()
    fresh = second.state().get("spikes")
    second.load_state(first.state())
    assert second.iteration == 1
    both = saved and kept
    assert second.state().get("spikes") == (first.state()["spikes"] if both else fresh)
    assert not both or fresh != first.state()["spikes"]


def test_what_layers_report_of_a_step_is_recorded_and_scales_the_weights(make_trainer):
    trainer, half = make_trainer(), torch.full((11, 1), 0.5, dtype=torch.float64)
    plain = make_trainer()
    plain.step(plain.micro_batches(0))
    trainer.observation = SimpleNamespace(
        reports=lambda number: NO_REPORTS,
        measured=lambda counts, maxima, number: {"max": torch.tensor(4.0 + number)},
        factors=lambda maxima: {"weight": half},
    )
    report = trainer.step(trainer.micro_batches(0))
    assert report.statistics == {"max": 5.0}
    assert torch.equal(weights(trainer), weights(plain) / 2)


def test_a_checkpoint_of_the_same_step_is_replaced(make_trainer, tmp_path):
    for bad in ({0}, ()):  # weights of the first run have not changed
        saver = Saver(CheckpointStore(tmp_path), {}, None, None, None, Console(silent=True))
        trainer = make_trainer(callbacks=[saver], train_iters=1)
        trainer.micro_batches = spoil(trainer.micro_batches, bad)
        trainer.run()
    found = Checkpoint(tmp_path / "iter_0000001").read_tensor("weight")
    assert torch.equal(found, weights(trainer))
    assert not torch.equal(found, weights(make_trainer()))
