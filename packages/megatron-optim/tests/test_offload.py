"""Which tensors are offloaded, against cases computed by hand, and settings that are refused."""

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from megatron_optim import (
    OffloadConfig,
    OptimError,
    Optimizer,
    OptimizerConfig,
    StateFormatConfig,
)
from megatron_optim.mixed_precision import MainParameters
from megatron_optim.offload import _slices
from megatron_optim.offload_config import GRADIENT_BYTES, MAIN_BYTES
from megatron_optim.param_groups import ParameterGroup
from megatron_optim.rules import Adam
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


def test_a_tensor_that_fits_exactly_is_offloaded() -> None:
    assert away(0.5).choose({"a": 50, "b": 40, "c": 10}) == {"a"}
    assert away(1.0).choose({"a": 1}) == {"a"}
    assert OffloadConfig().choose({"a": 1, "empty": 0}) == set()
    assert (away(0.25).fraction, OffloadConfig().fraction) == (0.25, 0.0)


class OnCpu(OffloadConfig):
    """Offloads although the device is a CPU, so that the arithmetic can be compared."""

    def check(self, *_: object) -> None:
        pass


SHAPES = {"large": (40, 30), "middle": (20, 10), "small": (3, 5), "gain": (7,)}
RULES = {
    "adam": OptimizerConfig(weight_decay=0.1, clip_grad=0.5),
    "adam without clipping": OptimizerConfig(weight_decay=0.1, clip_grad=0.0),
    "lion": OptimizerConfig("lion", weight_decay=0.1, clip_grad=0.5),
    "sgd": OptimizerConfig("sgd", weight_decay=0.1, clip_grad=0.5),
}


def trained(
    config: OptimizerConfig, dtype: torch.dtype, offload: OffloadConfig | None, unread: bool
) -> tuple[Optimizer, dict[str, torch.Tensor]]:
    """Takes four steps, of which the third is skipped."""
    generator = torch.Generator().manual_seed(3)
    parameters = {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
    }
    table = {name: Sharding(shape) for name, shape in SHAPES.items()}
    trainable = TrainableParameters(parameters, table, Mesh.single())
    optimizer = Optimizer(trainable, config, offload=offload)
    optimizer._host_decides = not unread
    for step in range(4):
        for parameter in parameters.values():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = (gradient * (float("nan") if step == 2 else 1.0)).to(dtype)
        assert bool(optimizer.step(0.01).skipped) == (step == 2)
    return optimizer, {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_offloaded_parameters_are_updated_as_others_are(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_optim.offload.SLICE", 200)  # large; middle; small and gain
    for unread in (False, True):
        plain, expected = trained(RULES[name], dtype, None, unread)
        for fraction, overlap in ((1.0, False), (1.0, True), (0.2, True)):
            offload = OnCpu(True, fraction, overlap)
            optimizer, weights = trained(RULES[name], dtype, offload, unread)
            hosted = optimizer.main.hosted
            assert hosted.keys() == set(SHAPES) - ({"large"} if fraction < 1.0 else set())
            limit = {torch.float64: 1e-14, torch.float32: 1e-6}.get(dtype, 1e-2)
            for each, weight in weights.items():
                torch.testing.assert_close(weight, expected[each], rtol=limit, atol=limit)
                if each in hosted:
                    assert hosted[each].data_ptr() != weight.data_ptr()
                    assert torch.equal(hosted[each].to(dtype), weight)
            main = dict(plain.main.values())
            for each, value in optimizer.main.values():
                torch.testing.assert_close(value, main[each], rtol=1e-5, atol=1e-6)
            assert (optimizer.steps, optimizer.skipped_steps) == (3, 1)


class Stream:
    """A stream of copies that notes its marks, what waits for them, and joins."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.marks = 0

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> SimpleNamespace:
        self.marks += 1
        number = self.marks
        self.events.append(f"mark {number}")
        return SimpleNamespace(synchronize=lambda: self.events.append(f"wait {number}"))

    def join(self) -> None:
        self.events.append("join")


def test_each_slice_of_a_step_is_waited_for_and_skipped_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Stream()
    monkeypatch.setattr("megatron_optim.offload.SLICE", 200)
    monkeypatch.setattr("megatron_optim.offload.SideStream.of", lambda _: stream)
    trained(RULES["adam"], torch.float32, OnCpu(True, 1.0, True), False)
    steps = " ".join(stream.events).split("join")[:-1]
    assert len(steps) == 4
    for step, found in enumerate(steps):  # the groups with and without weight decay
        marks = range(4 * step + 1, 4 * step + 5)
        events = ["mark", "wait"] if step != 2 else ["mark"]
        assert found.split() == [f for each in events for n in marks for f in (each, str(n))]


def test_a_slice_ends_once_it_has_enough_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_optim.offload.SLICE", 10)
    sizes = {"a": 9, "b": 1, "c": 10, "d": 4, "e": 5, "f": 30, "g": 9}
    group = ParameterGroup(Adam(OptimizerConfig()), 1.0, False, tuple(sizes), {})
    found = _slices(group, {name: torch.zeros(size) for name, size in sizes.items()})
    assert ["".join(part.names) for part in found] == ["ab", "c", "def", "g"]


@pytest.mark.parametrize("aware", [False, True])
def test_weights_in_bf16_are_rounded_on_the_host_as_on_the_device(aware: bool) -> None:
    """With remainders, a tie goes away from zero; otherwise it goes to the even number."""
    tie = 1 + 2**-8
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    table = {"a": Sharding((3,))}
    trainable = TrainableParameters({"a": parameter}, table, Mesh.single())
    formats = StateFormatConfig(use_precision_aware_optimizer=aware)
    main = MainParameters(trainable, formats, offload=OnCpu(True))
    main.hosted["a"].copy_(torch.tensor([tie, -tie, 2.0]))
    rounded = torch.zeros(3, dtype=torch.bfloat16)
    main.round_hosted("a", rounded)
    up = 1 + 2**-7 if aware else 1.0
    assert rounded.tolist() == [up, -up, 2.0]


def test_the_host_has_the_bytes_that_are_predicted() -> None:
    optimizer, weights = trained(RULES["adam"], torch.bfloat16, OnCpu(True), False)
    elements = sum(weight.numel() for weight in weights.values())
    host = optimizer._updates._host
    assert host is not None
    mains, gradients = optimizer.main.hosted, host._gradients
    assert sum(main.nbytes for main in mains.values()) == MAIN_BYTES * elements
    assert sum(gradient.nbytes for gradient in gradients.values()) == GRADIENT_BYTES * elements


def test_offloaded_copies_of_full_weights_follow_a_checkpoint() -> None:
    """A checkpoint has no second copy of them; that of bf16 weights it has."""
    for dtype, saved in ((torch.float32, False), (torch.bfloat16, True)):
        optimizer, weights = trained(RULES["adam"], dtype, OnCpu(True), False)
        assert ("large.main" in optimizer.views()) == saved
        before = optimizer.main.hosted["large"].clone()
        weights["large"].fill_(2.0)
        optimizer.load_scalars(optimizer.scalars())
        hosted = optimizer.main.hosted["large"]
        assert torch.equal(hosted, before if saved else torch.full((40, 30), 2.0))
        optimizer.reload_model_parameters()
        assert torch.equal(hosted, torch.full((40, 30), 2.0))
