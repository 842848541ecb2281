"""The dynamic loss scale equals that of megatron-core's scaler."""

import random
from typing import Any

import pytest
import torch
from megatron_optim import LossScaleConfig, LossScaler

grad_scaler = pytest.importorskip("megatron.core.optimizer.grad_scaler")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets megatron-core make its tensors on the CPU instead of a GPU."""
    make = torch.tensor

    def on_host(values: Any, **options: Any) -> torch.Tensor:
        return make(values, **{name: o for name, o in options.items() if name != "device"})

    monkeypatch.setattr(grad_scaler.torch, "tensor", on_host)


@pytest.mark.parametrize("seed", range(20))
def test_random_overflows_change_the_scale_like_megatron(seed: int, on_cpu: None) -> None:
    choose = random.Random(seed)
    config = LossScaleConfig(
        initial_loss_scale=choose.choice([2.0**32, 2.0**16, 1e4, 3.7]),
        min_loss_scale=choose.choice([1.0, 0.3, 3.0]),
        loss_scale_window=choose.randint(1, 12),
        hysteresis=choose.randint(1, 4),
    )
    reference = grad_scaler.DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )
    ours = LossScaler(config, torch.device("cpu"))
    share = choose.choice([0.05, 0.2, 0.5])
    for step in range(1000):
        overflow = choose.random() < share
        reference.update(overflow)
        ours.update(torch.tensor(overflow))
        assert float(ours.scale) == float(reference.scale), step
