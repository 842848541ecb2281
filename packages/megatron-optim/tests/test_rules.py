"""Update rules compared with torch's optimizers in float64, and the lookup of rules."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from types import ModuleType

import megatron_parallel.extensions as extensions
import numpy as np
import pytest
import torch
from megatron_optim import (
    AdamSettings,
    LionSettings,
    OptimError,
    Optimizer,
    OptimizerConfig,
    StateTensor,
    UpdateRule,
    build_rules,
)
from megatron_optim.rule_registry import RULES, UpdateRuleKind
from megatron_optim.rules import Adam
from megatron_parallel import Mesh, Sharding, TrainableParameters
from megatron_parallel.extensions import Section
from torch import Tensor, nn

Model = Callable[..., nn.Module]
Table = Callable[[nn.Module], dict[str, Sharding]]


def backward(network: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(13, 7, generator=generator, dtype=torch.float64)
    network(batch).square().mean().backward()


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_twenty_steps_of_sgd_equal_torch(
    model: Model, table: Table, mesh: Mesh, momentum: float
) -> None:
    ours, theirs = model(), model()
    config = OptimizerConfig(
        optimizer="sgd", sgd_momentum=momentum, weight_decay=0.1, clip_grad=0.0
    )
    optimizer = Optimizer(TrainableParameters(ours.named_parameters(), table(ours), mesh), config)
    matrices = [p for p in theirs.parameters() if p.ndim > 1]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
    reference = torch.optim.SGD(groups, lr=1.0, momentum=momentum)
    for step in range(20):
        lr = 0.05 * (step + 1) / 20
        for group in reference.param_groups:
            group["lr"] = lr
        for network in (ours, theirs):
            network.zero_grad()
            backward(network, step)
        optimizer.step(lr)
        reference.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)
    names = {name.rsplit(".", 1)[1] for name in optimizer.views()}
    assert names == ({"momentum_buffer"} if momentum else set())


@pytest.mark.parametrize("decoupled", [True, False])
def test_twenty_steps_of_adam_equal_torch(
    model: Model, table: Table, mesh: Mesh, decoupled: bool
) -> None:
    ours, theirs = model(), model()
    config = OptimizerConfig(
        weight_decay=0.1, clip_grad=0.0, adam_beta2=0.95, settings=AdamSettings(decoupled)
    )
    optimizer = Optimizer(TrainableParameters(ours.named_parameters(), table(ours), mesh), config)
    matrices = [p for p in theirs.parameters() if p.ndim > 1]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = kind(groups, lr=1.0, betas=(0.9, 0.95), foreach=False, fused=False)
    for step in range(20):
        lr = 0.05 * (step + 1) / 20
        for group in reference.param_groups:
            group["lr"] = lr
        for network in (ours, theirs):
            network.zero_grad()
            backward(network, step)
        optimizer.step(lr)
        reference.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def published_lion(
    weight: np.ndarray, gradients: list[np.ndarray], rates: list[float], decay: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns parameters and momentum after the steps of algorithm 2 of Chen et al. 2023."""
    first, second, momentum = 0.95, 0.98, np.zeros_like(weight)
    for gradient, rate in zip(gradients, rates, strict=True):
        interpolated = first * momentum + (1 - first) * gradient
        weight = weight - rate * (np.sign(interpolated) + decay * weight)
        momentum = second * momentum + (1 - second) * gradient
    return weight, momentum


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_twenty_steps_of_lion_equal_the_published_algorithm(mesh: Mesh, dtype: torch.dtype) -> None:
    draw = np.random.default_rng(4)
    shapes = {"matrix": (5, 7), "gain": (7,)}
    start = {name: draw.standard_normal(shape) for name, shape in shapes.items()}
    gradients = [
        {name: draw.standard_normal(shape) for name, shape in shapes.items()} for _ in range(20)
    ]
    rates = [0.01 * (step + 1) / 20 for step in range(20)]
    parameters = {
        name: nn.Parameter(torch.tensor(value, dtype=dtype)) for name, value in start.items()
    }
    table = {name: Sharding(shape) for name, shape in shapes.items()}
    config = OptimizerConfig(optimizer="lion", weight_decay=0.3, clip_grad=0.0)
    optimizer = Optimizer(TrainableParameters(parameters, table, mesh), config)
    for given, rate in zip(gradients, rates, strict=True):
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(given[name]).to(dtype)
        optimizer.step(rate)
    eps = 1e-14 if dtype == torch.float64 else 1e-6
    for name, parameter in parameters.items():
        decay = 0.3 if name == "matrix" else 0.0
        weight, momentum = published_lion(
            start[name], [given[name] for given in gradients], rates, decay
        )
        kept = optimizer.views()[f"{name}.exp_avg"][0].tensor
        for value, true in ((parameter.detach(), weight), (kept, momentum)):
            torch.testing.assert_close(value.double(), torch.from_numpy(true), rtol=0, atol=eps)


