"""Overlap of communication and products: events in the order in which they happen."""

import time
from typing import Any
from unittest import mock

import pytest
import torch
from megatron_parallel import ColumnParallelLinear, Mesh, ParallelLayout, RowParallelLinear, _compat
from megatron_parallel.collectives.async_collective import start_all_gather
from megatron_parallel.mesh.axes import Axis
from megatron_parallel.recompute import count_saved_activations
from megatron_parallel.tensor_parallel import (
    PLAIN,
    PlainProduct,
    Product,
    Saved,
    SavingProduct,
    overlap_forward,
)
from megatron_parallel.tensor_parallel.product import as_rows
from torch.utils._python_dispatch import TorchDispatchMode

LAYOUT = ParallelLayout(tp=2, dp=1)
DELAY = 0.05
"""Seconds that a collective takes longer than it does; less than a test's wait for the machine."""


class Delayed:
    """A work handle that completes `DELAY` after its start and records when it is awaited."""

    def __init__(self, name: str, work: Any, events: list[str]) -> None:
        self._name, self._work, self._events = name, work, events
        self._ready = time.monotonic() + DELAY

    def wait(self) -> None:
        self._events.append(f"{self._name} awaited")
        time.sleep(max(0.0, self._ready - time.monotonic()))
        self._work.wait()


