from collections.abc import Mapping, Sequence

import pytest
import torch
from megatron_optim import (
    OptimError,
    Optimizer,
    OptimizerConfig,
    UpdateRule,
    WidthRatio,
    build_rules,
    check_width_rules,
    update_rule,
)
from megatron_parallel import Mesh, Sharding, TrainableParameters
from torch import Tensor, nn

RATIO = 4.0
WIDTHS = {
    "word": WidthRatio(outputs=RATIO),
    "matrix": WidthRatio(RATIO, RATIO),
    "gain": WidthRatio(outputs=RATIO),
}
TABLE = {
    "word": Sharding((2, 3), vocabulary=True),
    "matrix": Sharding((2, 3)),
    "gain": Sharding((6,)),
    "other": Sharding((2, 3)),
}
EPS = 1e-2
"""So large that its ratio between groups is seen in the update."""


def start() -> dict[str, nn.Parameter]:
    values = torch.linspace(-1, 1, 6, dtype=torch.float64)
    return {name: nn.Parameter(values.clone().view(cut.shape)) for name, cut in TABLE.items()}


def give_gradients(parameters: Mapping[str, nn.Parameter], step: int) -> None:
    for number, parameter in enumerate(parameters.values(), start=1):
        parameter.grad = (parameter * step * number).cos().detach()


@pytest.mark.parametrize(
    ("rule", "factors", "eps"),
    [
        # Yang et al. 2022, table 8: matrices 1 / inputs with Adam; vectors and embeddings 1.
        ("adam", {"word": 1.0, "matrix": 1 / RATIO, "gain": 1.0, "other": 1.0}, EPS / RATIO),
        # With SGD, matrices 1; vectors and embeddings times their outputs.
        ("sgd", {"word": RATIO, "matrix": 1.0, "gain": RATIO, "other": 1.0}, None),
    ],
)
@pytest.mark.parametrize("decoupled", [None, 0.03])
def test_steps_equal_those_of_torch_with_a_learning_rate_for_each_parameter(
    mesh: Mesh, rule: str, factors: dict[str, float], eps: float | None, decoupled: float | None
) -> None:
    ours, theirs = start(), start()
    config = OptimizerConfig(optimizer=rule, weight_decay=0.1, clip_grad=0.0, adam_eps=EPS)
    optimizer = Optimizer(TrainableParameters(ours, TABLE, mesh), config, WIDTHS)
    groups = [
        {"params": [parameter], "weight_decay": 0.1 if TABLE[name].weight_decay else 0.0}
        for name, parameter in theirs.items()
    ]
    reference: torch.optim.Optimizer
    if rule == "adam":
        groups[list(TABLE).index("matrix")]["eps"] = eps
        reference = torch.optim.AdamW(groups, eps=EPS)
    else:
        reference = torch.optim.SGD(groups, momentum=0.9)
    for step, lr in enumerate((0.1, 0.05, 0.02), start=1):
        for parameters in (ours, theirs):
            give_gradients(parameters, step)
        for group, name in zip(reference.param_groups, theirs, strict=True):
            absolute = decoupled is not None and name == "word"
            group["lr"] = decoupled if absolute else lr * factors[name]
        optimizer.step(lr, decoupled_lr=decoupled)
        reference.step()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=0, atol=1e-14)


def test_without_widths_every_group_has_the_learning_rate(mesh: Mesh) -> None:
    ours, same = start(), start()
    config = OptimizerConfig(weight_decay=0.1, adam_eps=EPS)
    optimizers = [
        Optimizer(TrainableParameters(ours, TABLE, mesh), config),
        Optimizer(TrainableParameters(same, TABLE, mesh), config, dict.fromkeys(TABLE, (1.0, 1.0))),
    ]
    for parameters, optimizer in zip((ours, same), optimizers, strict=True):
        give_gradients(parameters, 1)
        optimizer.step(0.1)
    for name, parameter in ours.items():
        assert torch.equal(parameter, same[name])


class _WithoutWidths(UpdateRule):
    def update(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        state: Mapping[str, Sequence[Tensor]],
        *,
        lr: float,
        weight_decay: float,
        step: int,
    ) -> None:
        pass


def test_a_rule_without_learning_rates_for_widths_is_refused(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = OptimizerConfig()
    check_width_rules(config)
    usual = build_rules(config)[0]
    for rules in ((_WithoutWidths(config), usual), (usual, _WithoutWidths(config))):
        monkeypatch.setattr(update_rule, "build_rules", lambda _, found=rules: found)
        with pytest.raises(OptimError, match="_WithoutWidths has no learning rates for other"):
            check_width_rules(config)
    monkeypatch.setattr("megatron_optim.optimizer.build_rules", lambda _: (rules[1], usual))
    for same in (None, dict.fromkeys(TABLE, (1.0, 1.0))):
        Optimizer(TrainableParameters(start(), TABLE, mesh), config, same)
    with pytest.raises(OptimError, match=r"\(--use-mup\) needs; use adam or sgd, or leave it out"):
        Optimizer(TrainableParameters(start(), TABLE, mesh), config, WIDTHS)
