"""Zeros and norms of parts of a model against numbers computed by hand."""

import torch
from megatron_optim import (
    LossScaleConfig,
    Optimizer,
    OptimizerConfig,
    UpdateSquares,
    count_zeros,
    gradient_norms,
    parameter_norms,
    update_ratios,
)
from megatron_parallel import Mesh, ParallelLayout, Sharding, TrainableParameters
from megatron_parallel.testing import WorkerPool
from torch.nn import Parameter

TABLE = {"a": Sharding((4, 2), axis="tp", dim=0), "b": Sharding((2,)), "c": Sharding((3,))}
GROUPS = {"a": 0, "b": 1, "c": 1}
WEIGHTS = {
    "a": torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [0.0, 12.0]]),
    "b": torch.tensor([3.0, 4.0]),
    "c": torch.tensor([0.0, 0.0, 0.0]),
}
GRADIENTS = {"a": 2 * WEIGHTS["a"], "b": torch.tensor([6.0, 8.0]), "c": torch.zeros(3)}


def numbers(mesh: Mesh) -> list[list[float]]:
    parameters = {n: Parameter(t[TABLE[n].box(mesh).slices].clone()) for n, t in WEIGHTS.items()}
    for name, parameter in parameters.items():
        parameter.grad = 1024 * GRADIENTS[name][TABLE[name].box(mesh).slices]
    optimizer = Optimizer(
        TrainableParameters(parameters, TABLE, mesh),
        OptimizerConfig(),
        loss_scale=LossScaleConfig(loss_scale=1024.0),
    )
    found = gradient_norms(optimizer, GROUPS, 3), parameter_norms(optimizer, GROUPS, 3)
    return [*(each.tolist() for each in found), [float(count_zeros(optimizer))]]


WANTED = [[26.0, 10.0, 0.0], [13.0, 5.0, 0.0], [5 + 0 + 3]]


def test_parts_of_a_model_on_one_rank() -> None:
    assert numbers(Mesh.single()) == WANTED


def test_every_element_counts_once_on_several_ranks(worker_pool: WorkerPool) -> None:
    for found in worker_pool.run_mesh(ParallelLayout(tp=2, dp=2), numbers):
        assert found == WANTED


def ratios(mesh: Mesh) -> list[list[float]]:
    parameters = {n: Parameter(t[TABLE[n].box(mesh).slices].clone()) for n, t in WEIGHTS.items()}
    config = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0)
    optimizer = Optimizer(TrainableParameters(parameters, TABLE, mesh), config)
    found = []
    for factor in (1.0, float("nan")):
        for name, parameter in parameters.items():
            parameter.grad = factor * GRADIENTS[name][TABLE[name].box(mesh).slices]
        squares = UpdateSquares()
        optimizer.step(0.25, squares=squares)
        found.append(update_ratios(optimizer, squares, GROUPS, 3).tolist())
    return found


# The update is 0.25 times a gradient that is twice the weights; the second step is skipped.
RATIOS = [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]


def test_ratios_of_updates_on_one_rank() -> None:
    assert ratios(Mesh.single()) == RATIOS


def test_ratios_of_updates_on_several_ranks(worker_pool: WorkerPool) -> None:
    for found in worker_pool.run_mesh(ParallelLayout(tp=2, dp=2), ratios):
        assert found == RATIOS


def test_squares_of_several_ranges_of_a_parameter_add_up() -> None:
    squares = UpdateSquares()
    for name, old, new in (("a", 3.0, 1.0), ("b", 5.0, 5.0), ("a", 4.0, 7.0)):
        before = squares.copy([torch.tensor([old, 0.0]), torch.zeros(0)])
        squares.add([name, "empty"], before, [torch.tensor([new, 0.0]), torch.zeros(0)])
    assert {name: float(each) for name, each in squares.updates.items()} == {"a": 13.0, "b": 0.0}
    assert {n: float(each) for n, each in squares.parameters.items()} == {"a": 25.0, "b": 25.0}


def test_updates_of_long_parameters_are_measured_in_pieces() -> None:
    """Ranges of a parameter add up, and the update is that of an unmeasured step."""
    weight = torch.randn(1500, 1000, generator=torch.Generator().manual_seed(0))
    table = {"a": Sharding(tuple(weight.shape))}
    after = []
    for squares in (UpdateSquares(), None):
        parameter = Parameter(weight.clone())
        parameter.grad = weight.sin()
        optimizer = Optimizer(
            TrainableParameters({"a": parameter}, table, Mesh.single()), OptimizerConfig()
        )
        optimizer.step(0.01, squares=squares)
        after.append(parameter.detach())
        if squares is not None:
            change = (parameter.detach().double() - weight.double()).norm()
            wanted = change / weight.double().norm()
            found = update_ratios(optimizer, squares, {"a": 0}, 1)
            torch.testing.assert_close(found[0], wanted, rtol=1e-6, atol=0)
    assert torch.equal(*after)
