"""Which tensors are offloaded, against cases computed by hand, and settings that are refused."""

import pytest
import torch
from megatron_optim import (
    OffloadConfig,
    OptimError,
    Optimizer,
    OptimizerConfig,
    StateFormatConfig,
)
from megatron_parallel import Mesh, Sharding, TrainableParameters

AWARE = {"use_precision_aware_optimizer": True}


def away(fraction: float = 1.0) -> OffloadConfig:
    return OffloadConfig(optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)


@pytest.mark.parametrize(
    ("fraction", "chosen"),
    [
        (1.0, "abcde"),
        (0.9, "abc"),  # 81 elements: 50 + 20 + 10, and no room for the others
        (0.78, "ab"),  # 70 elements: 50 + 20
        (0.5, "bcde"),  # 45 elements, not 50, but all others
        (0.25, "be"),  # 22 elements: 20 + 2
        (0.01, ""),
    ],
)
def test_the_largest_tensors_that_fit_are_offloaded(fraction: float, chosen: str) -> None:
    sizes = {"e": 2, "a": 50, "b": 20, "d": 8, "c": 10}
    assert away(fraction).choose(sizes) == set(chosen)
    assert away(fraction).choose(dict(reversed(sizes.items()))) == set(chosen)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.0}, "at most 1, got 0.0"),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.5}, "at most 1, got 1.5"),
        ({"optimizer_offload_fraction": 0.5}, "without optimizer_cpu_offload; give both or leave"),
        ({"overlap_cpu_optimizer_d2h_h2d": True}, "no effect without optimizer_cpu_offload"),
    ],
)
def test_settings_out_of_range_or_without_effect_are_refused(settings, message) -> None:
    with pytest.raises(OptimError, match=message):
        OffloadConfig(**settings)


@pytest.mark.parametrize(
    ("rule", "formats", "device", "message"),
    [
        ("adam", {}, "cpu", "has no effect: the device is a CPU"),
        ("muon", {}, "cuda", "update rule muon, which needs matrices .* use adam, lion or sgd"),
        ("adafactor", {}, "cuda", "update rule adafactor, which needs sums"),
        ("sgd", {**AWARE, "main_params_dtype": "bf16"}, "cuda", "main weights in bf16"),
    ],
)
def test_state_that_cannot_be_offloaded_is_refused(rule, formats, device, message) -> None:
    config = OptimizerConfig(optimizer=rule)
    with pytest.raises(OptimError, match=message):
        away().check(config, StateFormatConfig(**formats), device)
    OffloadConfig().check(config, StateFormatConfig(**formats), device)


def test_an_optimizer_on_a_cpu_offloads_nothing() -> None:
    table = {"weight": Sharding((4, 2))}
    parameters = {"weight": torch.nn.Parameter(torch.ones(4, 2))}
    trainable = TrainableParameters(parameters, table, Mesh.single())
    with pytest.raises(OptimError, match="the device is a CPU"):
        Optimizer(trainable, OptimizerConfig(), offload=away())
