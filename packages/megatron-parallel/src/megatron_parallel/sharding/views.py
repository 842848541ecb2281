"""Tensors as boxes of global parameters, and the table of a module's shardings.

What is handed to a checkpoint is a `View` for each box of a parameter that this rank holds.
"""

from collections.abc import Mapping
from typing import NamedTuple

from jaxtyping import Shaped
from torch import Tensor, nn

from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.sharding.sharding import Box, Sharding, flat_range_boxes
from megatron_parallel.sharding.step_state import collect_states


class View(NamedTuple):
    """A tensor that is a box of a global tensor: what is handed to a checkpoint.

    `tensor` has shape `lengths` and shares memory with its owner. Of several views of one box, the
    one of replica 0 is written.
    """

    tensor: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    replica: int


def flat_range_views(
    flat: Shaped[Tensor, " n"], start: int, sharding: Sharding, mesh: Mesh, replica: int = 0
) -> list[View]:
    """Views of `flat`, which holds elements `start : start + n` of this rank's flattened tensor.

    For shards of a gradient bucket: padding is left out. `replica` is an argument, since the
    code that cuts a bucket decides which ranks hold the same range.
    """
    views = []
    position = 0
    for box in flat_range_boxes(sharding.local_shape(mesh), start, start + flat.numel()):
        tensor = flat[position : position + box.numel].view(box.lengths)
        position += box.numel
        views += box_views(tensor, box.offsets, sharding, mesh, replica)
    return views


def box_views(
    tensor: Shaped[Tensor, "..."],
    offsets: tuple[int, ...],
    sharding: Sharding,
    mesh: Mesh,
    replica: int = 0,
) -> list[View]:
    """Views of `tensor`, which is the box of this rank's tensor that begins at `offsets`.

    As `flat_range_views`, for shards that are boxes (`fully_shard`).
    """
    views = []
    box = Box(offsets, tuple(tensor.shape))
    for piece in sharding.shard_boxes(mesh):
        part = box.intersection(piece.local)
        if part.numel == 0:
            continue
        inside = part.shifted(tuple(-offset for offset in box.offsets))
        to_global = zip(piece.box.offsets, piece.local.offsets, strict=True)
        there = part.shifted(tuple(ours - local for ours, local in to_global))
        shape = sharding.shape
        views.append(View(tensor[inside.slices], shape, there.offsets, there.lengths, replica))
    return views


def collect_shardings(module: nn.Module) -> dict[str, Sharding]:
    """The table of a module: global parameter name to `Sharding`, in the order of parameters.

    Rows of state that is not a parameter (`StepState`) follow those of parameters. Reads the
    attribute `sharding` of every submodule. A parameter that is used twice (tied) has one entry,
    under its first name. Raises `LayoutError` for a parameter without a description.
    """
    owners = dict(module.named_modules(remove_duplicate=False))
    table = {}
    for name in (*(name for name, _ in module.named_parameters()), *collect_states([module])):
        prefix, _, local = name.rpartition(".")
        described: Mapping[str, Sharding] = getattr(owners[prefix], "sharding", {})
        if local not in described:
            raise LayoutError(
                f"parameter {name!r} has no sharding: add {local!r} to the attribute 'sharding' "
                f"of {type(owners[prefix]).__name__}"
            )
        table[name] = described[local]
    return table


def _held(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and state of a module by global name."""
    states = {name: state.value for name, state in collect_states([module]).items()}
    return {**dict(module.named_parameters()), **states}


def parameter_views(
    tensors: nn.Module | Mapping[str, Tensor], table: Mapping[str, Sharding], mesh: Mesh
) -> dict[str, list[View]]:
    """Views of parameters, or of tensors shaped like them (gradients, moments), for a checkpoint.

    Of a module, views of all that a checkpoint holds: parameters and state. A name whose local part
    is all padding has an empty list.
    """
    named = _held(tensors) if isinstance(tensors, nn.Module) else tensors
    views: dict[str, list[View]] = {}
    for name, tensor in named.items():
        if name not in table:
            raise LayoutError(f"parameter {name!r} is not in the sharding table")
        sharding = table[name]
        local = sharding.local_shape(mesh)
        if tuple(tensor.shape) != local:
            raise LayoutError(
                f"{name!r} has shape {tuple(tensor.shape)}, its sharding says {local}"
            )
        replica = sharding.replica(mesh)
        data = tensor.detach()
        views[name] = [
            View(data[at.slices], sharding.shape, box.offsets, box.lengths, replica)
            for box, at in sharding.shard_boxes(mesh)
        ]
    return views
