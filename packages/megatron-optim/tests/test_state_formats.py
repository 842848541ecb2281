"""State and main parameters in other formats than fp32: what they hold, refuse and save."""

import math
from collections.abc import Callable

import pytest
import torch
from megatron_optim import OptimError, Optimizer, OptimizerConfig, StateFormatConfig, state_bytes
from megatron_optim.state_format_config import BLOCK, bytes_of
from megatron_optim.stored import Part, Remainder, Rounded, Scaled, element_hash
from megatron_optim.working_copies import operands
from megatron_parallel import Mesh, Sharding, TrainableParameters
from torch import Tensor, nn
from torch.nn import Parameter

AWARE = {"use_precision_aware_optimizer": True}
BETAS = {"adam_beta1": 0.9, "adam_beta2": 0.95}
FP32 = torch.float32


def spread(count: int, seed: int = 0) -> Tensor:
    """Returns numbers of many magnitudes and both signs."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randn(count, generator=generator).sign()
    return signs * 10 ** (torch.rand(count, generator=generator) * 12 - 10)


@pytest.mark.parametrize(("name", "bits"), [("bf16", 8), ("fp16", 11), ("fp8", 4)])
def test_values_are_rounded_to_the_bits_of_the_format(name: str, bits: int) -> None:
    values = spread(3 * BLOCK + 77)
    stored = Rounded(values, FP32) if name == "bf16" else Scaled(values, FP32, name)
    assert not stored.load_all().any()
    stored.store_all(values)
    found = stored.load_all()
    error = (found - values).abs()
    if name == "bf16":
        assert (error <= values.abs() * 2.0**-bits).all()
        assert torch.equal(found, values.bfloat16().float())
    # Relative to the element, or to the smallest number of the block's exponent.
    for start in range(0, len(values), BLOCK):
        part = slice(start, start + BLOCK)
        spacing = values[part].abs().max() * (2.0**-38 if name != "fp8" else 2.0**-16)
        assert (error[part] <= values[part].abs() * 2.0**-bits + spacing).all()


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e20])
def test_storing_what_was_loaded_changes_nothing(name: str, scale: float) -> None:
    values = spread(2 * BLOCK + 5) * scale
    # The largest value is rounded up to a power of two, and the smallest is subnormal.
    edges = [torch.tensor([2.0**15 - 4, 3 * 2.0**-24]), torch.tensor([255.9, 3 * 2.0**-9])]
    for each in (values, values.abs(), *edges):
        stored = Rounded(each, FP32) if name == "bf16" else Scaled(each, FP32, name, True)
        stored.store_all(each)
        first = stored.load_all()
        assert first.isfinite().all()
        stored.store_all(first)
        assert torch.equal(stored.load_all(), first)


@pytest.mark.parametrize("name", ["fp16", "fp8"])
def test_values_that_a_rule_divides_by_are_not_rounded_to_0(name: str) -> None:
    values = torch.tensor([1.0, 1e-14, 0.0, 1e-30])
    stored = Scaled(values, FP32, name, positive=True)
    stored.store_all(values)
    assert [bool(value) for value in stored.load_all()] == [True, True, False, True]
    plain = Scaled(values, FP32, name)
    plain.store_all(values)
    assert not plain.load_all()[3]


def test_ranges_are_parts_of_the_whole() -> None:
    values = spread(3 * BLOCK + 9)
    whole, parts = Scaled(values, FP32, "fp16"), Scaled(values, FP32, "fp16")
    whole.store_all(values)
    for start, stop in ((0, BLOCK), (BLOCK, 3 * BLOCK), (3 * BLOCK, len(values))):
        part = Part(parts, start, stop)
        parts.store([part], [values[start:stop]])
        assert torch.equal(parts.load([part])[0], whole.load_all()[start:stop])
    assert all(map(torch.equal, whole.tensors, parts.tensors))


def test_a_remainder_makes_a_bf16_parameter_exact() -> None:
    values = torch.cat([spread(10_000), -spread(10_000, 1), torch.tensor([0.0, -0.0, 1e-40])])
    ties = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 - 2**-23])
    values = torch.cat([values, ties])
    parameter = torch.zeros(len(values), dtype=torch.bfloat16)
    stored = Remainder(parameter)
    stored.store_all(values)
    assert torch.equal(stored.load_all().view(torch.int32), values.view(torch.int32))
    nearest = values.bfloat16()
    tied = (values.view(torch.int32) & 0xFFFF) == 2**15
    assert tied.sum() >= 3 and torch.equal(parameter[~tied], nearest[~tied])
    assert ((parameter.float() - values).abs() == (nearest.float() - values).abs()).all()
    assert stored.tensors[0].element_size() == 2
    stored.reset()
    assert torch.equal(stored.load_all(), parameter.float())


def make(
    formats: StateFormatConfig | None,
    config: OptimizerConfig,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> tuple[dict[str, Parameter], Optimizer]:
    generator = torch.Generator().manual_seed(5)
    shapes = {"a": (60, 40), "b": (40,), "c": (3, BLOCK)}
    parameters = {
        n: Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in shapes.items()
    }
    table = {name: Sharding(shape) for name, shape in shapes.items()}
    trainable = TrainableParameters(parameters, table, Mesh.single())
    return parameters, Optimizer(trainable, config, formats=formats, seed=seed)


def step(parameters: dict[str, Parameter], optimizer: Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step(1e-3)


def main(optimizer: Optimizer, name: str) -> Tensor:
    return optimizer.views()[f"{name}.main"][0].tensor


def test_bf16_with_remainders_equals_fp32_main_parameters_to_the_last_bit() -> None:
    config = OptimizerConfig(**BETAS)
    one, plain = make(None, config)
    two, aware = make(StateFormatConfig(**AWARE), config)
    for number in range(60):
        step(one, plain, number)
        step(two, aware, number)
    for name in one:
        assert torch.equal(main(plain, name), main(aware, name))
        assert torch.equal(one[name], two[name])
    assert not torch.equal(main(plain, "a"), one["a"].float())


@pytest.mark.parametrize(
    "formats",
    [
        {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
        {"exp_avg_dtype": "fp16", "exp_avg_sq_dtype": "fp16"},
        {"exp_avg_dtype": "fp8"},
    ],
    ids=str,
)
def test_updates_are_near_those_in_fp32(formats: dict) -> None:
    config = OptimizerConfig(**BETAS, clip_grad=0.0)
    one, plain = make(None, config)
    two, other = make(StateFormatConfig(**AWARE, **formats), config)
    before = {name: parameter.detach().float() for name, parameter in one.items()}
    for number in range(40):
        step(one, plain, number)
        step(two, other, number)
    for name in one:
        exact = main(plain, name) - before[name]
        error = (main(other, name) - before[name] - exact).norm() / exact.norm()
        assert 0 < error < 0.07, (name, error)


def test_stochastic_rounding_is_right_on_average_and_repeats() -> None:
    """A change of a tenth of a unit in the last place moves one element in ten."""
    config = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0)
    formats = StateFormatConfig(**AWARE, main_params_dtype="bf16")

    def run(seed: int, rounds: int = 1) -> Tensor:
        parameters = {"a": Parameter(torch.ones(300, 100, dtype=torch.bfloat16))}
        trainable = TrainableParameters(parameters, {"a": Sharding((300, 100))}, Mesh.single())
        optimizer = Optimizer(trainable, config, formats=formats, seed=seed)
        for _ in range(rounds):
            parameters["a"].grad = torch.full((300, 100), -1.0, dtype=torch.bfloat16)
            optimizer.step(0.1 * 2**-7)
        return parameters["a"].detach().float()

    moved = run(1)
    assert {*moved.unique().tolist()} == {1.0, 1 + 2**-7}
    share = (moved > 1).double().mean()
    assert abs(share - 0.1) < 5 * math.sqrt(0.09 / 30_000)
    assert torch.equal(moved, run(1)) and not torch.equal(moved, run(2))
    both = (run(1, 2) > 1).double().mean()  # another element moves in another step
    assert abs(both - 0.19) < 5 * math.sqrt(0.19 * 0.81 / 30_000)
    assert abs(run(1, 10).double().mean() - (1 + 2**-7)) < 2e-4
    rows = (moved > 1).double().mean(1)
    assert rows.var() < 2 * 0.09 / 100  # bits of neighbours are independent


def test_hashes_are_uniform_in_their_low_bits() -> None:
    numbers = torch.full((100_000,), 7)
    bits = element_hash(3, 1, numbers, torch.arange(100_000)) & 0xFFFF
    counts = torch.bincount(bits >> 12, minlength=16)
    assert ((counts - 6250).abs() < 5 * math.sqrt(6250)).all()
    assert not torch.equal(bits, element_hash(3, 2, numbers, torch.arange(100_000)) & 0xFFFF)


def test_large_parameters_are_updated_in_pieces() -> None:
    config = OptimizerConfig(**BETAS)
    formats = StateFormatConfig(**AWARE, exp_avg_dtype="fp16")
    parameters, optimizer = make(formats, config)
    gradients = {name: torch.ones_like(p, dtype=FP32) for name, p in parameters.items()}
    mains = {**optimizer._main.tensors, **optimizer._main.stored}
    sizes: dict[str, list[int]] = {}
    for group in optimizer.groups:
        for weights, grads, state in operands(
            group, mains, gradients, optimizer._state.values, BLOCK
        ):
            assert sum(w.numel() for w in weights) <= BLOCK + 60 * 40
            assert [w.shape for w in weights] == [g.shape for g in grads]
            assert [w.shape for w in weights] == [m.shape for m in state["exp_avg"]]
            for name, weight in zip(group.names, weights, strict=False):
                sizes.setdefault(name, []).append(weight.numel())
            for weight in weights:
                weight.fill_(3.0)
    assert len(sizes["a"]) >= 2
    assert all((parameter == 3).all() for parameter in parameters.values())


def test_a_checkpoint_is_in_fp32_and_loads_into_other_formats() -> None:
    config = OptimizerConfig(**BETAS)
    low = StateFormatConfig(**AWARE, exp_avg_dtype="fp16", exp_avg_sq_dtype="bf16")
    one, first = make(low, config)
    for number in range(5):
        step(one, first, number)
    saved = {name: views[0].tensor.clone() for name, views in first.views().items()}
    assert {tensor.dtype for tensor in saved.values()} == {FP32}
    assert {"a.main", "a.exp_avg", "a.exp_avg_sq"} <= saved.keys()
    for formats in (low, None):
        two, second = make(formats, config)
        for name, views in second.views().items():
            views[0].tensor.copy_(saved[name])
        for name, parameter in two.items():
            parameter.data.copy_(one[name])
        second.load_scalars(first.scalars())
        step(two, second, 5)
        if formats is low:
            step(one, first, 5)
            for name, views in second.views().items():
                assert torch.equal(views[0].tensor, first.views()[name][0].tensor), name


def test_a_run_that_continues_rounds_at_random_as_one_that_went_on() -> None:
    config = OptimizerConfig(**BETAS)
    formats = StateFormatConfig(**AWARE, main_params_dtype="bf16")
    one, first = make(formats, config, seed=7)
    for number in range(3):
        step(one, first, number)
    two, second = make(formats, config, seed=7)
    for name, parameter in two.items():
        parameter.data.copy_(one[name])
    for name, views in second.views().items():
        views[0].tensor.copy_(first.views()[name][0].tensor)
    second.load_scalars(first.scalars())
    for number in (3, 4):
        step(one, first, number)
        step(two, second, number)
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_step_that_is_skipped_changes_no_stored_value() -> None:
    formats = StateFormatConfig(**AWARE, exp_avg_dtype="fp8", exp_avg_sq_dtype="fp16")
    for skips in (lambda optimizer: None, lambda optimizer: setattr(optimizer, "_host_decides", 0)):
        parameters, optimizer = make(formats, OptimizerConfig(**BETAS))
        skips(optimizer)
        for number in range(3):
            step(parameters, optimizer, number)
        before = {name: views[0].tensor.clone() for name, views in optimizer.views().items()}
        weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        parameters["a"].grad[1, 2] = math.nan
        assert optimizer.step(1e-3).skipped
        for name, views in optimizer.views().items():
            assert torch.equal(views[0].tensor, before[name]), name
        assert all(torch.equal(weights[name], parameters[name]) for name in weights)


@pytest.mark.parametrize(
    ("settings", "formats", "message"),
    [
        ({}, {"exp_avg_sq_dtype": "bf16"}, "exp_avg_sq_dtype bf16 cannot hold a running mean of"),
        ({}, {"exp_avg_sq_dtype": "fp8"}, r"in a step: fp8 rounds changes up to 0.0625 away"),
        ({"adam_beta1": 0.95}, {"exp_avg_dtype": "fp8"}, "use fp32 or bf16 or fp16, or a decay"),
        ({"optimizer": "sgd"}, {"exp_avg_dtype": "bf16"}, "the update rule sgd has no state exp_a"),
    ],
)
def test_formats_that_do_not_fit_are_refused(settings: dict, formats: dict, message: str) -> None:
    with pytest.raises(OptimError, match=message):
        make(StateFormatConfig(**AWARE, **formats), OptimizerConfig(**settings))


def test_formats_need_their_switch() -> None:
    with pytest.raises(OptimError, match="exp_avg_dtype bf16 needs use_precision_aware_opt"):
        StateFormatConfig(exp_avg_dtype="bf16")
    with pytest.raises(OptimError, match="main_params_dtype bf16 is for weights in bfloat16"):
        StateFormatConfig(**AWARE, main_params_dtype="bf16").require_main_format("float32")


def test_fp32_parameters_may_have_state_in_other_formats(
    model: Callable[..., nn.Module], table: Callable[[nn.Module], dict], mesh: Mesh
) -> None:
    network = model(FP32)
    trainable = TrainableParameters(network.named_parameters(), table(network), mesh)
    formats = StateFormatConfig(**AWARE, exp_avg_dtype="bf16")
    optimizer = Optimizer(trainable, OptimizerConfig(**BETAS), formats=formats)
    network(torch.ones(3, 7)).square().sum().backward()
    optimizer.step(1e-2)
    assert not [name for name in optimizer.views() if name.endswith(".main")]
    assert optimizer.views()["0.weight.exp_avg"][0].tensor.any()


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
def test_tensors_are_stored_together_as_one_by_one(name: str) -> None:
    sizes = (5, BLOCK, 3 * BLOCK + 1, 1)
    values = [spread(size, seed) * 10.0**seed for seed, size in enumerate(sizes)]

    def stored() -> list[Rounded | Scaled]:
        return [Rounded(v, FP32) if name == "bf16" else Scaled(v, FP32, name) for v in values]

    alone, together = stored(), stored()
    for each, value in zip(alone, values, strict=True):
        each.store_all(value)
    parts = [Part(each, 0, each.numel) for each in together]
    together[0].store(parts, values)
    loaded = together[0].load(parts)
    for one, each, value in zip(alone, together, loaded, strict=True):
        assert all(map(torch.equal, one.tensors, each.tensors))
        assert torch.equal(value, one.load_all())


@pytest.mark.parametrize("rounded_at_once", [1, 7, 40, 10**6])
def test_stochastic_rounding_does_not_depend_on_the_pieces(
    rounded_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    formats = StateFormatConfig(**AWARE, main_params_dtype="bf16")
    found = []
    for size in (10**6, rounded_at_once):
        monkeypatch.setattr("megatron_optim.stored._ROUNDED_AT_ONCE", size)
        shapes = {"a": (9, 5), "b": (11,), "c": (), "d": (3, 2, 2)}
        parameters = {n: Parameter(torch.ones(s, dtype=torch.bfloat16)) for n, s in shapes.items()}
        table = {name: Sharding(shape) for name, shape in shapes.items()}
        trainable = TrainableParameters(parameters, table, Mesh.single())
        optimizer = Optimizer(trainable, OptimizerConfig("sgd", clip_grad=0.0), formats=formats)
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, -1.0)
        optimizer.step(0.4 * 2**-7)
        found.append({name: parameter.detach() for name, parameter in parameters.items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in shapes)
    assert len(found[0]["a"].unique()) == 2  # up and down


def test_parameters_that_are_rounded_at_random_are_not_cut() -> None:
    formats = StateFormatConfig(**AWARE, main_params_dtype="bf16")
    parameters, optimizer = make(formats, OptimizerConfig(**BETAS))
    gradients = {name: torch.ones_like(p, dtype=FP32) for name, p in parameters.items()}
    values, mains = optimizer._state.values, optimizer.main.stored
    calls = (operands(each, mains, gradients, values, BLOCK) for each in optimizer.groups)
    sizes = [[weight.shape for weight in weights] for each in calls for weights, *_ in each]
    assert sizes == [[(60, 40)], [(3, BLOCK)], [(40,)]]


@pytest.mark.parametrize(("name", "width"), [("fp16", 2), ("fp8", 1)])
def test_2048_elements_share_an_exponent_of_a_byte(name: str, width: int) -> None:
    for size, exponents in ((1, 1), (2048, 1), (2049, 2)):
        stored = Scaled(torch.zeros(size), FP32, name)
        assert sum(tensor.nbytes for tensor in stored.tensors) == width * size + exponents
    assert bytes_of(name) == width + 2.0**-11


@pytest.mark.parametrize(("name", "least"), [("fp16", 2.0**-38), ("fp8", 2.0**-16)])
def test_what_would_be_0_is_rounded_up_to_the_smallest_number_of_its_block(
    name: str, least: float
) -> None:
    values = torch.tensor([1.0, 1e-30, 0.0])
    stored = Scaled(values, FP32, name, positive=True)
    stored.store_all(values)
    assert stored.load_all().tolist() == [1.0, least, 0.0]


@pytest.mark.parametrize("name", ["fp16", "fp8"])
def test_numbers_at_the_ends_of_the_range_of_fp32_are_stored(name: str) -> None:
    for size in (1e-44, 1e-30, 1e34, 3e38):
        values = torch.tensor([size, -size / 2])
        stored = Scaled(values, FP32, name)
        stored.store_all(values)
        torch.testing.assert_close(stored.load_all(), values, rtol=2**-4, atol=1e-33)


@pytest.mark.parametrize(("first", "second"), [("fp32", "fp32"), ("bf16", "fp16"), ("fp8", "bf16")])
@pytest.mark.parametrize("main_format", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tensors_take_the_bytes_that_are_predicted(
    first: str, second: str, main_format: str, dtype: torch.dtype
) -> None:
    formats = StateFormatConfig(True, first, second, main_format)
    config = OptimizerConfig(**BETAS)
    parameter = Parameter(torch.ones(2 * BLOCK, 2, dtype=dtype))
    sharding = Sharding((2 * BLOCK, 2))
    trainable = TrainableParameters({"a": parameter}, {"a": sharding}, Mesh.single())
    optimizer = Optimizer(trainable, config, formats=formats)
    predicted = state_bytes(config, formats)(sharding)
    predicted += formats.main_bytes(str(dtype).removeprefix("torch."))
    held = sum(tensor.nbytes for tensor in optimizer.state_tensors())
    assert held == predicted * parameter.numel()


@torch.no_grad()
def test_every_element_is_updated_once_in_calls_that_are_full() -> None:
    config, formats = OptimizerConfig(**BETAS), StateFormatConfig(**AWARE, exp_avg_dtype="bf16")
    shapes = {"a": (BLOCK,), "b": (BLOCK + 1,), "c": (2, BLOCK), "d": (5,), "e": (3,)}
    parameters = {n: Parameter(torch.zeros(s)) for n, s in shapes.items()}
    table = {name: Sharding(shape) for name, shape in shapes.items()}
    optimizer = Optimizer(
        TrainableParameters(parameters, table, Mesh.single()), config, formats=formats
    )
    gradients = {name: torch.zeros(shape) for name, shape in shapes.items()}
    sizes = []
    for group in optimizer.groups:
        values = optimizer._state.values
        calls = operands(group, optimizer.main.tensors, gradients, values, BLOCK)
        for weights, _, state in calls:
            sizes.append([weight.numel() for weight in weights])
            for weight, mean in zip(weights, state["exp_avg"], strict=True):
                weight.add_(1.0)
                mean.add_(1.0)
    # Those with two dims come first, as they decay.
    assert sizes == [[BLOCK], [BLOCK], [BLOCK], [BLOCK], [1, 5, 3]]
    for name, views in optimizer.views().items():
        if name.endswith(".exp_avg"):
            assert (views[0].tensor == 1.0).all()
    assert all((parameter == 1.0).all() for parameter in parameters.values())
