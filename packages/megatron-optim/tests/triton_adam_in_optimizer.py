"""Optimizers with Adam's Triton kernel in Triton's interpreter; `test_triton_adam.py` runs them.

The device decides whether to skip, as on a GPU. torch's fused kernel and a copy are the truth.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron_optim import (
    AdamSettings,
    LossScaleConfig,
    Optimizer,
    OptimizerConfig,
    ParameterAverages,
    StateFormatConfig,
    UpdateSquares,
)
from megatron_optim.adam_kernel import launch
from megatron_optim.mixed_precision import MainParameters
from megatron_optim.rules import Adam
from megatron_parallel import (
    DataParallelConfig,
    Mesh,
    ParallelLayout,
    Sharding,
    TrainableChunks,
    TrainableParameters,
)
from megatron_parallel.testing import WorkerPool
from torch import Tensor, nn

pytestmark = pytest.mark.sampled(2)

SHAPES = {"long": (37, 301), "square": (70, 70), "gain": (301,), "few": (3, 5)}
BF16 = torch.bfloat16
FORMATS = {
    "bf16 means": StateFormatConfig(use_precision_aware_optimizer=True, exp_avg_dtype="bf16"),
    "remainders": StateFormatConfig(use_precision_aware_optimizer=True),
    "stochastic": StateFormatConfig(use_precision_aware_optimizer=True, main_params_dtype="bf16"),
}


class Network(nn.Module):
    """Parameters of two groups, with and without weight decay."""

    def __init__(self, dtype: torch.dtype, wide: Collection[str] = ()) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        for name, shape in SHAPES.items():
            drawn = torch.randn(shape, generator=generator)
            setattr(self, name, nn.Parameter(drawn if name in wide else drawn.to(dtype)))
        self.sharding = {name: Sharding(shape) for name, shape in SHAPES.items()}

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.named_parameters()}


@contextmanager
def interpreted() -> Iterator[None]:
    """Lets kernels run on a CPU, and the device decide whether to skip."""
    with (
        patch.object(Adam, "kernel_devices", ("cpu",)),
        patch("megatron_optim.optimizer.host_decides", lambda *_: False),
    ):
        yield


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Returns the names that a rule rounded, by step."""
    found, copy = list[list[str]](), MainParameters.copy_main_to_model

    def record(self: MainParameters, names: Collection[str] = ()) -> None:
        found.append(sorted(names))
        copy(self, names)

    monkeypatch.setattr(MainParameters, "copy_main_to_model", record)
    return found


def make(network: Network, kernels: str, **given: Any) -> Optimizer:
    settings = AdamSettings(kernels=kernels)  # type: ignore[arg-type]
    config = OptimizerConfig(weight_decay=0.1, clip_grad=given.pop("clip", 1.0), settings=settings)
    trainable = TrainableParameters(network.named_parameters(), network.sharding, Mesh.single())
    with interpreted():
        return Optimizer(trainable, config, **given)


def draw(network: Network, step: int, factor: float | Tensor = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in network.parameters():
        gradient = torch.randn(parameter.shape, generator=generator) * factor
        parameter.grad = gradient.to(parameter.dtype)


def require_close(ours: Optimizer, true: Optimizer, eps: float = 1e-6) -> None:
    mains = dict(true.main.values())
    for name, main in ours.main.values():
        torch.testing.assert_close(main, mains[name], rtol=eps, atol=eps)
        model = ours.main.parameters[name].detach()
        assert torch.equal(model, torch.empty_like(model).copy_(main)), name


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.float32, ()), (BF16, ()), (BF16, ("long", "few")), (torch.float16, ())],
    ids=str,
)
def test_optimizers_equal_those_with_torchs_kernel(
    dtype: torch.dtype, wide: tuple[str, ...], done: list[list[str]]
) -> None:
    scale = LossScaleConfig(loss_scale=8.0) if dtype == torch.float16 else None
    networks = Network(dtype, wide), Network(dtype, wide)
    ours, true = (
        make(network, kernels, loss_scale=scale)
        for network, kernels in zip(networks, ("triton", "torch"), strict=True)
    )
    for step in range(4):
        before = networks[0].weights() | {n: t.clone() for n, t in ours.main.values()}
        for network in networks:
            draw(network, step, 1.0 if scale is None else 8.0)
            if step == 2:
                network.few.grad[1, 2] = math.nan  # type: ignore[union-attr,index]
        results = [optimizer.step(1e-2) for optimizer in (ours, true)]
        assert [bool(each.skipped) for each in results] == [step == 2] * 2
        if step == 2:
            after = networks[0].weights() | dict(ours.main.values())
            assert all(torch.equal(value, after[name]) for name, value in before.items())
    require_close(ours, true)
    half = sorted(ours.main.copies)
    assert len(half) == (0 if dtype == torch.float32 else len(SHAPES) - len(wide))
    assert done == [half, []] * 4


