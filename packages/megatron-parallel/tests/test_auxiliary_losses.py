"""Auxiliary losses: gradients as those of terms of the loss, and values counted once."""

import pytest
import torch
from megatron_parallel import AuxiliaryLosses, LayoutError, Mesh, ParallelLayout, all_reduce
from megatron_parallel.collectives import scatter_to_axis
from megatron_parallel.testing import WorkerPool
from torch import Tensor
from torch.utils.checkpoint import checkpoint

F64 = torch.float64


def layer(x: Tensor, weight: Tensor, auxiliary_losses: AuxiliaryLosses) -> Tensor:
    y = x * weight
    y = auxiliary_losses.attach(y, "square", y.square().sum(), coefficient=0.5, replicated=())
    return auxiliary_losses.attach(y, "cube", (weight**3).sum(), coefficient=2.0, replicated=())


def test_gradients_are_those_of_the_whole_objective_over_micro_batches() -> None:
    weight, whole = (torch.tensor([1.0, 2.0], dtype=F64).requires_grad_() for _ in range(2))
    batches = [torch.tensor([3.0, -1.0], dtype=F64), torch.tensor([0.5, 4.0], dtype=F64)]
    auxiliary_losses = AuxiliaryLosses({"square": 10.0, "cube": 4.0})
    for x in batches:
        layer(layer(x, weight, auxiliary_losses), weight, auxiliary_losses).sum().backward()  # type: ignore[no-untyped-call]
    objective = torch.zeros((), dtype=F64)
    squares = torch.zeros((), dtype=F64)
    for x in batches:
        first, second = x * whole, x * whole * whole
        squares = squares + first.square().sum() + second.square().sum()
        objective = objective + second.sum() + 2 * 2.0 * (whole**3).sum() / 4.0
    (objective + 0.5 * squares / 10.0).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(weight.grad, whole.grad, rtol=1e-15, atol=0)
    torch.testing.assert_close(torch.as_tensor(auxiliary_losses.sums["square"]), squares.detach())
    torch.testing.assert_close(
        torch.as_tensor(auxiliary_losses.sums["cube"]), torch.tensor(36.0, dtype=F64)
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_layer_counts_once(reentrant: bool) -> None:
    weight, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    auxiliary_losses = AuxiliaryLosses({"square": 1.0, "cube": 1.0})
    y = checkpoint(layer, x, weight, auxiliary_losses, use_reentrant=reentrant)
    assert not any(auxiliary_losses.sums.values())  # without a backward pass, nothing is added
    y.sum().backward()
    assert auxiliary_losses.sums == {"square": 2.0, "cube": 2.0}
    assert torch.equal(weight.grad, torch.tensor([1.0 + 1.0 + 6.0] * 2))  # type: ignore[arg-type]


def test_attach_returns_equal_values_and_refuses_unknown_names() -> None:
    auxiliary_losses = AuxiliaryLosses({"square": 1.0})
    x = torch.randn(3)
    assert torch.equal(auxiliary_losses.attach(x, "square", x.sum(), 1.0, replicated=()), x)
    with pytest.raises(LayoutError, match=r"auxiliary loss 'z' has no denominator: .* for \['s"):
        auxiliary_losses.attach(x, "z", x.sum(), 1.0, replicated=())


@pytest.mark.parametrize("cut", [False, True], ids=["replicated", "cut"])
@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_a_replicated_value_is_reported_once(worker_pool: WorkerPool, axis: str, cut: bool) -> None:
    """Two ranks with all of four numbers or half of them each, compared with one rank."""

    def step(mesh: Mesh) -> tuple[Tensor, Tensor]:
        ranks = mesh.axis(axis)
        x = torch.arange(1.0, 5.0, dtype=F64).requires_grad_()
        auxiliary_losses = AuxiliaryLosses({"square": 10.0})
        part = scatter_to_axis(x, ranks) if cut else x
        value = part.square().sum()
        replicated = () if cut else (ranks,)
        auxiliary_losses.attach(x, "square", value, 0.5, replicated=replicated).sum().backward()  # type: ignore[no-untyped-call]
        found = torch.as_tensor(auxiliary_losses.sums["square"], dtype=F64).clone()
        assert x.grad is not None
        return all_reduce(found, mesh.axis("world")), x.grad

    expected = step(Mesh.single())
    assert expected[0].item() == 30.0
    layout = ParallelLayout(tp=2, dp=1) if axis == "tp" else ParallelLayout(cp=2, dp=1)
    for found in worker_pool.run_mesh(layout, step):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
