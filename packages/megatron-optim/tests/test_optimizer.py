import copy
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron_optim import (
    OptimError,
    Optimizer,
    OptimizerConfig,
    StateFormatConfig,
    parameter_groups,
)
from megatron_optim.decision import Decision
from megatron_parallel import (
    DataParallelConfig,
    GradientBuffers,
    Mesh,
    ParallelLayout,
    ParameterBuffers,
    Sharding,
    TrainableParameters,
)
from megatron_parallel.imagined import imagined_device
from megatron_parallel.imagined.guard import COMPILERS
from megatron_parallel.testing import Rank, WorkerPool
from torch import nn

Model = Callable[..., nn.Module]
Table = Callable[[nn.Module], dict[str, Sharding]]
CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, adam_beta2=0.95, clip_grad=0.05)


@pytest.fixture
def build(table: Table, mesh: Mesh) -> Callable[..., Optimizer]:
    def make(network: nn.Module, config: OptimizerConfig = CONFIG) -> Optimizer:
        return Optimizer(
            TrainableParameters(network.named_parameters(), table(network), mesh), config
        )

    return make


def backward(network: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    dtype = next(network.parameters()).dtype
    batch = torch.randn(13, 7, generator=generator, dtype=torch.float64).to(dtype)
    network(batch).square().mean().backward()


def decay_groups(network: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in network.parameters() if p.ndim > 1]
    vectors = [p for p in network.parameters() if p.ndim == 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def test_twenty_steps_equal_torch_adamw_with_clipping(
    model: Model, build: Callable[..., Optimizer]
) -> None:
    ours, theirs = model(), model()
    optimizer = build(ours)
    reference = torch.optim.AdamW(decay_groups(theirs), weight_decay=0.1, betas=(0.9, 0.95))
    clipped = []
    for step in range(20):
        lr = 1e-2 * (step + 1) / 20
        backward(ours, step)
        result = optimizer.step(lr)
        optimizer.zero_grad()

        backward(theirs, step)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        reference.zero_grad()

        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-12)
        clipped.append(result.clip_coefficient < 1.0)
    assert any(clipped)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_embedding_and_output_use_the_decoupled_learning_rate(mesh: Mesh) -> None:
    start = {n: torch.linspace(-1, 1, 6, dtype=torch.float64) for n in ("word", "gain", "output")}
    ours = {name: nn.Parameter(tensor.clone().view(2, 3)) for name, tensor in start.items()}
    theirs = {name: nn.Parameter(tensor.clone().view(2, 3)) for name, tensor in start.items()}
    table = {name: Sharding((2, 3), vocabulary=name != "gain") for name in ours}
    config = OptimizerConfig(weight_decay=0.1, clip_grad=0.0)
    optimizer = Optimizer(TrainableParameters(ours, table, mesh), config)
    reference = torch.optim.AdamW(
        [{"params": [theirs["word"], theirs["output"]]}, {"params": [theirs["gain"]]}],
        weight_decay=0.1,
    )
    for step, rates in enumerate([(0.1, 0.02), (0.05, 0.07), (0.03, 0.03)], start=1):
        for parameter in (*ours.values(), *theirs.values()):
            parameter.grad = (parameter * step).cos().detach()
        for group, rate in zip(reference.param_groups, reversed(rates), strict=True):
            group["lr"] = rate
        optimizer.step(rates[0], decoupled_lr=None if step == 3 else rates[1])
        reference.step()
        for name, parameter in ours.items():
            torch.testing.assert_close(parameter, theirs[name], rtol=0, atol=1e-14)
    with pytest.raises(OptimError, match="decoupled_min_lr needs decoupled_lr; set both"):
        OptimizerConfig(decoupled_min_lr=1e-4)
    with pytest.raises(OptimError, match=r"decoupled_lr must not be negative, got -1\.0"):
        OptimizerConfig(decoupled_lr=-1.0)


def test_a_step_follows_the_written_formula(mesh: Mesh) -> None:
    start = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)
    parameter = nn.Parameter(start.clone())
    config = OptimizerConfig(adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-3, clip_grad=0.0)
    optimizer = Optimizer(
        TrainableParameters({"w": parameter}, {"w": Sharding((2, 3))}, mesh), config
    )
    weight, mean, square = start.clone(), torch.zeros(2, 3), torch.zeros(2, 3)
    for step, (lr, decay) in enumerate([(0.1, 0.0), (0.2, 0.5), (0.05, 0.3)], start=1):
        gradient = (weight * step).cos()
        parameter.grad = gradient.clone()
        optimizer.step(lr, decay)
        mean = 0.8 * mean + 0.2 * gradient
        square = 0.9 * square + 0.1 * gradient**2
        update = (mean / (1 - 0.8**step)) / ((square / (1 - 0.9**step)).sqrt() + 1e-3)
        weight = weight - lr * decay * weight - lr * update
        torch.testing.assert_close(parameter.data, weight, rtol=0, atol=1e-14)


