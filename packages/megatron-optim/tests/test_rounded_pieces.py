"""Parameters that a CPU updates and rounds piece by piece."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from megatron_optim import Optimizer, OptimizerConfig
from megatron_optim.param_groups import ParameterGroup
from megatron_optim.rounded_pieces import PIECE_OF_THREAD, RoundedPieces
from megatron_optim.rules import Adam
from megatron_parallel import Mesh, Sharding, TrainableParameters
from torch import Tensor
from torch.nn import Parameter

SHAPES = {
    "long": (3, PIECE_OF_THREAD + 5),
    "short": (4, 6),
    "empty": (0, 3),
    "wide": (2 * PIECE_OF_THREAD, 1),
    "full": (PIECE_OF_THREAD + 1, 2),
}
WIDE = "full"
"""The parameter in fp32, which is not rounded."""


@dataclass
class Calls:
    """The elements of each call of the fused rule, and the calls that divided gradients."""

    elements: list[int]
    divided: int = 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    found, fused = Calls([]), Adam._fused

    def count(
        self: Adam, parameters: Sequence[Tensor], gradients: Sequence[Tensor], *rest: object
    ) -> None:
        found.elements.append(sum(parameter.numel() for parameter in parameters))
        found.divided += len(rest) > 4
        fused(self, parameters, gradients, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Adam, "_fused", count)
    yield found


def make(clip: float) -> tuple[dict[str, Parameter], Optimizer]:
    generator = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    parameters = {n: Parameter(t if n == WIDE else t.bfloat16()) for n, t in drawn.items()}
    table = {name: Sharding(shape) for name, shape in SHAPES.items()}
    trainable = TrainableParameters(parameters, table, Mesh.single())
    return parameters, Optimizer(trainable, OptimizerConfig(weight_decay=0.1, clip_grad=clip))


def gradients(parameters: Mapping[str, Parameter], step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    drawn = {n: torch.randn(p.shape, generator=generator) for n, p in parameters.items()}
    for name, parameter in parameters.items():
        parameter.grad = drawn[name].to(parameter.dtype)
    return {name: p.grad.float().clone() for name, p in parameters.items()}


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_pieces_equal_torch_adamw_on_whole_parameters(calls: Calls, clip: float) -> None:
    parameters, optimizer = make(clip)
    whole = {n: Parameter(p.detach().float().clone()) for n, p in parameters.items()}
    reference = torch.optim.AdamW(whole.values(), weight_decay=0.1, fused=True)
    for step in range(3):
        for name, gradient in gradients(parameters, step).items():
            whole[name].grad = gradient
        coefficient = float(optimizer.step(1e-2).clip_coefficient)
        for parameter in whole.values():
            parameter.grad = parameter.grad * coefficient
        reference.param_groups[0]["lr"] = 1e-2
        reference.step()
    for name, parameter in parameters.items():
        main = dict(optimizer.main.values())[name]
        tolerance = 2e-7 if clip else 0.0
        torch.testing.assert_close(main, whole[name].data, rtol=tolerance, atol=tolerance)
        assert torch.equal(parameter.data, main.to(parameter.dtype))
    sizes = sum(p.numel() for p in parameters.values())
    assert sum(calls.elements) == 3 * sizes
    assert max(calls.elements) < 2 * PIECE_OF_THREAD * torch.get_num_threads()
    assert calls.divided == (len(calls.elements) if clip else 0)


def test_pieces_follow_a_checkpoint_that_was_loaded_in_place() -> None:
    parameters, optimizer = make(0.0)
    for step in range(2):
        gradients(parameters, step)
        optimizer.step(1e-2)
    saved = {n: [view.tensor.clone() for view in views] for n, views in optimizer.views().items()}
    scalars, weights = optimizer.scalars(), {n: p.detach().clone() for n, p in parameters.items()}
    results = []
    for _ in range(2):
        gradients(parameters, 2)
        optimizer.step(1e-2)
        results.append({n: p.detach().clone() for n, p in parameters.items()})
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
        for name, views in optimizer.views().items():
            for view, values in zip(views, saved[name], strict=True):
                view.tensor.copy_(values)
        optimizer.load_scalars(scalars)
    assert all(torch.equal(results[0][name], results[1][name]) for name in parameters)


def test_calls_take_as_many_parameters_as_fit_and_round_what_is_rounded() -> None:
    """Each call ends once it has the elements of a piece; every element is in one call."""
    sizes, piece = {"a": 4, "b": 3, "c": 9, "d": 2, "e": 2}, 4
    mains = {name: torch.arange(float(size)) for name, size in sizes.items()}
    rounded = {n: torch.zeros(sizes[n], dtype=torch.bfloat16) for n in "bce"}
    means = {name: torch.zeros(size) for name, size in sizes.items()}
    group = ParameterGroup(Adam(OptimizerConfig()), 1.0, False, tuple(sizes), {})
    pieces = RoundedPieces(group, mains, {"exp_avg": means}, rounded, piece)
    calls = []
    for parameters, gradients, state in pieces.operands({n: t + 1 for n, t in mains.items()}):
        calls.append([parameter.numel() for parameter in parameters])
        for values in zip(parameters, gradients, state["exp_avg"], strict=True):
            assert torch.equal(values[1], values[0] + 1)
            values[0].add_(100)
            values[2].add_(1)
    assert calls == [[4], [3, 4], [4], [1, 2, 2]]
    for name, size in sizes.items():
        assert torch.equal(mains[name], torch.arange(float(size)) + 100)
        assert torch.equal(means[name], torch.ones(size))
    assert all(torch.equal(rounded[n], mains[n].bfloat16()) for n in "bce")
