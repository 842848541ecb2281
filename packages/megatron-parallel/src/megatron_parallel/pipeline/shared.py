"""What stages share: tied parameters, parameters of several chunks, and the losses."""

from collections.abc import Iterable

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_parallel.collectives.operations import all_reduce, broadcast
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.mesh import Mesh


def stage_parameters(chunks: Iterable[nn.Module]) -> dict[str, Parameter]:
    """Returns this rank's parameters by global name, each of them once, in the order of the chunks.

    A parameter that two chunks share (tied, if the first and the last stage are on one rank) is
    listed with the first of them.

    Raises:
        LayoutError: Chunks have two different parameters of one name, which would be one global
            parameter with two values.
    """
    found: dict[str, Parameter] = {}
    seen: set[int] = set()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if id(parameter) in seen:
                continue
            if name in found:
                raise LayoutError(
                    f"two chunks of this rank have different parameters {name!r}: share one tensor"
                )
            seen.add(id(parameter))
            found[name] = parameter
    return found


def sum_tied_gradient(parameter: Parameter, mesh: Mesh) -> None:
    """Sums, in place, the gradients of a parameter that the first and the last stage both hold.

    Every rank that holds the parameter calls this once per step, after the last backward pass. It
    does nothing on one stage, on ranks of inner stages, and where one rank has both stages.
    Afterwards both copies have the whole gradient, so that equal optimizers keep them equal. The
    gradient norm counts it once.
    """
    if not _is_tied_over_stages(mesh):
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    all_reduce(parameter.grad, mesh.axis("embedding"), purpose="tied gradient")


def copy_tied_parameter(parameter: Parameter, mesh: Mesh) -> None:
    """Overwrites the last stage's copy of a tied parameter with the first stage's.

    Not needed after `initialize_parameters` or after loading a checkpoint: both use the global
    name, so the copies are equal.
    """
    if _is_tied_over_stages(mesh):
        broadcast(parameter.data, mesh.axis("embedding"), purpose="tied parameter")


def broadcast_from_last_stage(
    t: Shaped[Tensor, "*shape"], mesh: Mesh, *, purpose: str = ""
) -> Shaped[Tensor, "*shape"]:
    """Overwrites `t` on all pipeline ranks with the value of the last stage's rank; returns `t`."""
    layout = mesh.layout
    last = layout.pipeline_rank_of(layout.pp * layout.vpp - 1)
    return broadcast(t, mesh.axis("pp"), source=last, purpose=purpose)


def _is_tied_over_stages(mesh: Mesh) -> bool:
    return mesh.has_axis("embedding") and mesh.axis("embedding").size > 1
