"""How parameters are divided into the calls of a rule."""

from typing import Any

import pytest
import torch
from megatron_optim import OptimizerConfig, UpdateSquares
from megatron_optim.param_groups import ParameterGroup
from megatron_optim.rules import Adam
from megatron_optim.working_copies import WholeTensors, operands, rounds_flat_ranges
from torch import Tensor

GROUP = ParameterGroup(Adam(OptimizerConfig()), 1.0, False, ("a", "b"), {})
WHOLE, CUT = [[5, 8]], [[4], [1, 4], [4]]
"""Elements of each tensor in each call, with at most 4 of them in a call."""


def tensors(*, transposed: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    wide = torch.zeros(4, 2, dtype=dtype)
    return {"a": torch.zeros(5, dtype=dtype), "b": wide.T if transposed else wide}


@pytest.mark.parametrize(
    ("transposed", "rounded", "squares", "sizes"),
    [
        (False, {}, None, WHOLE),
        (False, {}, UpdateSquares(), CUT),
        (True, {}, UpdateSquares(), WHOLE),
        (False, tensors(dtype=torch.bfloat16), None, CUT),
        (True, tensors(transposed=True, dtype=torch.bfloat16), None, WHOLE),
        (False, tensors(dtype=torch.bfloat16), UpdateSquares(), CUT),
        (False, {"b": torch.zeros(4, 2).bfloat16()}, None, CUT),
        (False, {"other": torch.zeros(3).bfloat16()}, None, WHOLE),
    ],
)
def test_parameters_are_cut_if_they_are_rounded_or_measured_in_flat_ranges(
    transposed: bool, rounded: dict[str, Tensor], squares: Any, sizes: list[list[int]]
) -> None:
    mains = tensors(transposed=transposed)
    # Autograd may return gradients with other strides.
    gradients = {"a": torch.ones(5), "b": torch.ones(mains["b"].shape[::-1]).T}
    state = {name: tensors(transposed=transposed) for name in ("exp_avg", "exp_avg_sq")}
    calls = []
    for weights, given, kept in operands(
        GROUP, mains, gradients, state, 4, rounded=rounded, squares=squares
    ):
        calls.append([weight.numel() for weight in weights])
        for weight, gradient, mean in zip(weights, given, kept["exp_avg"], strict=True):
            mean.sub_(gradient)
            weight.add_(gradient)
    assert calls == sizes
    for name, main in mains.items():
        assert (main == 1).all() and (state["exp_avg"][name] == -1).all()
        assert not rounded.get(name, main).ne(1).any()
    if squares is not None:
        found = {name: float(each) for name, each in squares.updates.items()}
        assert found == pytest.approx({"a": 5.0, "b": 8.0}, rel=1e-6)
    flat = bool(rounded.keys() & mains.keys()) and not transposed
    assert rounds_flat_ranges(GROUP, mains, rounded) == flat


def test_tensors_are_found_once_if_none_of_the_group_is_rounded() -> None:
    mains, gradients = tensors(), tensors()
    state = {name: tensors() for name in ("exp_avg", "exp_avg_sq")}
    found = WholeTensors.of(GROUP, mains, state, {"other": torch.zeros(3)})
    assert found is not None
    ((weights, given, kept),) = found.operands(gradients)
    for name, weight, gradient, mean in zip("ab", weights, given, kept["exp_avg"], strict=True):
        assert weight is mains[name] and gradient is gradients[name]
        assert mean is state["exp_avg"][name]
    assert WholeTensors.of(GROUP, mains, state, {"b": torch.zeros(4, 2)}) is None
    assert WholeTensors.of(GROUP._replace(matrices={"b": (4, 2)}), mains, state, {}) is None
