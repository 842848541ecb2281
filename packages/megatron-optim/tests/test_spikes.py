"""Skipped spikes against a list of numbers computed by hand, and the optimizer's veto."""

import pytest
import torch
from megatron_optim import (
    OptimError,
    Optimizer,
    OptimizerConfig,
    ParameterAverages,
    SpikeConfig,
    SpikeDetector,
)
from megatron_parallel import Mesh, Sharding, TrainableParameters
from torch.nn import Parameter

HOST = torch.device("cpu")


def run(config, norms, losses=None):
    """Returns which steps are skipped."""
    detector, skipped = SpikeDetector(config, HOST), []
    for number, norm in enumerate(norms):
        own = [] if losses is None else [torch.tensor(losses[number])]
        spiked = detector.spiked(torch.tensor(norm, dtype=torch.float64), own)
        detector.update(spiked)
        skipped.append(bool(spiked))
    return skipped, detector.state()


def test_a_norm_above_a_multiple_of_its_mean_is_skipped_and_leaves_the_mean():
    config = SpikeConfig(skip_grad_norm_spike=2.0, spike_window=2)
    # Means: 9 (no limit yet), 5, 5 (skipped), 5 + (9 - 5) / 2 = 7, 7 (skipped).
    skipped, state = run(config, [9.0, 1.0, 10.5, 9.0, 14.5])
    assert skipped == [False, False, True, False, True]
    assert state == {"updates": 3, "means": [7.0]}


def test_a_loss_has_its_own_mean_and_an_absolute_norm_needs_no_window():
    config = SpikeConfig(skip_loss_spike=1.5, spike_window=1)
    assert run(config, [1.0, 99.0, 1.0], [2.0, 2.9, 5.0])[0] == [False, False, True]
    assert run(SpikeConfig(skip_grad_norm=3.0), [4.0, 3.0, 3.1])[0] == [True, False, True]


def test_numbers_that_are_not_finite_are_no_spikes_and_restored_means_continue():
    config = SpikeConfig(skip_grad_norm_spike=2.0, spike_window=1)
    detector = SpikeDetector(config, HOST)
    detector.load_state({"updates": 5, "means": [1.0]})
    assert not bool(detector.spiked(torch.tensor(float("nan"))))
    assert bool(detector.spiked(torch.tensor(2.1)))
    with pytest.raises(OptimError, match="1 losses are compared with running means of 0"):
        detector.spiked(torch.tensor(1.0), [torch.tensor(1.0)])


def test_a_vetoed_step_changes_nothing_and_is_counted():
    parameter = Parameter(torch.ones(3))
    trainable = TrainableParameters({"p": parameter}, {"p": Sharding((3,))}, Mesh.single())
    optimizer = Optimizer(trainable, OptimizerConfig(clip_grad=0.0))
    averages = ParameterAverages(optimizer, 0.5)
    for size, vetoed in ((1.0, False), (9.0, True)):
        parameter.grad = torch.full((3,), size)
        before = parameter.detach().clone()
        result = optimizer.step(0.1, veto=lambda norm: norm > 5)
        averages.update(result.skipped)
        assert bool(result.vetoed) == bool(result.skipped) == vetoed
        assert torch.equal(parameter.detach(), before) == vetoed
    parameter.grad = torch.full((3,), float("nan"))
    result = optimizer.step(0.1, veto=lambda norm: norm > 5)
    assert bool(result.skipped)
    assert not bool(result.vetoed)
    assert (optimizer.steps, optimizer.skipped_steps) == (1, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"skip_grad_norm": 0.0}, "skip_grad_norm must be above 0, got 0.0"),
        ({"skip_loss_spike": 1.0}, "skip_loss_spike must be above 1, the mean itself, got 1.0"),
        ({"skip_loss_spike": 2.0, "spike_window": 0}, "spike_window must be at least 1 step, got"),
        ({"spike_window": 5}, "has no effect without skip_grad_norm_spike or skip_loss_spike"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(OptimError, match=message):
        SpikeConfig(**settings)


def test_values_at_their_limits_are_no_spikes():
    config = SpikeConfig(skip_grad_norm_spike=2.0, skip_loss_spike=3.0, spike_window=1)
    detector = SpikeDetector(config, HOST)
    detector.load_state({"updates": 1, "means": [1.0, 4.0]})
    for norm, loss, spiked in ((2.0, 12.0, False), (2.01, 12.0, True), (2.0, 12.1, True)):
        values = torch.tensor(norm, dtype=torch.float64), [torch.tensor(loss)]
        assert bool(detector.spiked(*values)) == spiked


def test_a_detector_that_has_seen_nothing_has_no_means():
    for state in (None, {"updates": 3, "means": [2.0]}):
        detector = SpikeDetector(SpikeConfig(skip_grad_norm_spike=2.0, spike_window=1), HOST)
        assert detector.state() == {"updates": 0, "means": []}
        detector.load_state(state or detector.state())
        detector.update(torch.tensor(False))  # before any step
        assert detector.state() == (state or {"updates": 0, "means": []})
