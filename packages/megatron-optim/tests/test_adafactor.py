"""Adafactor equals torch's, and its state has rows and columns."""

from typing import Any

import pytest
import torch
from megatron_optim import AdafactorSettings, OptimError, Optimizer, OptimizerConfig
from megatron_parallel import Mesh, Sharding, TrainableParameters
from torch import Tensor
from torch.nn import Parameter

SHAPES = {"matrix": (6, 10), "vector": (7,), "tall": (9, 2)}
LR, DECAY = 0.05, 0.1


def start(dtype: torch.dtype = torch.float64) -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(5)
    return {
        name: Parameter(torch.randn(shape, generator=generator, dtype=dtype))
        for name, shape in SHAPES.items()
    }


def optimizer_of(parameters: dict[str, Parameter], clip: float = 0.0, **own: Any) -> Optimizer:
    table = {name: Sharding(shape, weight_decay=True) for name, shape in SHAPES.items()}
    settings = AdafactorSettings(**own)
    config = OptimizerConfig("adafactor", weight_decay=DECAY, clip_grad=clip, settings=settings)
    return Optimizer(TrainableParameters(parameters, table, Mesh.single()), config)


def loss(parameters: dict[str, Parameter], step: int) -> Tensor:
    return torch.stack([(p * (step + 1)).sin().sum() for p in parameters.values()]).sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        (
            {"beta2_decay": -0.5, "eps1": 0.3, "eps2": 0.5, "clip_threshold": 1.5},
            {"beta2_decay": -0.5, "eps": (0.3, 0.5), "d": 1.5},
        ),
    ],
)
def test_adafactor_equals_that_of_torch(
    ours: dict[str, Any], theirs: dict[str, Any], dtype: torch.dtype
) -> None:
    mine, other = start(dtype), start(dtype)
    optimizer = optimizer_of(mine, **ours)
    reference = torch.optim.Adafactor(other.values(), lr=LR, weight_decay=DECAY, **theirs)
    limit = 1e-12 if dtype == torch.float64 else 1e-4
    for step in range(20):
        optimizer.zero_grad()
        reference.zero_grad()
        for parameters in (mine, other):
            loss(parameters, step).backward()
        optimizer.step(LR)
        reference.step()
    for name, parameter in mine.items():
        assert (parameter - start(dtype)[name]).norm() > 0.1
        torch.testing.assert_close(parameter, other[name], rtol=0, atol=limit, msg=name)


def test_a_matrix_has_the_state_of_its_rows_and_columns() -> None:
    parameters = start()
    optimizer = optimizer_of(parameters)
    loss(parameters, 0).backward()
    squares = {name: p.grad.square() for name, p in parameters.items() if p.grad is not None}
    optimizer.step(LR)
    found = {name: view.tensor for name, (view,) in optimizer.views().items()}
    assert found.keys() == {
        *("matrix.row_var", "matrix.col_var", "tall.row_var", "tall.col_var", "vector.variance")
    }
    # The weight of the first squares is 1.
    torch.testing.assert_close(found["matrix.row_var"], squares["matrix"].mean(1))
    torch.testing.assert_close(found["tall.col_var"], squares["tall"].mean(0))
    torch.testing.assert_close(found["vector.variance"], squares["vector"])


def test_state_that_is_loaded_continues_the_run() -> None:
    whole = start()
    optimizer = optimizer_of(whole)
    for step in range(4):
        optimizer.zero_grad()
        loss(whole, step).backward()
        if step == 2:
            halfway = {name: p.detach().clone() for name, p in whole.items()}
            saved = {n: view.tensor.clone() for n, (view,) in optimizer.views().items()}
            scalars = optimizer.scalars()
        optimizer.step(LR)
    resumed = {name: Parameter(tensor) for name, tensor in halfway.items()}
    again = optimizer_of(resumed)
    for name, (view,) in again.views().items():
        view.tensor.copy_(saved[name])
    again.load_scalars(scalars)
    for step in (2, 3):
        again.zero_grad()
        loss(resumed, step).backward()
        again.step(LR)
    for name, parameter in whole.items():
        assert torch.equal(resumed[name], parameter), name


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_the_device_skips_and_clips_like_the_host(clip: float) -> None:
    weights = [start(torch.float32), start(torch.float32)]
    read, unread = (optimizer_of(each, clip) for each in weights)
    unread._host_decides = False
    for step, factor in enumerate((1.0, torch.nan, 2.0)):
        for each, optimizer in zip(weights, (read, unread), strict=True):
            optimizer.zero_grad()
            (loss(each, step) * factor).backward()
            assert bool(optimizer.step(LR).skipped) == (factor != factor)
    for name, weight in weights[0].items():
        assert weight.isfinite().all()
        torch.testing.assert_close(weights[1][name], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta2_decay": 0.1}, "beta2_decay must be 0 or negative, got 0.1"),
        ({"eps1": -1.0}, "eps1 must not be negative, got -1.0"),
        ({"eps2": -1.0}, "eps2 must not be negative, got -1.0"),
        ({"clip_threshold": 0.5}, "clip_threshold must be at least 1, got 0.5"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OptimError) as caught:
        AdafactorSettings(**settings)
    assert message in str(caught.value)