def test_decay_groups_come_from_the_global_shape() -> None:
    parameters = {name: nn.Parameter(torch.zeros(4)) for name in ("a.weight", "b.weight")}
    parameters["c.bias"] = nn.Parameter(torch.zeros(2, 4))
    table = {
        "a.weight": Sharding((8,)),
        "b.weight": Sharding((4, 1)),
        "c.bias": Sharding((2, 4), weight_decay=False),
    }
    decaying, others = parameter_groups(parameters, table, 0.1)
    assert decaying == {"params": [parameters["b.weight"]], "weight_decay": 0.1, "decays": True}
    assert others["params"] == [parameters["a.weight"], parameters["c.bias"]]
    assert others["weight_decay"] == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_with_a_bad_gradient_changes_nothing_and_is_counted(
    model: Model, build: Callable[..., Optimizer], value: float, dtype: torch.dtype
) -> None:
    network = model(dtype)
    optimizer = build(network)
    backward(network, 0)
    optimizer.step(1e-2)
    before = copy.deepcopy(network.state_dict())
    state = {name: views[0].tensor.clone() for name, views in optimizer.views().items()}

    next(network.parameters()).grad[1, 2] = value
    result = optimizer.step(1e-2)

    assert result.skipped
    assert not math.isfinite(result.grad_norm)
    assert result.clip_coefficient == 1.0
    assert optimizer.scalars() == {"steps": 1, "skipped_steps": 1}
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name])
    for name, views in optimizer.views().items():
        assert torch.equal(views[0].tensor, state[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_restored_optimizer_continues_bit_for_bit(
    model: Model, build: Callable[..., Optimizer], dtype: torch.dtype
) -> None:
    network = model(dtype)
    optimizer = build(network)
    for step in range(3):
        optimizer.zero_grad()
        backward(network, step)
        optimizer.step(1e-2)

    resumed = model(dtype)
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.zero_()
    other = build(resumed)
    resumed.load_state_dict(network.state_dict())
    for name, views in other.views().items():
        for mine, saved in zip(views, optimizer.views()[name], strict=True):
            assert mine[1:] == saved[1:]
            mine.tensor.copy_(saved.tensor)
    other.load_scalars(optimizer.scalars())

    for step in range(3, 6):
        results = []
        for one, its_optimizer in ((network, optimizer), (resumed, other)):
            its_optimizer.zero_grad()
            backward(one, step)
            results.append(its_optimizer.step(1e-2))
        assert results[0] == results[1]
    for one, two in zip(network.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two)
    for name, views in optimizer.views().items():
        assert torch.equal(views[0].tensor, other.views()[name][0].tensor)


def test_views_are_named_after_parameters(model: Model, build: Callable[..., Optimizer]) -> None:
    plain = build(model(torch.float32)).views()
    assert {name.rsplit(".", 1)[1] for name in plain} == {"exp_avg", "exp_avg_sq"}
    assert plain["3.weight.exp_avg"][0].global_shape == (5, 11)
    low = build(model(torch.bfloat16)).views()
    assert {name.rsplit(".", 1)[1] for name in low} == {"exp_avg", "exp_avg_sq", "main"}
    assert {views[0].tensor.dtype for views in low.values()} == {torch.float32}


@pytest.mark.parametrize("name", ["adam", "sgd", "lion", "muon", "adafactor"])
def test_the_states_of_a_rule_and_of_its_fallback_have_their_names(
    model: Model, build: Callable[..., Optimizer], name: str
) -> None:
    optimizer = build(model(), OptimizerConfig(name))
    found = {view.rsplit(".", 1)[1] for view in optimizer.views()}
    assert sorted(optimizer.state_names) == sorted(found)


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_bf16_parameters_follow_an_fp32_run_of_the_same_gradients(
    model: Model, build: Callable[..., Optimizer], clip: float
) -> None:
    """Equal to the last bit; with clipping, the kernel divides what is multiplied in fp32."""
    low, full = model(torch.bfloat16), model(torch.bfloat16).float()
    config = replace(CONFIG, clip_grad=clip)
    one, two = build(low, config), build(full, config)
    coefficients = []
    for step in range(30):
        one.zero_grad()
        backward(low, step)
        for narrow, wide in zip(low.parameters(), full.parameters(), strict=True):
            wide.grad = narrow.grad.float()
        # Far below the resolution of bf16 (2^-8 of a weight): only main parameters accumulate it.
        results = one.step(1e-4), two.step(1e-4)
        assert clip or results[0] == results[1]
        coefficients.append(float(results[0].clip_coefficient))
    assert (min(coefficients) < 1.0) == bool(clip)
    tolerance = 1e-8 if clip else 0.0
    for name, parameter in full.named_parameters():
        main = one.views()[f"{name}.main"][0].tensor
        torch.testing.assert_close(main, parameter.data, rtol=10 * tolerance, atol=tolerance)
        assert torch.equal(low.get_parameter(name).data, main.bfloat16())


def test_main_parameters_are_reloaded_from_loaded_weights(
    model: Model, build: Callable[..., Optimizer]
) -> None:
    network = model(torch.bfloat16)
    optimizer = build(network)
    with torch.no_grad():
        network[0].weight.fill_(3.0)
    optimizer.reload_model_parameters()
    assert torch.equal(optimizer.views()["0.weight.main"][0].tensor, torch.full((11, 7), 3.0))


def test_a_parameter_the_backward_did_not_reach_has_gradient_zero(
    model: Model, build: Callable[..., Optimizer]
) -> None:
    reached, zeroed = model(), model()
    one, two = build(reached), build(zeroed)
    for step in range(3):
        for network, optimizer in ((reached, one), (zeroed, two)):
            optimizer.zero_grad()
            backward(network, step)
        reached[0].weight.grad = None
        zeroed[0].weight.grad.zero_()
        assert one.step(1e-2) == two.step(1e-2)
    for a, b in zip(reached.parameters(), zeroed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_frozen_parameters_are_left_out(model: Model, build: Callable[..., Optimizer]) -> None:
    network = model()
    network[0].weight.requires_grad_(False)
    before = network[0].weight.clone()
    optimizer = build(network)
    backward(network, 0)
    optimizer.step(0.1)
    assert torch.equal(network[0].weight, before)
    assert "0.weight.exp_avg" not in optimizer.views()


def test_mistakes_are_named(mesh: Mesh) -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    table = {"a": Sharding((2, 2)), "b": Sharding((2, 2))}
    with pytest.raises(OptimError, match="'c'"):
        Optimizer(TrainableParameters({"c": weight}, table, mesh), CONFIG)
    with pytest.raises(OptimError, match="'a' and 'b' are the same"):
        Optimizer(TrainableParameters({"a": weight, "b": weight}, table, mesh), CONFIG)
    with pytest.raises(OptimError, match="no parameter"):
        Optimizer(TrainableParameters({}, table, mesh), CONFIG)
    with pytest.raises(OptimError, match="complex64"):
        Optimizer(TrainableParameters({"a": nn.Parameter(weight.cfloat())}, table, mesh), CONFIG)
    with pytest.raises(OptimError, match="steps"):
        Optimizer(TrainableParameters({"a": weight}, table, mesh), CONFIG).load_scalars({})


def test_gradients_may_come_from_buffers(model: Model, mesh: Mesh, table: Table) -> None:
    """Gradients from buffers are used without conversion; those of the parameters are ignored."""
    network, reference = model(torch.bfloat16), model(torch.bfloat16).float()
    generator = torch.Generator().manual_seed(1)
    drawn = {n: torch.randn(p.shape, generator=generator) for n, p in network.named_parameters()}
    handed = {name: gradient.clone() for name, gradient in drawn.items()}
    for name, parameter in reference.named_parameters():
        parameter.grad = drawn[name].clone()
    next(network.parameters()).grad = torch.full((11, 7), math.nan, dtype=torch.bfloat16)

    named = dict(network.named_parameters())
    one = Optimizer(
        TrainableParameters(named, table(network), mesh, gradients=lambda: handed), CONFIG
    )
    two = Optimizer(
        TrainableParameters(reference.named_parameters(), table(reference), mesh), CONFIG
    )
    assert one.gradients()["0.weight"] is handed["0.weight"]
    assert one.step(1e-2) == two.step(1e-2)
    for name, parameter in reference.named_parameters():
        main = one.views()[f"{name}.main"][0].tensor
        torch.testing.assert_close(main, parameter.data, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(handed[name], parameter.grad, rtol=1e-6, atol=0.0)  # clipped
    one.zero_grad()
    assert next(network.parameters()).grad is not None

    del handed["3.bias"]
    with pytest.raises(OptimError, match=r"1 parameters have no gradient.* first is '3\.bias'"):
        one.step(1e-2)


def test_a_loss_that_is_not_finite_skips_the_step(mesh: Mesh) -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    trainable = TrainableParameters({"w": parameter}, {"w": Sharding((3,))}, mesh)
    optimizer = Optimizer(trainable, CONFIG)
    losses = [torch.tensor(value, dtype=torch.float64) for value in (1.0, math.nan)]
    result = optimizer.step(0.1, losses=losses)
    assert result.skipped and torch.equal(parameter, torch.ones(3))
    assert (optimizer.steps, optimizer.skipped_steps) == (0, 1)
    assert float(result.grad_norm) == pytest.approx(3**0.5)
    assert not optimizer.step(0.1, losses=losses[:1]).skipped
    assert not torch.equal(parameter, torch.ones(3))


def test_values_that_were_saved_do_not_come_back_in_a_later_step(mesh: Mesh) -> None:
    """Views of state in other formats are copies, which end with the next step."""
    formats = StateFormatConfig(use_precision_aware_optimizer=True, exp_avg_dtype="fp16")
    found = []
    for saves in (False, True):
        parameter = nn.Parameter(torch.ones(3))
        trainable = TrainableParameters({"w": parameter}, {"w": Sharding((3,))}, mesh)
        optimizer = Optimizer(trainable, CONFIG, formats=formats)
        for size in (1.0, 2.0):
            parameter.grad = torch.full((3,), size)
            optimizer.step(0.1)
            if saves and size == 1.0:
                optimizer.views()
        optimizer.load_scalars(optimizer.scalars())
        found.append(optimizer.views()["w.exp_avg"][0].tensor.clone())
    assert torch.equal(*found)


def test_a_group_without_parameters_is_left_out() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    for decays in (True, False):
        table = {"a": Sharding((2, 2), weight_decay=decays)}
        (group,) = parameter_groups({"a": weight}, table, 0.1)
        assert group == {"params": [weight], "weight_decay": 0.1 * decays, "decays": decays}


@pytest.mark.parametrize("name", ["adam", "muon"])
def test_a_stage_may_be_frozen_or_have_no_matrix_but_not_a_whole_model(name: str) -> None:
    table = {"a": Sharding((3,))}
    for stages, frozen in ((2, True), (2, False), (1, True)):
        mesh = Mesh.imagined(ParallelLayout(pp=stages, dp=1))
        parameters = {"a": nn.Parameter(torch.zeros(3), requires_grad=not frozen)}
        trainable = TrainableParameters(parameters, table, mesh)
        if stages == 1:
            with pytest.raises(OptimError, match="none requires a gradient"):
                Optimizer(trainable, OptimizerConfig(name))
        else:
            groups = Optimizer(trainable, OptimizerConfig(name)).groups
            assert [n for group in groups for n in group.names] == ([] if frozen else ["a"])
        mesh.close()


def test_weights_that_were_loaded_reach_the_main_parameters_of_shards(mesh: Mesh) -> None:
    weights = {"a": nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16))}
    table = {"a": Sharding((4, 3))}
    data = DataParallelConfig(use_distributed_optimizer=True)
    buffers = GradientBuffers(weights, table, mesh, data)
    shards = [ParameterBuffers([], buffers, table)]
    trainable = TrainableParameters(
        weights, table, mesh, gradients=buffers.gradients, shards=shards
    )
    optimizer = Optimizer(trainable, CONFIG)
    weights["a"].data.fill_(3.0)
    assert not any(value.any() for _, value in optimizer.main.values())
    optimizer.reload_model_parameters()
    assert all((value == 3.0).all() for _, value in optimizer.main.values())


def test_an_imagined_step_is_taken_as_an_update_and_waits_once() -> None:
    if torch.cuda.is_available() or not any(map(shutil.which, COMPILERS)):
        pytest.skip("the device guard needs a C++ compiler and a machine without a GPU")

    def read(rank: Rank) -> tuple[Decision, int]:
        with imagined_device("cuda") as ledger:
            flag, count = torch.ones((), dtype=torch.bool), torch.zeros((), dtype=torch.int64)
            numbers = [t.to("cuda") for t in (torch.ones(()), flag, count)]
            ledger.clear()
            return Decision.read(*numbers), sum(ledger.waits.values())

    with WorkerPool(1, device_guard=True) as pool:
        assert pool.run(read, ranks=1) == [(Decision(1.0, True, 1), 1)]
