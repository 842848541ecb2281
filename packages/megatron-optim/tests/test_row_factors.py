"""Rows of parameters that are scaled after the update, in each form of main parameters."""

import pytest
import torch
from megatron_optim import (
    OptimError,
    Optimizer,
    OptimizerConfig,
    StateFormatConfig,
)
from megatron_parallel import Mesh, Sharding, TrainableParameters
from torch.nn import Parameter

TABLE = {"a": Sharding((2, 3, 2)), "b": Sharding((3,))}
FACTORS = {"a": torch.tensor([[1.0, 0.5, 0.25], [0.5, 1.0, 2.0]], dtype=torch.float64)}
AWARE = StateFormatConfig(use_precision_aware_optimizer=True)


def stepped(factors, dtype, formats=None, factor=1.0):
    generator = torch.Generator().manual_seed(1)
    parameters = {}
    for name, cut in TABLE.items():
        parameters[name] = Parameter(torch.randn(cut.shape, generator=generator).to(dtype))
        parameters[name].grad = factor * torch.ones(cut.shape, dtype=dtype)
    trainable = TrainableParameters(parameters, TABLE, Mesh.single())
    optimizer = Optimizer(trainable, OptimizerConfig(), formats=formats)
    optimizer.step(0.01, factors=factors)
    return dict(optimizer.main.values()), parameters, optimizer


@pytest.mark.parametrize(
    ("dtype", "formats"),
    [(torch.float64, None), (torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, AWARE)],
)
def test_rows_of_main_and_model_parameters_are_scaled_after_the_update(dtype, formats):
    plain, _, _ = stepped({}, dtype, formats)
    scaled, parameters, _ = stepped(FACTORS, dtype, formats)
    # Powers of two are exact.
    assert torch.equal(scaled["a"], plain["a"] * FACTORS["a"][..., None].to(plain["a"].dtype))
    assert torch.equal(scaled["b"], plain["b"])
    assert torch.equal(parameters["a"].detach(), scaled["a"].to(dtype))


def test_a_skipped_step_scales_nothing():
    before, _, _ = stepped({}, torch.float32, factor=float("nan"))
    after, _, _ = stepped(FACTORS, torch.float32, factor=float("nan"))
    assert torch.equal(before["a"], after["a"])


def test_main_parameters_in_host_memory_are_refused():
    _, _, optimizer = stepped({}, torch.bfloat16)
    optimizer.main.hosted["a"] = torch.zeros(())
    with pytest.raises(OptimError, match="main parameters are in host memory"):
        optimizer.step(0.01, factors=FACTORS)


def test_factors_of_parameters_of_other_ranks_are_left_out():
    plain, _, _ = stepped({}, torch.bfloat16)
    scaled, parameters, _ = stepped({"elsewhere": torch.ones(2), **FACTORS}, torch.bfloat16)
    assert torch.equal(scaled["a"], plain["a"] * FACTORS["a"][..., None].float())
    assert torch.equal(parameters["a"].detach(), scaled["a"].bfloat16())


def test_factors_hold_for_one_step():
    once, _, optimizer = stepped(FACTORS, torch.float64)
    value = once["b"].clone()
    again, _, other = stepped(FACTORS, torch.float64)
    optimizer.step(0.01)
    other.step(0.01, factors={"a": torch.ones(2, 3, dtype=torch.float64)})
    assert torch.equal(once["a"], again["a"]) and not torch.equal(once["b"], value)