@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_impossible_settings_of_lion_name_the_field(name: str) -> None:
    with pytest.raises(OptimError, match=rf"{name} must lie in \[0, 1\), got 1\.0"):
        LionSettings(**{name: 1.0})


class Signed(UpdateRule):
    """Steps by the sign of a slow mean of the gradient, with the mean in bf16."""

    def __init__(self, config: OptimizerConfig) -> None:
        super().__init__(config)
        self.seen: list[tuple[list[int], float, int]] = []
        self.state = (StateTensor("slow", torch.bfloat16),)

    def update(self, parameters, gradients, state, *, lr, weight_decay, step):  # type: ignore[no-untyped-def]
        self.seen.append(([tensor.ndim for tensor in parameters], weight_decay, step))
        for parameter, gradient, slow in zip(parameters, gradients, state["slow"], strict=True):
            slow.mul_(0.5).add_(gradient, alpha=0.5)
            parameter.sub_(lr * slow.sign() + lr * weight_decay * parameter)


class Scaled(UpdateRule):
    """Steps by the gradient divided by its Frobenius norm, for each matrix."""

    needs = "matrices"
    fallback = "sgd"

    def update(self, parameters, gradients, state, *, lr, weight_decay, step):  # type: ignore[no-untyped-def]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            norm = torch.linalg.matrix_norm(gradient, keepdim=True)
            parameter.sub_(lr * gradient / norm)


class Twice(Signed):
    """A rule that violates the contract."""

    state = (StateTensor("main"),)

    def __init__(self, config: OptimizerConfig) -> None:
        UpdateRule.__init__(self, config)


class Circular(Scaled):
    """A rule whose fallback has this rule as its fallback."""

    fallback = "scaled"


@dataclass(frozen=True)
class Slowness:
    """Settings that only one rule has."""

    share: float = 0.5


class Slowed(Scaled):
    """A rule with its own settings and a fallback without settings."""


