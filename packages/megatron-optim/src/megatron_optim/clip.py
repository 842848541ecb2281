"""The norm of the gradient of the whole model, and gradient clipping.

The norm covers the whole model, whichever ranks hold its shards. Every element counts once, also in
replicated parameters, and every rank gets the same number.

Squares are summed over rows of 4,096 elements in the dtype of the gradient, and over the rows in
float64. A single fp32 ``torch.linalg.vector_norm`` over 10^8 elements has an error of 1 % on a CPU.
Accumulating in float64 throughout takes 20 times longer. Sums over rows have an error of 1e-8 and
take no longer than the single fp32 norm.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
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
    """Returns the norm of the gradient of the whole model, equal on every rank.

    Args:
        gradients: The gradients on this rank by global parameter name, already reduced over the
            data axis.
        table: The sharding of every parameter.
        mesh: The mesh of the model.
        norm_type: 2 or ``math.inf``. Defaults to 2.
        sharded: Whether the gradients are sharded over the data axis. Defaults to False.

    Returns:
        A scalar on the device of the mesh. It is not finite if any element is NaN or infinite.

    Raises:
        OptimError: ``norm_type`` is invalid, or a parameter is missing from the table.
    """
    if norm_type not in (2.0, math.inf):
        raise OptimError(f"norm_type must be 2 or inf, got {norm_type}")
    counted = [gradients[name] for name in _counted(gradients, table, mesh, sharded)]
    if norm_type == math.inf:
        largest = [gradient.abs().max().double() for gradient in counted if gradient.numel()]
        local = torch.stack(largest).max() if largest else _zero(mesh)
        return _over_all_ranks(local, mesh, "max")
    return _norm(counted, mesh)


class GradientNorm:
    """Returns `gradient_norm` in every step; finds once which gradients this rank counts.

    Args:
        table: The sharding of every parameter.
        mesh: The mesh of the model.
    """

    def __init__(self, table: Mapping[str, Sharding], mesh: Mesh) -> None:
        self._table, self._mesh = table, mesh
        self._names: Set[str] = frozenset()
        self._sharded: bool | None = None
        self._counted: tuple[str, ...] = ()

    @torch.no_grad()
    def __call__(
        self, gradients: Mapping[str, Float[Tensor, "..."]], *, sharded: bool
    ) -> Float64[Tensor, ""]:
        """Returns the 2-norm. Arguments and errors are those of `gradient_norm`."""
        if self._names != gradients.keys() or self._sharded != sharded:
            self._counted = _counted(gradients, self._table, self._mesh, sharded)
            self._names, self._sharded = frozenset(gradients), sharded
        return _norm([gradients[name] for name in self._counted], self._mesh)


def _counted(
    names: Iterable[str], table: Mapping[str, Sharding], mesh: Mesh, sharded: bool
) -> tuple[str, ...]:
    """Returns the names of the gradients that this rank counts."""
    require_shardings(names, table)
    return tuple(name for name in names if table[name].replica(mesh, sharded=sharded) == 0)


def _norm(counted: Sequence[Float[Tensor, "..."]], mesh: Mesh) -> Float64[Tensor, ""]:
    local = sum_of_squares(counted) if counted else _zero(mesh)
    total = _over_all_ranks(local, mesh, "sum")
    if total.device.type == "cpu":  # torch's float64 square root may have an error in the last bit
        return total.new_tensor(math.sqrt(total))
    return total.sqrt()


def sum_of_squares(tensors: Iterable[Float[Tensor, "..."]]) -> Float64[Tensor, ""]:
    """Returns the sum of the squares of all elements, a float64 scalar on the tensors' device."""
    given = list(tensors)
    found = [tensor for tensor in given if tensor.numel()]
    if not found:
        device = given[0].device if given else None
        return torch.zeros((), dtype=torch.float64, device=device)
    if all(tensor.is_cuda for tensor in found):
        # One operation for all tensors, which adds up blocks of 65,536 elements.
        return torch.stack(torch._foreach_norm(found)).double().square().sum()
    norms: list[Tensor] = []
    short: list[Tensor] = []
    for tensor in found:
        whole = tensor.numel() // ROW * ROW
        if not whole:
            short.append(tensor)
            continue
        flat = tensor.reshape(-1)
        if whole < tensor.numel():
            short.append(flat[whole:])
            flat = flat[:whole]
        norms.append(torch.linalg.vector_norm(flat.view(-1, ROW), dim=1))
    if short:
        norms.append(torch.stack(torch._foreach_norm(short)))
    return torch.cat(norms).double().square().sum()


def clip_coefficient(norm: Float64[Tensor, ""], max_norm: float) -> Float64[Tensor, ""]:
    """Returns the factor that scales a gradient of norm ``norm`` down to ``max_norm``, at most 1.

    The factor is ``max_norm / (norm + 1e-6)``, as in Megatron-LM, if that is below 1. A
    ``max_norm`` of 0 disables clipping.
    """
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm > 0.0 else torch.ones_like(norm)


@torch.no_grad()
def scale_gradients(gradients: Iterable[Float[Tensor, "..."]], factor: float) -> None:
    """Multiplies gradients in place by ``factor``; does nothing if the factor is 1."""
    tensors = list(gradients)
    if factor != 1.0 and tensors:
        torch._foreach_mul_(tensors, factor)


def _over_all_ranks(
    value: Float64[Tensor, ""], mesh: Mesh, op: Literal["sum", "max"]
) -> Float64[Tensor, ""]:
    """Reduces over the ranks of each pipeline rank, then over the pipeline ranks."""
    for axis in ("tp_dp_cp", "pp"):
        value = all_reduce(value, mesh.axis(axis), op=op, purpose="gradient norm")
    return value


def _zero(mesh: Mesh) -> Float64[Tensor, ""]:
    return torch.zeros((), dtype=torch.float64, device=mesh.device)
