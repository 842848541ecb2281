"""When shards of other ranks are waited for, and gathered again."""

from collections.abc import Callable

import pytest
import torch
from megatron_optim import OffloadConfig, Optimizer, OptimizerConfig, ParameterAverages
from megatron_parallel import (
    DataParallelConfig,
    GradientBuffers,
    Mesh,
    ParameterBuffers,
    Sharding,
    TrainableParameters,
)
from torch.nn import Parameter

Build = Callable[..., tuple[Parameter, Optimizer]]


class OnCpu(OffloadConfig):
    """Offloads although the device is a CPU."""

    def check(self, *_: object) -> None:
        pass


@pytest.fixture
def build(mesh: Mesh) -> Build:
    """Returns a function that builds a parameter of ones and its optimizer."""

    def make(
        dtype: torch.dtype = torch.float32, offload: OffloadConfig | None = None
    ) -> tuple[Parameter, Optimizer]:
        weights = {"a": Parameter(torch.ones(4, 3, dtype=dtype))}
        table = {"a": Sharding((4, 3))}
        config = DataParallelConfig(use_distributed_optimizer=True)
        buffers = GradientBuffers(weights, table, mesh, config)
        trainable = TrainableParameters(
            weights,
            table,
            mesh,
            gradients=buffers.gradients,
            shards=[ParameterBuffers([], buffers, table)],
        )
        settings = OptimizerConfig("sgd", clip_grad=0.0)
        return weights["a"], Optimizer(trainable, settings, offload=offload)

    return make


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list to which waiting and gathering are added."""
    found: list[str] = []
    wait, gather = lambda _: found.append("wait"), lambda _: found.append("gather")
    monkeypatch.setattr(ParameterBuffers, "wait_for_parameters", wait)
    monkeypatch.setattr(ParameterBuffers, "start_gather", gather)
    return found


def test_averages_are_gathered_and_the_weights_after_them(build: Build, events: list[str]) -> None:
    weight, optimizer = build()
    averages = ParameterAverages(optimizer, 0.5)
    averages.tensors["a"].fill_(2.0)
    with averages.in_model():
        assert events == ["wait", "gather"] and (weight == 2.0).all()
        events.clear()
    assert events == ["wait", "gather"] and (weight == 1.0).all()


def test_rounded_weights_are_gathered_and_loaded_ones_waited_for(
    build: Build, events: list[str]
) -> None:
    _, optimizer = build(torch.bfloat16)
    optimizer.main.copy_main_to_model()
    assert events == ["gather"]
    optimizer.reload_model_parameters()
    assert events == ["gather", "wait"]


@pytest.mark.parametrize(("dtype", "waits"), [(torch.float32, ["wait"]), (torch.bfloat16, [])])
def test_a_checkpoint_without_a_copy_in_host_memory_waits_for_the_weights(
    build: Build, events: list[str], dtype: torch.dtype, waits: list[str]
) -> None:
    _, optimizer = build(dtype, OnCpu(True))
    optimizer.load_scalars(optimizer.scalars())
    assert events == waits
