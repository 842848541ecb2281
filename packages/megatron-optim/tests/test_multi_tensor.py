"""Adam by multi-tensor kernels of libraries, which are replaced by ones that check arguments."""

import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_optim import AdamSettings, OptimError, Optimizer, OptimizerConfig, UnreadStep
from megatron_optim.multi_tensor import LIBRARIES, MultiTensorAdam, check_tensors
from megatron_optim.rules import Adam
from megatron_parallel import Mesh, Sharding, TrainableParameters
from torch import Tensor
from torch.nn import Parameter

CHUNK = 65536
LR, BETAS, EPS, DECAY = 1e-2, (0.8, 0.95), 1e-6, 0.1


class Library:
    """The documented behavior of the kernels, in torch; a wrong argument raises TypeError."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def multi_tensor_applier(
        self, kernel: Any, flag: Tensor, lists: list[list[Tensor]], *numbers: object
    ) -> object:
        return kernel(CHUNK, flag, lists, *numbers)

    def multi_tensor_adam(
        self, chunk: int, flag: Tensor, lists: list[list[Tensor]], *numbers: Any
    ) -> None:
        lr, beta1, beta2, eps, step, mode, corrects_bias, decay = numbers
        _require([type(n) for n in (lr, beta1, beta2, eps, decay)] == [float] * 5)
        _require([type(n) for n in (step, mode, corrects_bias)] == [int] * 3)
        self.calls.append("adam")
        self._update(flag, lists, lr, (beta1, beta2), eps, step, mode, corrects_bias, decay, 1.0)

    def multi_tensor_adam_capturable(
        self, chunk: int, flag: Tensor, lists: list[list[Tensor]], *numbers: Any
    ) -> None:
        lr, beta1, beta2, eps, step, mode, corrects_bias, decay, inverse = numbers
        _require([t.dtype for t in (lr, step, inverse)] == [torch.float32, torch.int32, lr.dtype])
        _require(all(tensor.numel() == 1 for tensor in (lr, step, inverse)))
        self.calls.append("capturable")
        if int(flag) == 1:
            return
        numbers = (float(lr), (beta1, beta2), eps, int(step), mode, corrects_bias, decay)
        self._update(flag, lists, *numbers, float(inverse))

    def _update(
        self,
        flag: Tensor,
        lists: list[list[Tensor]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        step: int,
        mode: int,
        corrects_bias: int,
        decay: float,
        inverse: float,
    ) -> None:
        _require(flag.dtype == torch.int32 and flag.shape == (1,))
        _require(len(lists) == 4 and len({len(each) for each in lists}) == 1)
        _require(corrects_bias == 1 and mode in (0, 1))
        for tensors in zip(*lists, strict=True):
            _require(all(t.is_contiguous() and t.dtype == torch.float32 for t in tensors))
            gradient, parameter, mean, square = tensors
            _require(gradient.numel() > 0 and len({t.shape for t in tensors}) == 1)
            gradient.mul_(inverse)
            used = gradient if mode == 1 else gradient + decay * parameter
            mean.mul_(betas[0]).add_(used, alpha=1 - betas[0])
            square.mul_(betas[1]).add_(used * used, alpha=1 - betas[1])
            denominator = (square / (1 - betas[1] ** step)).sqrt() + eps
            change = mean / (1 - betas[0] ** step) / denominator
            parameter.sub_(lr * (change + (decay * parameter if mode == 1 else 0.0)))


def _require(holds: bool) -> None:
    if not holds:
        raise TypeError("the kernel does not take this argument")


@pytest.fixture(params=[*LIBRARIES])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Library]:
    fake = Library()
    applier, kernels = LIBRARIES[request.param]
    names = [n for each in (applier, kernels) for n in _prefixes(each)]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[applier].multi_tensor_applier = fake.multi_tensor_applier  # type: ignore[attr-defined]
    for each in ("multi_tensor_adam", "multi_tensor_adam_capturable"):
        setattr(sys.modules[kernels], each, getattr(fake, each))
    return request.param, fake


def _prefixes(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[: number + 1]) for number in range(len(parts))]


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((7, 5), (0, 3), (11,))]


def config(kernels: str, decoupled: bool) -> OptimizerConfig:
    return OptimizerConfig(
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPS,
        settings=AdamSettings(decoupled_weight_decay=decoupled, kernels=kernels),  # type: ignore[arg-type]
    )


def rule(name: str, decoupled: bool) -> Adam:
    made = Adam(config(name, decoupled))
    made._kernel = MultiTensorAdam.load(name)
    return made


def theirs(decoupled: bool, steps: Sequence[int]) -> list[Parameter]:
    parameters = [Parameter(tensor) for tensor in tensors(0)]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for step in steps:
        for parameter, gradient in zip(parameters, tensors(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return parameters


@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_that_the_host_decides_equal_torch(
    library: tuple[str, Library], decoupled: bool
) -> None:
    name, fake = library
    adam, ours = rule(name, decoupled), tensors(0)
    state = {each.name: [torch.zeros_like(t) for t in ours] for each in adam.state}
    for step in (1, 2, 3):
        adam.update(ours, tensors(step), state, lr=LR, weight_decay=DECAY, step=step)
    assert fake.calls == ["adam"] * 3
    for one, other in zip(ours, theirs(decoupled, (1, 2, 3)), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_that_the_device_decides_equal_torch(
    library: tuple[str, Library], decoupled: bool
) -> None:
    name, fake = library
    adam, ours = rule(name, decoupled), tensors(0)
    state = {each.name: [torch.zeros_like(t) for t in ours] for each in adam.state}
    for number, seed, skipped, divisor in (
        (1.0, 1, 0.0, None),
        (2.0, 9, 1.0, torch.tensor(float("nan"))),
        (2.0, 2, 0.0, torch.tensor(4.0)),
    ):
        gradients = [t * (4.0 if divisor is not None else 1.0) for t in tensors(seed)]
        step = UnreadStep(torch.tensor(number), torch.tensor(skipped), divisor)
        adam.update_unread(ours, gradients, state, lr=LR, weight_decay=DECAY, step=step)
    assert fake.calls == ["capturable"] * 3
    for one, other in zip(ours, theirs(decoupled, (1, 2)), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-5, atol=1e-6)


def test_groups_without_elements_launch_nothing(library: tuple[str, Library]) -> None:
    name, fake = library
    adam, empty = rule(name, True), [torch.zeros(0, 3)]
    state = {each.name: [torch.zeros(0, 3)] for each in adam.state}
    adam.update(empty, empty, state, lr=LR, weight_decay=DECAY, step=1)
    step = UnreadStep(torch.tensor(1.0), torch.tensor(0.0), None)
    adam.update_unread(empty, empty, state, lr=LR, weight_decay=DECAY, step=step)
    assert fake.calls == []


def test_kernels_of_libraries_leave_the_rounding_to_the_optimizer(
    library: tuple[str, Library],
) -> None:
    assert not MultiTensorAdam.load(library[0]).rounds


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_is_missing_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in LIBRARIES[name]:
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.setitem(sys.modules, module.split(".")[0], None)
    message = rf"kernels is {name}, which has no multi-tensor kernels here: .*; install it with"
    with pytest.raises(OptimError, match=message) as caught:
        MultiTensorAdam.load(name)
    assert "\n" not in str(caught.value)


def test_a_library_without_the_functions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On PyPI, another project has the name apex."""
    for module in ("apex", "apex.multi_tensor_apply", "amp_C"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    with pytest.raises(OptimError, match="kernels is apex, which has no multi-tensor kernels"):
        MultiTensorAdam.load("apex")


def test_parameters_on_a_cpu_are_refused_before_the_library_is_loaded() -> None:
    parameters = {"weight": Parameter(torch.ones(3, 2))}
    trainable = TrainableParameters(parameters, {"weight": Sharding((3, 2))}, Mesh.single())
    message = (
        "kernels is apex, which runs on CUDA devices, but parameter 'weight' is updated on a CPU; "
        "use torch"
    )
    with pytest.raises(OptimError) as caught:
        Optimizer(trainable, config("apex", True))
    assert str(caught.value) == message


def test_a_kernel_is_loaded_once_and_may_round(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCpu(Adam):
        kernel_devices = ("cpu",)

    loaded = []

    def load(library: str) -> SimpleNamespace:
        loaded.append(library)
        return SimpleNamespace(rounds=len(loaded) == 1)

    monkeypatch.setattr("megatron_optim.rules.load_kernel", load)
    adam = OnCpu(config("triton", True))
    assert not adam.rounds
    for _ in range(2):  # two groups of parameters
        adam.prepare({"a": torch.ones(2)})
        assert adam.rounds and loaded == ["triton"]
    plain = OnCpu(config("torch", True))
    plain.prepare({"a": torch.ones(2)})
    assert not plain.rounds and len(loaded) == 1


def test_float64_parameters_are_refused() -> None:
    with pytest.raises(OptimError, match="computes in fp32, but parameter 'a' is float64; use"):
        check_tensors("apex", {"a": torch.ones(2, dtype=torch.float64, device="meta")})
