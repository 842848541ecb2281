"""Numbers about parameters and gradients for logs. Nothing here waits for a device.

Every element of the model counts once, also in replicated and tied parameters, and every rank gets
the same numbers. Call the functions on all ranks of the mesh.
"""

from collections.abc import Mapping
from math import prod

import torch
from jaxtyping import Float, Float64
from megatron_parallel import all_reduce, to_device
from torch import Tensor

from megatron_optim.clip import sum_of_squares
from megatron_optim.optimizer import Optimizer
from megatron_optim.update_squares import UpdateSquares


def count_zeros(optimizer: Optimizer) -> Float64[Tensor, ""]:
    """Returns the number of zeros in the gradient; call it before the optimizer's step."""
    gradients = optimizer.gradients()
    zeros = {name: (gradient == 0).sum().double() for name, gradient in gradients.items()}
    return _summed(optimizer, zeros, dict.fromkeys(zeros, 0), 1)[0]


def gradient_norms(
    optimizer: Optimizer, group_of: Mapping[str, int], count: int
) -> Float64[Tensor, " count"]:
    """Returns the norms of parts of the gradient; call it before the optimizer's step.

    With a loss scale, the gradients are still multiplied by it, and the norms are divided by it.

    Args:
        optimizer: The optimizer.
        group_of: The part of each parameter, by global name, from 0.
        count: The number of parts, equal on all ranks.
    """
    norms = _norms(optimizer, optimizer.gradients(), group_of, count)
    return norms if optimizer.scaler is None else norms / optimizer.scaler.scale


def parameter_norms(
    optimizer: Optimizer, group_of: Mapping[str, int], count: int
) -> Float64[Tensor, " count"]:
    """Returns the norms of parts of the main parameters.

    Args:
        optimizer: The optimizer.
        group_of: The part of each parameter, by global name, from 0.
        count: The number of parts, equal on all ranks.
    """
    return _norms(optimizer, dict(optimizer.main.values()), group_of, count)


def update_ratios(
    optimizer: Optimizer, squares: UpdateSquares, group_of: Mapping[str, int], count: int
) -> Float64[Tensor, " count"]:
    """Returns norms of parts of the update over those of the main parameters before it.

    A part whose parameters were all 0, or that has none, has a ratio of 0.

    Args:
        optimizer: The optimizer.
        squares: What was passed to the step.
        group_of: The part of each parameter, by global name, from 0.
        count: The number of parts, equal on all ranks.
    """
    found = [
        _summed(optimizer, each, group_of, count) for each in (squares.updates, squares.parameters)
    ]
    return torch.where(found[1] > 0, found[0] / found[1], 0.0).sqrt()


def _norms(
    optimizer: Optimizer,
    tensors: Mapping[str, Float[Tensor, "..."]],
    group_of: Mapping[str, int],
    count: int,
) -> Tensor:
    squares = {n: sum_of_squares([t]) for n, t in tensors.items() if prod(t.shape)}
    return _summed(optimizer, squares, group_of, count).sqrt()


@torch.no_grad()
def _summed(
    optimizer: Optimizer, values: Mapping[str, Tensor], group_of: Mapping[str, int], count: int
) -> Float64[Tensor, " count"]:
    """Returns the sums of scalars of parameters by group, over all ranks."""
    main = optimizer.main
    mesh, table = main.trainable.mesh, main.trainable.table
    total = torch.zeros(count, dtype=torch.float64, device=mesh.device)
    counted = [n for n in values if table[n].replica(mesh, sharded=main.sharded) == 0]
    if counted:
        groups = torch.tensor([group_of[name] for name in counted])
        # Main parameters may be in host memory.
        stacked = torch.stack([to_device(values[n].double(), mesh.device) for n in counted])
        total.index_add_(0, to_device(groups, mesh.device), stacked)
    for axis in ("tp_dp_cp", "pp"):
        total = all_reduce(total, mesh.axis(axis), purpose="statistics of parameters")
    return total
