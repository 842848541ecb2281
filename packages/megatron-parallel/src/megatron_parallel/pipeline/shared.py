"""What stages have in common: tied parameters, parameters of several chunks, the losses."""

from collections.abc import Iterable

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_parallel.collectives import all_reduce, broadcast
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh import Mesh


def stage_parameters(chunks: Iterable[nn.Module]) -> dict[str, Parameter]:
    """This rank's parameters by global name, each of them once, in the order of the chunks.

    A parameter that two chunks share (tied, on schedules that put the first and the last stage on
    one rank) is listed where it comes first. Raises `LayoutError` if chunks have two different
    parameters of one name, which would be one global parameter with two values.
    """
    found: dict[str, Parameter] = {}
    seen: set[int] = set()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if id(parameter) in seen:
                continue
            if name in found:
                raise LayoutError(
                    f"two chunks of this rank have a parameter {name!r} each: share one tensor"
                )
            seen.add(id(parameter))
            found[name] = parameter
    return found


def sum_tied_gradient(parameter: Parameter, mesh: Mesh) -> None:
    """Adds up, in place, the gradients of a parameter that the first and the last stage both hold.

    To be called once per step, after the last backward pass, by every rank that holds the
    parameter; on one stage, on ranks of inner stages, and where one rank has both, it does nothing.
    Afterwards both copies have the whole gradient, so that equal optimizers keep them equal; in the
    norm it counts once.
    """
    if not _is_tied_over_stages(mesh):
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    all_reduce(parameter.grad, mesh.axis("embedding"), purpose="tied gradient")


def copy_tied_parameter(parameter: Parameter, mesh: Mesh) -> None:
    """Overwrites the last stage's copy of a tied parameter by the first stage's.

    Not needed after `initialize_parameters` and after loading a checkpoint: both go by the global
    name, so the copies are equal already.
    """
    if _is_tied_over_stages(mesh):
        broadcast(parameter.data, mesh.axis("embedding"), purpose="tied parameter")


def broadcast_from_last_stage(
    t: Shaped[Tensor, "*shape"], mesh: Mesh, *, purpose: str = ""
) -> Shaped[Tensor, "*shape"]:
    """Overwrites `t` on all stages with the last stage's values, and returns it."""
    layout = mesh.layout
    last = layout.pipeline_rank_of(layout.pp * layout.vpp - 1)
    return broadcast(t, mesh.axis("pp"), source=last, purpose=purpose)


def _is_tied_over_stages(mesh: Mesh) -> bool:
    return mesh.has_axis("embedding") and mesh.axis("embedding").size > 1
