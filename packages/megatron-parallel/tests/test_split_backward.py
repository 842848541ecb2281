"""Both halves of a backward pass together equal autograd's, in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron_parallel.pipeline.split_backward import SplitBackward
from torch import Tensor, nn
from torch.nn import Parameter

Stage = Callable[[dict[str, Parameter], list[Tensor]], list[Tensor]]


class TwoOutputs(torch.autograd.Function):
    """`x w` and `x + w`: the gradient of the second output must not be used for the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx: Any, d_product: Tensor, d_sum: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return d_product * w + d_sum, d_product * x + d_sum


def products(w: dict[str, Parameter], x: list[Tensor]) -> list[Tensor]:
    """A residual block whose norm and products are forks of their own."""
    hidden = nn.functional.layer_norm(x[0], (4,), w["gain"], w["bias"])
    return [x[0] + torch.tanh(hidden @ w["a"]) @ w["b"]]


def used_twice(w: dict[str, Parameter], x: list[Tensor]) -> list[Tensor]:
    """One weight, cast once, before and after another product, whose fork lies between."""
    a = w["a"] * 2
    return [torch.tanh(torch.tanh(x[0] @ a) @ w["b"]) @ a + w["bias"]]


def several_outputs(w: dict[str, Parameter], x: list[Tensor]) -> list[Tensor]:
    """An encoder's output is sent unchanged, beside an output computed from it and weights."""
    own = w["b"] @ w["a"]
    return [own + torch.softmax(own @ x[0].t(), 1) @ x[0], x[0], x[1] * w["gain"]]


def branches(w: dict[str, Parameter], x: list[Tensor]) -> list[Tensor]:
    """An output that depends on weights alone, and an input that no output depends on."""
    return [w["a"] @ w["b"], x[0] + w["c"]]


def two_of_a_node(w: dict[str, Parameter], x: list[Tensor]) -> list[Tensor]:
    """Gradients arrive at both outputs of one node, or at the second alone."""
    product, total = TwoOutputs.apply(x[0], w["a"])
    _, other = TwoOutputs.apply(product, w["b"])
    return [total * 3, other]


def shared_gradient(w: dict[str, Parameter], x: list[Tensor]) -> list[Tensor]:
    """Autograd returns one tensor for an input and two weights, which are accumulated later."""
    return [x[0] + w["a"] + w["b"]]


def transposed(w: dict[str, Parameter], x: list[Tensor]) -> list[Tensor]:
    """The gradients of transposed weights arrive in another order of memory."""
    pair = torch.stack([w["a"], w["b"]]).transpose(1, 2)
    first, second = pair.unbind(0)
    return [torch.tanh(x[0] @ first) @ second + x[1] @ w["c"].t() @ x[0]]


STAGES = [
    products,
    used_twice,
    several_outputs,
    branches,
    two_of_a_node,
    shared_gradient,
    transposed,
]


def make_tensors(seed: int) -> tuple[dict[str, Parameter], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shapes = {"a": (4, 4), "b": (4, 4), "c": (4, 4), "gain": (4,), "bias": (4,)}
    weights = {name: Parameter(draw(*shape)) for name, shape in shapes.items()}
    return weights, [draw(4, 4).requires_grad_() for _ in range(2)]


def gradients_of(stage: Stage, outputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(stage.__name__))
    return [
        torch.randn(y.shape, generator=generator, dtype=torch.float64) / (i + 1)
        for i, y in enumerate(outputs)
    ]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_two_halves_equal_a_whole_pass(stage: Stage) -> None:
    whole, split = make_tensors(1)[0], make_tensors(1)[0]
    for number in range(3):  # gradients of several micro-batches add up
        wanted, inputs = make_tensors(number + 2)[1], make_tensors(number + 2)[1]
        outputs = stage(whole, wanted)
        torch.autograd.backward(outputs, gradients_of(stage, outputs))
        outputs = stage(split, inputs)
        before = {name: None if p.grad is None else p.grad.clone() for name, p in split.items()}
        half = SplitBackward(outputs, gradients_of(stage, outputs), inputs, split.values())
        for found, leaf in zip(half.input_gradients, wanted, strict=True):
            assert (found is None) == (leaf.grad is None)
            assert found is None or leaf.grad is None or close(found, leaf.grad)
        for name, p in split.items():  # the first half does not change weight gradients
            known = before[name]
            assert p.grad is None if known is None else torch.equal(p.grad, known)
        sent = [None if g is None else g.clone() for g in half.input_gradients]
        half.accumulate_weight_gradients()
        for kept, found in zip(sent, half.input_gradients, strict=True):
            assert kept is None or found is None or torch.equal(kept, found)
        for name, p in split.items():
            other = whole[name].grad
            assert (p.grad is None) == (other is None), name
            assert p.grad is None or other is None or close(p.grad, other), name
            assert p.grad is None or p.grad.stride() == p.stride(), name


def close(found: Tensor, wanted: Tensor) -> bool:
    return float((found - wanted).abs().max()) <= 1e-13 * float(wanted.abs().max())


def test_a_loss_is_differentiated_by_one() -> None:
    weights, inputs = make_tensors(3)
    loss = products(weights, inputs)[0].square().sum()
    half = SplitBackward([loss], [None], inputs, weights.values())
    half.accumulate_weight_gradients()
    again, leaves = make_tensors(3)
    products(again, leaves)[0].square().sum().backward()
    assert half.input_gradients[1] is None and leaves[0].grad is not None
    assert half.input_gradients[0] is not None and close(half.input_gradients[0], leaves[0].grad)
    assert all(close(weights[n].grad, again[n].grad) for n in ("a", "b", "gain", "bias"))


def test_what_needs_no_gradient_gets_none() -> None:
    weights, inputs = make_tensors(4)
    weights["a"].requires_grad_(False)
    inputs[0].requires_grad_(False)
    half = SplitBackward(products(weights, inputs), [torch.ones(4, 4)], inputs, weights.values())
    assert half.input_gradients == (None, None)
    half.accumulate_weight_gradients()
    assert weights["a"].grad is None and weights["gain"].grad is not None


def test_each_node_on_a_branch_runs_in_the_second_half_only() -> None:
    """After both halves the graph is free: its functions hold nothing."""
    runs: list[str] = []
    weights, inputs = make_tensors(5)
    made = weights["a"] * 2
    made.register_hook(lambda gradient: runs.append("branches"))
    way = torch.tanh(inputs[0])
    way.register_hook(lambda gradient: runs.append("way"))
    out = (way @ made).sum()
    half = SplitBackward([out], [None], inputs[:1], weights.values())
    assert runs == ["way"]
    half.accumulate_weight_gradients()
    assert runs == ["way", "branches"]
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, [made], allow_unused=True)
