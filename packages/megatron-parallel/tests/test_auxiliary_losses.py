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


def test_counters_add_up_and_have_no_gradient() -> None:
    losses = AuxiliaryLosses({}, {"tokens": 2})
    assert losses.has_counters and losses.counts_under("tokens")
    assert not losses.counts_under("rows") and not losses.has_maxima
    assert losses.counts == {"tokens": None} and losses.sums == {}
    values = torch.tensor([1.0, 2.0], dtype=F64, requires_grad=True)
    for _ in range(3):
        losses.count("tokens", values)
    found = losses.counts["tokens"]
    assert found is not None and found.tolist() == [3, 6] and not found.requires_grad
    for name, count in (("rows", 2), ("tokens", 3)):
        with pytest.raises(LayoutError, match=rf"{count} values cannot be counted as '{name}'"):
            losses.count(name, torch.zeros(count, dtype=F64))
    plain = AuxiliaryLosses({"square": 1.0})
    assert not plain.has_counters and plain.counts == plain.maxima == {}


def test_maxima_are_those_of_all_reports_of_an_entry() -> None:
    losses = AuxiliaryLosses({}, maxima={"score": 4})
    assert losses.has_maxima and losses.has_maximum("score") and not losses.has_maximum("other")
    assert losses.maxima == {"score": None} and not losses.has_counters
    inf = float("inf")
    reports = [
        (torch.tensor([1.0, 5.0]), 1, [-inf, 1, 5, -inf]),
        (torch.tensor([3.0]), 2, [-inf, 1, 5, -inf]),
        (torch.tensor([-2.0, 4.0]), 0, [-2, 4, 5, -inf]),
        (torch.tensor([7.0]), 3, [-2, 4, 5, 7]),
    ]
    for values, first, expected in reports:
        losses.maximum("score", values.requires_grad_(), first)
        found = losses.maxima["score"]
        assert found is not None and found.tolist() == expected
        assert found.dtype == F64 and not found.requires_grad
    losses.maximum("score", torch.tensor([0.0, 0.0, 9.0]))
    assert losses.maxima["score"] is not None
    assert losses.maxima["score"].tolist() == [0, 4, 9, 7]
    for name, first, count in (("score", 3, 2), ("score", 0, 5), ("other", 0, 1)):
        with pytest.raises(LayoutError, match=f"{count} values from entry {first} cannot be max"):
            losses.maximum(name, torch.zeros(count), first)


def test_a_running_sum_is_over_the_step_and_a_copy() -> None:
    losses = AuxiliaryLosses({})
    x = torch.ones(2, requires_grad=True)
    first = losses.running_sum("load", x)
    second = losses.running_sum("load", 2 * x)
    assert (first.tolist(), second.tolist()) == ([1, 1], [3, 3])
    assert not first.requires_grad and not second.requires_grad
    with torch.no_grad():
        x += 5
    assert first.tolist() == [1, 1] and losses.running_sum("other", x).tolist() == [6, 6]
    assert AuxiliaryLosses({}).running_sum("load", x).tolist() == [6, 6]


@pytest.mark.parametrize("denominator", [4.0, torch.tensor(4.0, dtype=F64)], ids=["host", "device"])
def test_a_value_is_added_once_by_both_halves_of_a_backward_pass(
    denominator: float | Tensor,
) -> None:
    losses = AuxiliaryLosses({"square": denominator})
    assert losses.sums == {"square": 0.0}
    x, w = torch.ones(2, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    y = losses.attach(x * w, "square", w.square(), 2.0, replicated=()).sum()
    assert losses.sums["square"] == 0
    (dx,) = torch.autograd.grad(y, [x], retain_graph=True)
    (dw,) = torch.autograd.grad(y, [w])
    assert dx.tolist() == [3, 3] and dw.item() == 2 + 2 * 3 * 2.0 / 4
    assert isinstance(losses.sums["square"], Tensor) and losses.sums["square"].dtype == F64
    assert losses.sums["square"] == 9 and dw.dtype == torch.float32


def test_only_the_first_rank_of_all_replicated_axes_counts_a_value() -> None:
    layout = ParallelLayout(tp=2, cp=2, dp=1)
    for rank in range(4):
        mesh = Mesh(layout, rank)
        losses = AuxiliaryLosses({"square": 1.0})
        x = torch.ones(1, requires_grad=True)
        axes = (mesh.axis("tp"), mesh.axis("cp"))
        losses.attach(x, "square", 5 * x.sum(), 1.0, replicated=axes).sum().backward()  # type: ignore[no-untyped-call]
        assert losses.sums["square"] == (5 if rank == 0 else 0)
        assert x.grad is not None and x.grad.item() == 6
