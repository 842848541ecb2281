"""The norm of the whole gradient, and clipping by it.

The norm is that of the gradient of the whole model, on whatever ranks its pieces lie: every element
counts once, in replicated parameters too, and every rank obtains the same number.

Squares are summed in rows of 4,096 elements in the gradient's own dtype, and the rows in float64. A
single fp32 ``torch.linalg.vector_norm`` over 10^8 elements is wrong by 1 % on a CPU, and one that
accumulates in float64 throughout is 20 times slower; the rows are right to 1e-8 at the speed of the
first.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from jaxtyping import Float, Float64
from megatron_parallel import Mesh, Sharding, all_reduce
from torch import Tensor

from megatron_optim.errors import OptimError
from megatron_optim.param_groups import require_shardings

ROW = 4096


@torch.no_grad()
def gradient_norm(
    gradients: Mapping[str, Float[Tensor, "..."]],
    table: Mapping[str, Sharding],
    mesh: Mesh,
    *,
    norm_type: float = 2.0,
    sharded: bool = False,
) -> Float64[Tensor, ""]:
    """Returns the norm of the whole gradient, a scalar on the mesh's device, equal on every rank.

    ``gradients`` holds this rank's pieces by global parameter name, already reduced over the data
    axis; ``sharded`` if ranks of the data axis hold a shard each. ``norm_type`` is 2 or
    ``math.inf``. A NaN or infinity anywhere makes the norm not finite.
    """
    if norm_type not in (2.0, math.inf):
        raise OptimError(f"norm_type must be 2 or inf, got {norm_type}")
    require_shardings(gradients, table)
    counted = [
        gradient
        for name, gradient in gradients.items()
        if table[name].replica(mesh, sharded=sharded) == 0
    ]
    if norm_type == math.inf:
        largest = [gradient.abs().max().double() for gradient in counted if gradient.numel()]
        local = torch.stack(largest).max() if largest else _zero(mesh)
        return _over_all_ranks(local, mesh, "max")
    local = sum_of_squares(counted) if counted else _zero(mesh)
    total = _over_all_ranks(local, mesh, "sum")
    if total.device.type == "cpu":  # torch's root of a float64 may be wrong in its last bit there
        return total.new_tensor(math.sqrt(total))
    return total.sqrt()


def sum_of_squares(tensors: Iterable[Float[Tensor, "..."]]) -> Float64[Tensor, ""]:
    """Returns the sum of the squares of all elements, a float64 scalar on the tensors' device."""
    norms: list[Tensor] = []
    for tensor in tensors:
        flat = tensor.reshape(-1)
        whole = flat.numel() // ROW * ROW
        if whole:
            norms.append(torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1))
        if whole < flat.numel():
            norms.append(torch.linalg.vector_norm(flat[whole:]).view(1))
    return torch.cat(norms).double().square().sum()


def clip_coefficient(norm: Float64[Tensor, ""], max_norm: float) -> Float64[Tensor, ""]:
    """Returns the factor that brings a gradient of norm ``norm`` down to ``max_norm``, at most 1.

    ``max_norm`` 0 switches clipping off. As in Megatron-LM the factor is
    ``max_norm / (norm + 1e-6)`` where that is below 1.
    """
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm > 0.0 else torch.ones_like(norm)


@torch.no_grad()
def scale_gradients(gradients: Iterable[Float[Tensor, "..."]], factor: float) -> None:
    """Multiplies gradients in place by ``factor``; nothing is touched where it is 1."""
    tensors = list(gradients)
    if factor != 1.0 and tensors:
        torch._foreach_mul_(tensors, factor)


def _over_all_ranks(
    value: Float64[Tensor, ""], mesh: Mesh, op: Literal["sum", "max"]
) -> Float64[Tensor, ""]:
    """Reduces over the ranks of a pipeline stage, then over the stages: every rank once."""
    for axis in ("tp_dp_cp", "pp"):
        value = all_reduce(value, mesh.axis(axis), op=op, purpose="gradient norm")
    return value


def _zero(mesh: Mesh) -> Float64[Tensor, ""]:
    return torch.zeros((), dtype=torch.float64, device=mesh.device)