def test_rows_that_are_scaled_are_rounded_after_it(done: list[list[str]]) -> None:
    factors = {"long": torch.linspace(0.5, 1.0, 37, dtype=torch.float64)}
    networks = Network(BF16), Network(BF16)
    made = [make(n, kernels) for n, kernels in zip(networks, ("triton", "torch"), strict=True)]
    for step in range(2):
        for network, optimizer in zip(networks, made, strict=True):
            draw(network, step)
            optimizer.step(1e-2, factors=factors)
    require_close(*made)
    assert done[0] == ["few", "gain", "square"] and done[1] == []


def test_steps_whose_update_is_measured_are_rounded_by_a_copy(done: list[list[str]]) -> None:
    networks, found = (Network(BF16), Network(BF16)), []
    made = [make(n, kernels) for n, kernels in zip(networks, ("triton", "torch"), strict=True)]
    for network, optimizer in zip(networks, made, strict=True):
        draw(network, 0)
        found.append(UpdateSquares())
        optimizer.step(1e-2, squares=found[-1])
        draw(network, 1)
        optimizer.step(1e-2)
    require_close(*made)
    assert done == [[], sorted(SHAPES), [], []]
    for name, value in found[0].updates.items():
        torch.testing.assert_close(value, found[1].updates[name], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("name", FORMATS)
def test_state_in_other_formats_is_rounded_as_with_torchs_kernel(
    name: str, done: list[list[str]]
) -> None:
    networks = Network(BF16), Network(BF16)
    made = [
        make(network, kernels, formats=FORMATS[name], seed=3)
        for network, kernels in zip(networks, ("triton", "torch"), strict=True)
    ]
    for step in range(3):
        for network, optimizer in zip(networks, made, strict=True):
            draw(network, step)
            optimizer.step(1e-2)
    mains = dict(made[1].main.values())
    for key, main in made[0].main.values():
        torch.testing.assert_close(main, mains[key], rtol=2**-7, atol=1e-2)
    assert not any(done)


def test_averages_follow_the_main_parameters() -> None:
    network = Network(BF16)
    optimizer = make(network, "triton")
    averages = ParameterAverages(optimizer, 0.5)
    wanted = {name: value.clone() for name, value in optimizer.main.values()}
    for step in range(2):
        draw(network, step)
        averages.update(optimizer.step(1e-2).skipped)
        for name, value in optimizer.main.values():
            wanted[name].lerp_(value, 0.5)
    for name, value in averages.tensors.items():
        torch.testing.assert_close(value, wanted[name])


def test_tables_of_a_group_are_copied_to_the_device_once() -> None:
    network = Network(BF16)
    optimizer = make(network, "triton")
    buffers = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    tables = []

    def record(found: Any, *arguments: Any, **given: Any) -> None:
        tables.append(found)
        launch(found, *arguments, **given)

    for group in optimizer.groups:
        group.rule._kernel._launch = record  # type: ignore[attr-defined]
    for step in range(3):
        with patch.object(optimizer, "gradients", lambda: buffers):
            optimizer.step(1e-2)
        if step == 1:
            buffers["few"] = buffers["few"].clone()
    first, second, third = (tables[start : start + 2] for start in (0, 2, 4))
    assert all(one.tensors is two.tensors for one, two in zip(first, second, strict=True))
    changed = [one.tensors is not two.tensors for one, two in zip(second, third, strict=True)]
    assert sum(changed) == 1
    assert all(one.chunks is two.chunks for one, two in zip(first, third, strict=True))


def sharded_steps(mesh: Mesh, kernels: str, sharded: bool) -> dict[str, Tensor]:
    """Returns the bf16 parameters after three steps with gradients in flat buffers."""
    network, axis = Network(BF16), mesh.axis("dp")
    config = DataParallelConfig(use_distributed_optimizer=sharded, ddp_bucket_size=7000)
    stages = TrainableChunks([network], mesh, config, lambda _: [])
    settings = AdamSettings(kernels=kernels)  # type: ignore[arg-type]
    with interpreted():
        optimizer = Optimizer(stages, OptimizerConfig(clip_grad=0.3, settings=settings))
    for step in range(3):
        stages.wait_for_parameters()
        generator = torch.Generator().manual_seed(step)
        loss = torch.zeros(())
        for name, shape in SHAPES.items():
            direction = torch.randn(shape, generator=generator).to(BF16) / axis.size
            loss = loss + (getattr(network, name) * direction).float().sum()
        loss.backward()
        stages.finish()
        optimizer.step(1e-2)
        stages.zero()
    stages.wait_for_parameters()
    return network.weights()


def require_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_shards_of_two_ranks_equal_whole_parameters(worker_pool: WorkerPool) -> None:
    call: Callable[[str, bool], list[dict[str, Tensor]]] = lambda *given: worker_pool.run_mesh(  # noqa: E731
        ParallelLayout(dp=2), sharded_steps, *given
    )
    whole = call("triton", False)
    torchs = call("torch", True)
    for rank, weights in enumerate(call("triton", True)):
        require_equal(weights, whole[rank])
        for name, value in weights.items():
            torch.testing.assert_close(value, torchs[rank][name], rtol=2**-7, atol=1e-6)
