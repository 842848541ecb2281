"""Steps that the device skips by itself, compared with steps that the host decides.

The fused implementations of torch that decide on a CUDA device have the same form on a CPU.
"""

import math
from collections.abc import Callable

import pytest
import torch
from megatron_optim import AdamSettings, Optimizer, OptimizerConfig
from megatron_optim.optimizer import host_decides
from megatron_optim.rules import Adam
from megatron_parallel import Mesh, Sharding, TrainableParameters
from torch import Tensor, nn

Build = Callable[..., Optimizer]
KINDS = {
    "adam": OptimizerConfig(weight_decay=0.1, clip_grad=0.01),
    "adam without clipping": OptimizerConfig(weight_decay=0.1, clip_grad=0.0),
    "adam with L2": OptimizerConfig(
        weight_decay=0.1, clip_grad=0.01, settings=AdamSettings(decoupled_weight_decay=False)
    ),
    "lion": OptimizerConfig(optimizer="lion", weight_decay=0.1, clip_grad=0.01),
    "lion without clipping": OptimizerConfig(optimizer="lion", weight_decay=0.1, clip_grad=0.0),
    "sgd": OptimizerConfig(optimizer="sgd", weight_decay=0.1, clip_grad=0.01),
    "sgd without momentum": OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, clip_grad=0.01),
}


@pytest.fixture
def unread(
    table: Callable[[nn.Module], dict[str, Sharding]], mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> Build:
    """Returns a function that builds an optimizer whose host does not read the decision."""

    def build(network: nn.Module, config: OptimizerConfig, unread: bool = True) -> Optimizer:
        trainable = TrainableParameters(network.named_parameters(), table(network), mesh)
        with monkeypatch.context() as patch:
            if unread:
                patch.setattr("megatron_optim.optimizer.host_decides", lambda *_: False)
            return Optimizer(trainable, config)

    return build


def backward(network: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    dtype = next(network.parameters()).dtype
    batch = torch.randn(13, 7, generator=generator, dtype=torch.float64).to(dtype)
    network(batch).double().square().mean().backward()


def values(network: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    found = {name: views[0].tensor.clone() for name, views in optimizer.views().items()}
    return found | {name: tensor.clone() for name, tensor in network.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_unread_steps_equal_read_ones_and_skip_without_a_change(
    model: Callable[..., nn.Module], unread: Build, kind: str, dtype: torch.dtype
) -> None:
    ours, true = model(dtype), model(dtype)
    one, two = unread(ours, KINDS[kind]), unread(true, KINDS[kind], unread=False)
    for step in range(6):
        for network, optimizer in ((ours, one), (true, two)):
            optimizer.zero_grad()
            backward(network, step)
        losses = [torch.tensor(1.0, dtype=torch.float64)]
        before = values(ours, one)
        if step == 2:
            for network in (ours, true):
                next(network.parameters()).grad[1, 2] = math.nan
        if step == 4:
            losses.append(torch.tensor(math.inf, dtype=torch.float64))
        results = [optimizer.step(0.02, losses=losses) for optimizer in (one, two)]
        torch.testing.assert_close(*(result.clip_coefficient for result in results))
        assert [bool(result.skipped) for result in results] == [step in (2, 4)] * 2
        if step in (2, 4):
            assert all(torch.equal(before[n], v) for n, v in values(ours, one).items())
    assert one.scalars() == two.scalars() == {"steps": 4, "skipped_steps": 2}
    eps = 1e-14 if dtype == torch.float64 else 1e-5
    kept = values(true, two)
    for name, value in values(ours, one).items():
        if value.dtype != torch.bfloat16:
            torch.testing.assert_close(value, kept[name], rtol=eps, atol=eps * 1e-2)


def test_the_host_decides_on_a_cpu_and_for_rules_that_cannot(
    model: Callable[..., nn.Module], unread: Build
) -> None:
    groups = unread(model(torch.float32), KINDS["adam"])._groups
    assert host_decides(torch.device("cpu"), groups)
    assert not host_decides(torch.device("cuda"), groups)
    assert host_decides(torch.device("xpu"), groups)

    class Undecided(Adam):
        decides_on = ()

    changed = [group._replace(rule=Undecided(KINDS["adam"])) for group in groups]
    assert host_decides(torch.device("cuda"), changed)
