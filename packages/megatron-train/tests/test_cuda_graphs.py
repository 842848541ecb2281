"""Layers whose passes are recorded and replayed, with a recorder that runs them again on a CPU."""

from contextlib import contextmanager

import pytest
import torch
from megatron_train.cuda_graphs import CudaCapture, GraphBackend
from megatron_train.errors import TrainError
from rerun import Rerun
from torch import Tensor, nn


class Layer(nn.Module):
    """A layer with two products, which also reads a tensor that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Returns the stream."""
        return x + self.down(nn.functional.silu(self.up(x)) * mask)


def model() -> nn.ModuleList:
    torch.manual_seed(4)
    return nn.ModuleList([Layer(), Layer()]).double()


@pytest.fixture
def capture():
    torch.compiler.reset()
    return Rerun()


@pytest.fixture
def backend(capture):
    return GraphBackend(capture, 2, inner="eager")


def compiled(layers: nn.ModuleList, backend: GraphBackend) -> nn.ModuleList:
    """Returns the layers after compiling each."""
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=False, backend=backend)
    return layers


def passes(layers: nn.ModuleList, seed: int) -> tuple[Tensor, Tensor | None]:
    """Adds the gradients of a micro-batch; returns the output and the gradient of the input."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 6, dtype=torch.float64, generator=generator)
    mask = torch.rand(3, 10, dtype=torch.float64, generator=generator).round()
    y = x.requires_grad_()
    for layer in layers:
        y = layer(y, mask)
    y.square().sum().backward()
    return y.detach(), x.grad


def gradients(layers: nn.ModuleList) -> list[Tensor]:
    """Returns the gradients of a step, and drops them."""
    found = [p.grad.clone() for p in layers.parameters()]
    layers.zero_grad()
    return found


def test_replays_equal_plain_passes(capture, backend):
    plain, ours = model(), compiled(model(), backend)
    for step in range(5):
        backend.begin_step()
        outputs = [passes(ours, 10 * step + number) for number in range(3)]
        for number, output in enumerate(outputs):  # after all three: replays overwrite no result
            expected = passes(plain, 10 * step + number)
            torch.testing.assert_close(output, expected, rtol=1e-13, atol=1e-13)
        assert len({output.data_ptr() for output, _ in outputs}) == 3
        for gradient, expected in zip(gradients(ours), gradients(plain), strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=1e-13)
        if step < 2:
            assert (capture.recorded, capture.replayed) == (0, 0)
        with torch.no_grad():  # an optimizer changes weights in place
            for module in (plain, ours):
                for parameter in module.parameters():
                    parameter.mul_(0.9)
    # Two passes of two layers, once in the first micro-batch after the warm-up.
    assert (capture.recorded, capture.replayed) == (4, 4 * 8)


def test_code_that_has_not_run_is_not_recorded(capture, backend):
    for _ in range(4):
        backend.begin_step()
    ours = compiled(model(), backend)
    passes(ours, 0)  # its kernels are not tuned yet
    assert capture.recorded == 0
    passes(ours, 1)
    assert capture.recorded == 4


def test_a_second_micro_batch_in_flight_is_an_error(backend):
    layer = compiled(model(), backend)[0]
    mask, x = torch.ones(3, 10).double(), torch.ones(3, 6, requires_grad=True).double()
    for _ in range(3):
        backend.begin_step()
        layer(x, mask).sum().backward()
    first = layer(x, mask)
    layer(x, mask)
    with pytest.raises(TrainError, match="has overwritten its activations"):
        first.sum().backward()


def test_an_evaluation_is_not_recorded(capture, backend):
    layers, mask = compiled(model(), backend), torch.ones(3, 10, dtype=torch.float64)
    for _ in range(4):
        backend.begin_step()
    with torch.no_grad():
        layers[0](torch.ones(3, 6, dtype=torch.float64), mask)
    assert capture.recorded == 0


class Watched(Layer):
    """A layer with a second output that has no gradient."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the stream, and its largest input."""
        return super().forward(x, mask), x.detach().amax()


def test_outputs_without_a_gradient_stay_so_when_they_are_replayed(capture, backend):
    torch.manual_seed(4)
    plain, mask = Watched().double(), torch.ones(3, 10).double()
    (ours,) = compiled(nn.ModuleList([Watched().double()]), backend)
    ours.load_state_dict(plain.state_dict())
    for _ in range(5):
        backend.begin_step()
        x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
        y, largest = ours(x, mask)
        assert largest == x.amax() and not largest.requires_grad
        gradients = torch.autograd.grad(y.square().sum(), [x, *ours.parameters()])
        expected = torch.autograd.grad(plain(x, mask)[0].square().sum(), [x, *plain.parameters()])
        torch.testing.assert_close(gradients, expected, rtol=1e-13, atol=1e-13)
    assert (capture.recorded, capture.replayed) == (2, 2 * 2)


def test_a_cuda_graph_is_replayed_after_its_capture_which_computes_nothing(monkeypatch):
    calls = []

    class Graph:
        def replay(self):
            calls.append("replay")

    @contextmanager
    def capturing(graph, *, pool, capture_error_mode):
        calls.append((pool, capture_error_mode))
        yield
        calls.append("captured")

    fakes = {"graph_pool_handle": lambda: "pool", "CUDAGraph": Graph, "graph": capturing}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    results, replay = CudaCapture().record(lambda: calls.append("run") or ["result"])
    assert results == ["result"]
    assert calls == [("pool", "thread_local"), "run", "captured", "replay"]
    replay()
    assert calls[4:] == ["replay"]
