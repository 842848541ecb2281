"""Zeros and norms of parts of a model against numbers computed by hand."""

import torch
from megatron_optim import (
    LossScaleConfig,
    Optimizer,
    OptimizerConfig,
    count_zeros,
    gradient_norms,
    parameter_norms,
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
