"""Rates of groups of parameters, and patterns of names that need no other rank."""

import pytest
import torch
from megatron_optim import OptimError, OptimizerConfig
from megatron_optim.param_groups import ParameterGroup, require_matches
from megatron_optim.rules import Adam
from megatron_parallel import Mesh, ParallelLayout

PLAIN = ParameterGroup(Adam(OptimizerConfig()), 1.0, False, ("a",), {})
SCALED = PLAIN._replace(decay_factor=0.5, lr_factor=3.0, lr_mult=2.0)


@pytest.mark.parametrize(
    ("group", "decoupled_lr", "rates"),
    [
        (PLAIN, None, (0.5, 0.25)),
        (PLAIN, 0.125, (0.5, 0.25)),
        (PLAIN._replace(decoupled=True), 0.125, (0.125, 0.25)),
        (SCALED, None, (3.0, 0.125)),
        (SCALED, 0.125, (3.0, 0.125)),
        (SCALED._replace(decoupled=True), None, (3.0, 0.125)),
        (SCALED._replace(decoupled=True), 0.125, (0.25, 0.125)),  # not that of the width
    ],
)
def test_rates_have_the_factors_of_their_group(
    group: ParameterGroup, decoupled_lr: float | None, rates: tuple[float, float]
) -> None:
    assert group.rates(0.5, decoupled_lr, 0.25) == rates


def test_patterns_are_compared_over_ranks_only_where_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def all_reduce(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        asked.append(len(tensor))
        return tensor

    monkeypatch.setattr("megatron_optim.param_groups.all_reduce", all_reduce)
    given = OptimizerConfig(lr_mult=("b*=2",))
    require_matches(OptimizerConfig(), ["a"], Mesh.single())
    mesh = Mesh.imagined(ParallelLayout(pp=2, dp=1))
    require_matches(given, ["a"], mesh)  # the other stage, which does not exist, may have it
    mesh.close()
    assert not asked
    with pytest.raises(OptimError, match="no parameter matches 'b"):
        require_matches(given, ["a"], Mesh.single())
    require_matches(given, ["a", "bias"], Mesh.single())
    assert asked == [1, 1]