SETTINGS = {"slowed": Section("slowed", Slowness, "slowness")}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Registers the rules of this file as entry points of another distribution."""
    module = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "strange", module)
    names = {"signed": "Signed", "scaled": "Scaled", "twice": "Twice", "circular": "Circular"}
    names |= {"absent": "Absent", "number": "MARK", "slowed": "Slowed"}
    for name, rule in names.items():
        kind = UpdateRuleKind(name, "for this test", f"strange:{rule}", SETTINGS.get(name))
        monkeypatch.setattr(module, f"KIND_{name}", kind, raising=False)
    found = [EntryPoint(name, f"strange:KIND_{name}", RULES.group) for name in names]
    found.append(EntryPoint("bare", "strange:Signed", RULES.group))
    true = extensions.entry_points
    monkeypatch.setattr(
        extensions,
        "entry_points",
        lambda group: found if group == RULES.group else true(group=group),
    )
    yield module


MARK = 7


@pytest.mark.usefixtures("installed")
def test_a_rule_of_another_distribution_updates_and_saves_its_state(
    model: Model, table: Table, mesh: Mesh
) -> None:
    network = model()
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    config = OptimizerConfig(optimizer="signed", weight_decay=0.1, clip_grad=0.0)
    optimizer = Optimizer(
        TrainableParameters(network.named_parameters(), table(network), mesh), config
    )
    backward(network, 0)
    optimizer.step(0.5)
    for name, parameter in network.named_parameters():
        decay = 0.05 * before[name] if parameter.ndim > 1 else 0.0
        expected = before[name] - 0.5 * parameter.grad.sign() - decay
        torch.testing.assert_close(parameter.data, expected, rtol=0, atol=1e-14)
        kept = optimizer.views()[f"{name}.slow"][0].tensor
        assert kept.dtype == torch.bfloat16 and kept.shape == parameter.shape

    first = next(network.parameters())
    first.grad.fill_(torch.nan)
    optimizer.step(0.5)
    backward(network, 1)
    network.zero_grad()
    optimizer.step(0.5)
    (rule,) = {group.rule for group in optimizer._groups}
    assert [(decay, step) for _, decay, step in rule.seen] == [(0.1, 1), (0.0, 1), (0.1, 2), (0, 2)]


@pytest.mark.usefixtures("installed")
def test_a_rule_that_divides_nothing_gets_clipped_gradients(mesh: Mesh) -> None:
    """Only rules that say so get a divisor, and on a CPU no other needs `update_unread`."""
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    trainable = TrainableParameters({"a": parameter}, {"a": Sharding((2, 2))}, mesh)
    optimizer = Optimizer(trainable, OptimizerConfig(optimizer="signed", clip_grad=1.0))
    optimizer.step(0.5)
    slow = optimizer.views()["a.slow"][0].tensor.float()
    torch.testing.assert_close(slow, torch.tensor([[0.3, 0.0], [0.0, 0.4]]), rtol=0.01, atol=0)


@pytest.mark.usefixtures("installed")
def test_matrices_use_their_rule_and_other_parameters_the_fallback(mesh: Mesh) -> None:
    table = {
        "embedding": Sharding((9, 4), vocabulary=True),
        "fused": Sharding((2, 3, 4), fused_dim=0),
        "experts": Sharding((3, 2, 4), "expert_tp", 1, experts=True),
        "gain": Sharding((4,)),
    }
    generator = torch.Generator().manual_seed(1)

    def drawn(sharding: Sharding) -> Tensor:
        return torch.randn(sharding.shape, generator=generator, dtype=torch.float64)

    before = {name: drawn(sharding) for name, sharding in table.items()}
    parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in before.items()}
    config = OptimizerConfig(optimizer="scaled", clip_grad=0.0, weight_decay=0.0)
    optimizer = Optimizer(TrainableParameters(parameters, table, mesh), config)
    for name, parameter in parameters.items():
        parameter.grad = drawn(table[name])
    optimizer.step(0.1)
    norms = {
        "embedding": torch.tensor(1.0),
        "fused": parameters["fused"].grad.norm(),
        "experts": parameters["experts"].grad.norm(dim=(1, 2), keepdim=True),
        "gain": torch.tensor(1.0),
    }
    for name, parameter in parameters.items():
        expected = before[name] - 0.1 * parameter.grad / norms[name]
        torch.testing.assert_close(parameter.data, expected, rtol=0, atol=1e-14)
    assert set(optimizer.views()) == {"embedding.momentum_buffer", "gain.momentum_buffer"}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "the update rule 'absent' is .*:Absent, which cannot be imported: "),
        (
            "number",
            "the update rule 'number' is strange:MARK, which is not a subclass of megatron_",
        ),
        (
            "bare",
            "the entry point 'bare' of megatron.update_rules is .*, which is not a UpdateRuleK",
        ),
        ("twice", "the update rule 'twice' has the state main; names must be unique"),
        ("circular", "the update rule 'circular' has the fallback 'scaled', which needs"),
    ],
)
def test_a_rule_that_breaks_the_contract_is_one_line(mesh: Mesh, name: str, message: str) -> None:
    parameters = {"a": nn.Parameter(torch.zeros(2, 2))}
    with pytest.raises(OptimError, match=f"^{message}") as caught:
        Optimizer(
            TrainableParameters(parameters, {"a": Sharding((2, 2))}, mesh),
            OptimizerConfig(optimizer=name),
        )
    assert "\n" not in str(caught.value)


def test_an_unknown_rule_is_refused_with_the_known_ones() -> None:
    message = (
        r"^optimizer: no update rule 'adamm'; did you mean 'adam'\?; installed are adafactor, adam"
    )
    with pytest.raises(OptimError, match=message) as caught:
        OptimizerConfig(optimizer="adamm")
    assert caught.value.format_message({"optimizer": "--optimizer"}).startswith(
        "--optimizer: no update rule"
    )
    with pytest.raises(OptimError, match=r"sgd_momentum must lie in \[0, 1\), got 1\.5"):
        OptimizerConfig(sgd_momentum=1.5)


@pytest.mark.usefixtures("installed")
def test_a_rule_gets_only_its_own_settings() -> None:
    given = OptimizerConfig(optimizer="slowed", settings=Slowness(0.25))
    rule, others = build_rules(given)
    assert (rule.config.settings, others.config.settings) == (Slowness(0.25), None)
    assert build_rules(OptimizerConfig(optimizer="slowed"))[0].config.settings == Slowness(0.5)
    assert build_rules(replace(given, optimizer="sgd"))[0].config.settings is None


def test_the_rules_of_the_package_are_described_without_torch() -> None:
    code = "import sys; from megatron_optim import update_rules; print(*update_rules());"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"adam", "lion", "sgd"} <= set(done.stdout.split())
    assert type(build_rules(OptimizerConfig())[0]) is Adam


def test_two_distributions_with_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = EntryPoint("sgd", "elsewhere:SGD", RULES.group)
    monkeypatch.setattr(extensions, "entry_points", lambda group: [other])
    with pytest.raises(OptimError, match="two distributions provide the update rule 'sgd'"):
        RULES.find("sgd")
