"""Averages of parameters against the formula, with skipped steps, other dtypes and evaluation."""

import math

import pytest
import torch
from megatron_optim import OptimError, Optimizer, OptimizerConfig, ParameterAverages
from megatron_parallel import Mesh, Sharding, TrainableParameters
from torch.nn import Parameter

DECAY = 0.9
SHAPES = {"weight": (4, 3), "bias": (3,)}
TABLE = {name: Sharding(shape) for name, shape in SHAPES.items()}


def build(dtype):
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
    }
    trainable = TrainableParameters(parameters, TABLE, Mesh.single())
    optimizer = Optimizer(trainable, OptimizerConfig(optimizer="sgd", clip_grad=0.0))
    return parameters, optimizer, ParameterAverages(optimizer, DECAY)


class OnDevice(torch.Tensor):
    """A decision that the host has not read, as on a CUDA device."""

    @property
    def is_cuda(self):
        return True


def step(parameters, optimizer, averages, number, bad=False, unread=False):
    generator = torch.Generator().manual_seed(number)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    if bad:
        parameters["bias"].grad[0] = math.nan
    skipped = optimizer.step(0.1).skipped
    averages.update(skipped.as_subclass(OnDevice) if unread else skipped)


@pytest.mark.parametrize("unread", [False, True])
def test_averages_follow_the_formula_and_skip_what_the_optimizer_skips(unread):
    parameters, optimizer, averages = build(torch.float64)
    wanted = {name: p.detach().clone() for name, p in parameters.items()}
    for number in range(5):
        step(parameters, optimizer, averages, number, bad=number == 2, unread=unread)
        if number != 2:
            for name, parameter in parameters.items():
                wanted[name] = DECAY * wanted[name] + (1 - DECAY) * parameter.detach()
    for name, average in averages.tensors.items():
        limit = 1e-7 if unread else 1e-14  # the weight is a float32 number on the device
        torch.testing.assert_close(average, wanted[name], rtol=limit, atol=limit)


@pytest.mark.parametrize(("at_once", "sizes"), [(12, [12, 3]), (13, [15]), (1, [12, 3])])
def test_few_differences_are_in_memory_at_once(at_once, sizes, monkeypatch):
    found, subtract = [], torch._foreach_sub

    def note(values, averages):
        found.append(sum(value.numel() for value in values))
        return subtract(values, averages)

    parameters, optimizer, averages = build(torch.float32)
    monkeypatch.setattr("megatron_optim.averages._AT_ONCE", at_once)
    monkeypatch.setattr(torch, "_foreach_sub", note)
    step(parameters, optimizer, averages, 0, unread=True)
    assert found == sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_model_has_the_averages_in_the_block_and_its_own_bits_afterwards(dtype):
    parameters, optimizer, averages = build(dtype)
    for number in range(3):
        step(parameters, optimizer, averages, number)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    average = {name: t.clone() for name, t in averages.tensors.items()}
    assert average["weight"].dtype == torch.float32
    with pytest.raises(ZeroDivisionError), averages.in_model():
        for name, parameter in parameters.items():
            assert torch.equal(parameter.detach(), average[name].to(dtype))
            assert not torch.equal(parameter.detach(), before[name])
        1 / 0  # noqa: B018
    for name, parameter in parameters.items():
        assert torch.equal(parameter.detach(), before[name])
        assert torch.equal(averages.tensors[name], average[name])


def test_averages_of_bf16_weights_are_those_of_their_fp32_main_weights():
    parameters, optimizer, averages = build(torch.bfloat16)
    wanted = {name: t.clone() for name, t in optimizer.main.values()}
    for number in range(4):
        step(parameters, optimizer, averages, number)
        for name, main in optimizer.main.values():
            wanted[name] = torch.lerp(wanted[name], main, 1 - DECAY)
    for name, average in averages.tensors.items():
        torch.testing.assert_close(average, wanted[name], rtol=1e-6, atol=1e-7)


def test_reset_begins_again_with_the_parameters():
    parameters, optimizer, averages = build(torch.float32)
    step(parameters, optimizer, averages, 0)
    averages.reset()
    for name, average in averages.tensors.items():
        assert torch.equal(average, parameters[name].detach())


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.1, math.nan])
def test_a_decay_out_of_range_is_refused(decay):
    _, optimizer, _ = build(torch.float32)
    with pytest.raises(OptimError, match="must lie between 0 and 1"):
        ParameterAverages(optimizer, decay)


def test_averages_cannot_be_read_while_they_are_in_the_model():
    _, _, averages = build(torch.float32)
    with averages.in_model(), pytest.raises(OptimError, match="leave in_model"):
        _ = averages.tensors
    assert averages.tensors.keys() == SHAPES.keys()


def test_a_state_of_the_rule_with_the_suffix_of_averages_is_refused():
    _, optimizer, averages = build(torch.float32)
    assert averages.views().keys() == {"weight.ema", "bias.ema"}
    optimizer.state_names = ("exp_avg", "ema")
    with pytest.raises(OptimError, match="has a state named 'ema'"):
        ParameterAverages(optimizer, DECAY)
    optimizer.state_names = ("exp_avg",)
    optimizer.main.hosted["weight"] = torch.zeros(())
    with pytest.raises(OptimError, match="do not work with main parameters in host memory"):
        ParameterAverages(optimizer, DECAY)