class Products(TorchDispatchMode):
    """Records matrix products."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in ("aten.mm.default", "aten.addmm.default"):
            self._events.append("product")
        return func(*args, **(kwargs or {}))


def events_of(
    mesh: Mesh, kind: str, sequence_parallel: bool, num_slices: int | None
) -> dict[str, list[str]]:
    """Returns the events of one forward and one backward pass; None leaves the layer as built."""
    options: Any = {"sequence_parallel": sequence_parallel, "dtype": torch.float64, "bias": False}
    layer = {"column": ColumnParallelLinear, "row": RowParallelLinear}[kind](6, 6, mesh, **options)
    torch.nn.init.normal_(layer.weight)
    if num_slices is not None:
        overlap_forward(layer, num_slices)
    length = 8 // 2 if kind == "column" and sequence_parallel else 8
    x = torch.randn(length, 1, layer.weight.shape[1], dtype=torch.float64, requires_grad=True)
    events: list[str] = []
    with mock.patch.multiple(_compat, **{n: slow(n, events) for n in STARTED}), Products(events):
        y = layer(x)
        forward = list(events)
        events.clear()
        y.sum().backward()
    return {"forward": forward, "backward": list(events)}


STARTED = ("start_all_gather", "start_reduce_scatter", "start_all_reduce")


def slow(name: str, events: list[str]) -> Any:
    true, short = getattr(_compat, name), name.removeprefix("start_")

    def start(*args: Any) -> Delayed:
        events.append(f"{short} started")
        return Delayed(short, true(*args), events)

    return start


GATHER, SCATTER, REDUCE = "all_gather", "reduce_scatter", "all_reduce"
EXPECTED = {
    ("column", True, 1, "backward"): [
        f"{GATHER} started",
        "product",  # gradient of the input
        f"{SCATTER} started",
        f"{GATHER} awaited",
        "product",  # gradient of the weight
        f"{SCATTER} awaited",
    ],
    ("column", False, 1, "backward"): [
        "product",
        f"{REDUCE} started",
        "product",
        f"{REDUCE} awaited",
    ],
    ("column", True, 2, "forward"): [
        f"{GATHER} started",
        f"{GATHER} started",
        f"{GATHER} awaited",
        "product",
        f"{GATHER} awaited",
        "product",
    ],
    ("row", True, 2, "forward"): [
        "product",
        f"{SCATTER} started",
        "product",
        f"{SCATTER} started",
        f"{SCATTER} awaited",
        f"{SCATTER} awaited",
    ],
}


@pytest.mark.parametrize(("kind", "sequence_parallel", "num_slices", "when"), EXPECTED)
def test_collectives_start_before_and_are_awaited_after_products(
    worker_pool, kind, sequence_parallel, num_slices, when
):
    for events in worker_pool.run_mesh(LAYOUT, events_of, kind, sequence_parallel, num_slices):
        assert events[when] == EXPECTED[kind, sequence_parallel, num_slices, when]


@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_layer_communicates_in_one_slice_by_default(worker_pool, kind):
    for events in worker_pool.run_mesh(LAYOUT, events_of, kind, True, None):
        assert events["forward"].count("product") == 1
    layer = {"column": ColumnParallelLinear, "row": RowParallelLinear}[kind](2, 2, Mesh.single())
    assert layer.num_slices == 1


def test_each_half_of_a_split_backward_pass_communicates_only_its_inputs(worker_pool):
    for of_products in worker_pool.run_mesh(LAYOUT, _halves_of_products):
        assert of_products == [[{"reduce_scatter": 1}, {"all_gather": 1}]] * 2


class GathersHalves(PlainProduct, SavingProduct):
    """Saves half of its gathered input, and gathers inputs itself."""

    def forward_saving(self, x: Any, weights: Any, bias: Any, multiply: Any, **_: Any) -> Any:
        """Returns the product, half of the input, what makes it whole, and the weight."""
        double = torch.tensor(2.0, dtype=x.dtype)
        return multiply(x, weights[0], bias), Saved((x / 2, double), tuple(weights))

    def gradient(self, dy: torch.Tensor, **_: bool) -> torch.Tensor:
        """Returns the gradient of the output."""
        return dy

    def input_gradient(self, gradient: Any, saved: Saved) -> torch.Tensor:
        """Returns `dy W`."""
        return gradient @ saved.weights[0]

    def start_gather(self, x: torch.Tensor, axis: Axis) -> Any:
        """Starts the all-gather."""
        GATHERED.append(tuple(x.shape))
        return start_all_gather(x, axis)

    def weight_gradients(self, gradient: Any, saved: Saved, requests: Any) -> Any:
        """Returns `dy^T x`, or what the request does with it."""
        half, double = saved.input
        return (requests[0] and requests[0](gradient, double * as_rows(half)),)


GATHERED: list[tuple[int, ...]] = []


def _halves_of_products(mesh: Mesh) -> list[list[dict[str, int]]]:
    """Returns the results of `_halves` for two products, whose gradients are equal."""
    GATHERED.clear()
    (calls, truth), (own_calls, own) = (_halves(mesh, p) for p in (PLAIN, GathersHalves()))
    torch.testing.assert_close(own, truth, rtol=1e-12, atol=1e-12)
    assert GATHERED == [(4, 1, 6)] * 3  # forward, in the whole backward pass and in the second half
    return [calls, own_calls]


def _halves(mesh: Mesh, product: Product) -> tuple[list[dict[str, int]], list[torch.Tensor]]:
    """Returns collective calls in the input half and the weight half of a backward pass."""
    options: Any = {"sequence_parallel": True, "dtype": torch.float64, "product": product}
    layer = ColumnParallelLinear(6, 10, mesh, **options)
    generator = torch.Generator().manual_seed(mesh.rank)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    leaf = torch.randn(4, 1, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    loss = (layer(leaf * 2.0) ** 2).sum()
    whole = torch.autograd.grad(loss, [leaf, layer.weight, layer.bias], retain_graph=True)
    calls, parts = [], []
    for wanted in ([leaf], [layer.weight, layer.bias]):
        with mesh.counting() as traffic:
            parts += torch.autograd.grad(loss, wanted, retain_graph=True)
        calls.append({record.operation: record.calls for record in traffic.records})
    assert all(torch.equal(part, one) for part, one in zip(parts, whole, strict=True))
    return calls, parts


def test_only_this_ranks_part_of_the_input_is_saved(worker_pool):
    for shapes in worker_pool.run_mesh(LAYOUT, _kept):
        assert shapes == [(4, 1, 6)]


def _kept(mesh: Mesh) -> list[tuple[int, ...]]:
    layer = ColumnParallelLinear(6, 10, mesh, sequence_parallel=True)
    with count_saved_activations(layer) as kept:
        layer(torch.randn(4, 1, 6, requires_grad=True))
    return kept.shapes
