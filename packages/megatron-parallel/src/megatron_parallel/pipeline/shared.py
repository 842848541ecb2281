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


def sum_tied_gradient(parameter: Parameter, mesh: Mesh, axis: str = "embedding") -> None:
    """Sums, in place, the gradients of a parameter that several stages hold.

    Every rank that holds the parameter calls this once per step, after the last backward pass. It
    does nothing on one stage, on ranks without the axis, and where one rank has all these stages.
    Afterwards all copies have the whole gradient, so that equal optimizers keep them equal. The
    gradient norm counts it once.

    Args:
        parameter: The parameter.
        mesh: The mesh of this rank.
        axis: Axis of the pipeline ranks that hold it (`Sharding.tied`). Defaults to those of the
            first and the last stage.
    """
    if not _is_tied_over_stages(mesh, axis):
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    all_reduce(parameter.grad, mesh.axis(axis), purpose="tied gradient")


def copy_tied_parameter(parameter: Parameter, mesh: Mesh, axis: str = "embedding") -> None:
    """Overwrites other stages' copies of a tied parameter with that of the first one.

    Not needed after `initialize_parameters` or after loading a checkpoint: both use the global
    name, so the copies are equal. Arguments are those of `sum_tied_gradient`.
    """
    if _is_tied_over_stages(mesh, axis):
        broadcast(parameter.data, mesh.axis(axis), purpose="tied parameter")


def broadcast_from_last_stage(
    t: Shaped[Tensor, "*shape"], mesh: Mesh, *, purpose: str = ""
) -> Shaped[Tensor, "*shape"]:
    """Overwrites `t` on all pipeline ranks with the value of the last stage's rank; returns `t`."""
    layout = mesh.layout
    last = layout.pipeline_rank_of(layout.pp * layout.vpp - 1)
    return broadcast(t, mesh.axis("pp"), source=last, purpose=purpose)


def _is_tied_over_stages(mesh: Mesh, axis: str) -> bool:
    return mesh.has_axis(axis) and mesh.axis(axis).size > 1
