"""Compiled stages: what their code depends on, and what each call checks."""

from functools import partial

import pytest
import torch
from megatron_train.compiling import compile_layers, compile_stages
from torch import nn


class Stage(nn.Module):
    """Multiplies by a weight and a constant; doubles the result in training."""

    def __init__(self, constant: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([3.0]))
        self.inner = nn.Identity()
        self.constant = constant

    def forward(self, x: torch.Tensor, *, negative: bool = False) -> torch.Tensor:
        """Returns the product."""
        out = self.inner(x) * self.weight * self.constant
        out = out * 2 if self.training else out
        return -out if negative else out


class Broken(Stage):
    """A stage whose graph breaks in a method that another stage shares."""

    def forward(self, x: torch.Tensor, *, negative: bool = False) -> torch.Tensor:
        """Returns the product."""
        torch._dynamo.graph_break()
        return self.scale(x) * (-1 if negative else 1)

    @torch.compiler.disable(recursive=False)
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the product with the constant."""
        return self.multiply(x)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the product with the constant."""
        return x * self.constant


@pytest.fixture(
    autouse=True, params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def compiler(request, monkeypatch):
    """Traces functions, and in slow tests also generates code for them, which takes much longer."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=request.param))


@pytest.mark.parametrize("kind", [Stage, Broken])
def test_stages_of_equal_shapes_do_not_share_code(kind):
    stages = [kind(constant).eval() for constant in (5.0, 7.0)]
    expected = [stage(torch.tensor([2.0])) for stage in stages]
    compile_stages(stages)
    found = [stage(torch.tensor([2.0])) for stage in stages]
    assert found == expected and found[0] != found[1]


def test_a_call_notices_what_may_change():
    stage, x = Stage(5.0), torch.tensor([2.0])
    compile_stages([stage])
    assert stage(x) == 60.0
    assert stage(x, negative=True) == -60.0
    assert stage.eval()(x) == 30.0
    with torch.no_grad():
        stage.weight.add_(1.0)
        assert not stage(x).requires_grad and stage(x) == 40.0
    assert stage(x).requires_grad
    stage.double()
    assert stage(x.double()).dtype == torch.float64


@pytest.mark.parametrize("backend", [None, "split"])
def test_layers_and_the_loss_are_compiled_one_by_one(backend, monkeypatch):
    class Sharing(Stage):
        def share_code(self, device):
            self.shared = device

    compiled = []

    def note(function, **options):
        compiled.append(function)
        assert options == {"dynamic": False} | ({"backend": backend} if backend else {})
        return len(compiled)

    monkeypatch.setattr(torch, "compile", note)
    layers = [Sharing(5.0), Stage(7.0)]
    first, last = nn.Module(), nn.Module()
    last.vocabulary_loss = loss = torch.nn.functional.cross_entropy
    forwards = [layer.forward for layer in layers]
    units = {first: layers[:1], last: layers[1:]}
    compile_layers([first, last], units.__getitem__, torch.device("cpu"), backend)
    assert compiled == [*forwards, loss]
    assert [layers[0].forward, layers[1].forward, last.vocabulary_loss] == [1, 2, 3]
    assert layers[0].shared == torch.device("cpu")


def test_constants_of_a_stage_are_not_checked_in_each_call():
    stage, x = Stage(5.0).eval(), torch.tensor([2.0])
    compile_stages([stage])
    stage(x)
    stage.constant = 6.0
    assert stage(x) == 30.0  # the code of the constant 5


def test_a_stage_has_code_for_each_shape_of_its_inputs():
    stage = Stage(5.0).eval()
    compile_stages([stage])
    for size in (2, 3, 4):
        assert torch.equal(stage(torch.ones(size)), torch.full((size,), 15.0))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
