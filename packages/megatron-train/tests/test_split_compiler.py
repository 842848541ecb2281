"""Compiled functions whose backward pass runs in two halves."""

from contextlib import contextmanager

import pytest
import torch
from megatron_train.split_compiler import SplitBackend
from torch import Tensor, nn

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


class Layer(nn.Module):
    """A residual layer with two products, a norm whose output both halves read, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6, bias=False)
        self.norm, self.scale = nn.LayerNorm(6), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the stream, and a value without a gradient."""
        y = self.norm(x)
        y = self.down(nn.functional.silu(self.up(y)) * self.scale)
        return x + y, y.detach().amax()


@contextmanager
def products():
    """Yields a list, which holds the number of products of matrices in the block afterwards."""
    found = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield found
    found.append(sum(event.name in PRODUCTS for event in profile.events()))


@pytest.fixture(scope="module")
def layers():
    torch.manual_seed(3)
    plain = Layer().double()
    compiled = torch.compile(plain, dynamic=False, fullgraph=True, backend=SplitBackend("eager"))
    return plain, compiled


@pytest.fixture
def x():
    return torch.randn(5, 6, dtype=torch.float64, requires_grad=True)


def test_each_half_computes_its_own_products(layers, x):
    plain, compiled = layers
    weights = [*plain.parameters()]
    plain(x)[0].square().sum().backward()
    expected, of_x = [p.grad for p in weights], x.grad
    compiled(x)
    with products() as forward:
        y, largest = compiled(x)
    assert not largest.requires_grad
    loss = y.square().sum()
    with products() as first:
        (found,) = torch.autograd.grad(loss, [x], retain_graph=True)
    with products() as second:
        gradients = torch.autograd.grad(loss, weights)
    assert (forward, first, second) == ([2], [2], [2])
    torch.testing.assert_close(found, of_x, rtol=1e-13, atol=1e-13)
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-13, atol=1e-13)
    plain.zero_grad()


def test_a_whole_backward_pass_computes_all_gradients(layers, x):
    plain, compiled = layers
    results = []
    for function in (plain, compiled):
        function(x)[0].t().contiguous().sum().backward()  # an expanded gradient
        results.append([x.grad, *(p.grad for p in plain.parameters())])
        x.grad = None
        plain.zero_grad()
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-13, atol=1e-13)


def test_an_evaluation_has_no_backward_pass(layers, x):
    plain, compiled = layers
    with torch.no_grad():
        assert torch.equal(compiled(x)[0], plain(x)[0])


def test_a_layer_that_changes_its_input_is_refused(x):
    def change(y: Tensor) -> Tensor:
        return y.mul_(2.0)

    compiled = torch.compile(change, dynamic=False, backend=SplitBackend("eager"))
    with pytest.raises(Exception, match="cannot split the backward pass of a layer that changes"):
        compiled(x * 1.0)
