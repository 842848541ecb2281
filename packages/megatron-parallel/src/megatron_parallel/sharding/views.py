"""Views of tensors as boxes of global parameters, and the sharding table of a module.

A checkpoint takes one `View` for each box of a parameter that this rank holds.
"""

from collections.abc import Mapping
from typing import NamedTuple

from jaxtyping import Shaped
from torch import Tensor, nn

from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.sharding.flat_ranges import flat_range_boxes
from megatron_parallel.sharding.sharding import Box, Sharding
from megatron_parallel.sharding.step_state import collect_states


class View(NamedTuple):
    """A tensor that is a box of a global tensor, for a checkpoint.

    Attributes:
        tensor: Tensor of shape `lengths`, which shares memory with its owner.
        global_shape: Shape of the global tensor.
        offsets: Offsets of the box.
        lengths: Lengths of the box.
        replica: Replica number. A checkpoint stores replica 0 of each box.
    """

    tensor: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    replica: int


def flat_range_views(
    flat: Shaped[Tensor, " n"], start: int, sharding: Sharding, mesh: Mesh, replica: int = 0
) -> list[View]:
    """Returns views of elements `start : start + n` of this rank's flattened tensor.

    Used for shards of a gradient bucket. Padding is left out.

    Args:
        flat: The elements, `[n]`.
        start: Index of the first element in the flattened tensor.
        sharding: Sharding of the parameter.
        mesh: Mesh of this rank.
        replica: Replica number, which depends on how the bucket is cut.
    """
    views = []
    offset = 0
    for box in flat_range_boxes(sharding.local_shape(mesh), start, start + flat.numel()):
        tensor = flat[offset : offset + box.numel].view(box.lengths)
        offset += box.numel
        views += box_views(tensor, box.offsets, sharding, mesh, replica)
    return views


def box_views(
    tensor: Shaped[Tensor, "..."],
    offsets: tuple[int, ...],
    sharding: Sharding,
    mesh: Mesh,
    replica: int = 0,
) -> list[View]:
    """Returns views of a box of this rank's tensor.

    As `flat_range_views`, for shards that are boxes (`fully_shard`).

    Args:
        tensor: Elements of the box.
        offsets: Offsets of the box in this rank's tensor.
        sharding: Sharding of the parameter.
        mesh: Mesh of this rank.
        replica: Replica number.
    """
    views = []
    box = Box(offsets, tuple(tensor.shape))
    for shard in sharding.shard_boxes(mesh):
        overlap = box.intersection(shard.local)
        if overlap.numel == 0:
            continue
        inside = overlap.shifted(tuple(-offset for offset in box.offsets))
        to_global = zip(shard.box.offsets, shard.local.offsets, strict=True)
        whole = overlap.shifted(tuple(ours - local for ours, local in to_global))
        shape = sharding.shape
        views.append(View(tensor[inside.slices], shape, whole.offsets, whole.lengths, replica))
    return views


def collect_shardings(module: nn.Module) -> dict[str, Sharding]:
    """Returns the sharding table of a module: `Sharding` by global name, in parameter order.

    Reads the attribute `sharding` of each submodule. State that is not a parameter (`StepState`)
    follows the parameters. A parameter that is used twice (tied) has one entry, under its first
    name.

    Raises:
        LayoutError: A parameter has no sharding.
    """
    owners = dict(module.named_modules(remove_duplicate=False))
    table = {}
    for name, _ in module.named_parameters():
        prefix, _, local = name.rpartition(".")
        described: Mapping[str, Sharding] = getattr(owners[prefix], "sharding", {})
        if local not in described:
            raise LayoutError(
                f"parameter {name!r} has no sharding: add {local!r} to the attribute 'sharding' "
                f"of {type(owners[prefix]).__name__}"
            )
        table[name] = described[local]
    table.update({name: state.sharding for name, state in collect_states([module]).items()})
    return table


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and state of a module by global name."""
    states = {name: state.value for name, state in collect_states([module]).items()}
    return {**dict(module.named_parameters()), **states}


def parameter_views(
    tensors: nn.Module | Mapping[str, Tensor], table: Mapping[str, Sharding], mesh: Mesh
) -> dict[str, list[View]]:
    """Returns views of parameters, or of tensors of the same shapes, for a checkpoint.

    Args:
        tensors: A module, for views of its parameters and state, or tensors by name, such as
            gradients or moments.
        table: Sharding table.
        mesh: Mesh of this rank.

    Returns:
        Views by name. The list is empty if this rank holds only padding.

    Raises:
        LayoutError: A name is not in the table, or the shape of a tensor differs from its sharding.
    """
    named = _tensors_of(tensors) if isinstance(tensors, nn.Module) else tensors
    views: dict[str, list[View]] = {}
    for name, tensor in named.items():
        if name not in table:
            raise LayoutError(f"parameter {name!r} is not in the sharding table")
        sharding = table[name]
        local = sharding.local_shape(mesh)
        if tuple(tensor.shape) != local:
            raise LayoutError(
                f"{name!r} has shape {tuple(tensor.shape)}, but its sharding needs {local}"
            )
        replica = sharding.replica(mesh)
        data = tensor.detach()
        views[name] = [
            View(data[inside.slices], sharding.shape, box.offsets, box.lengths, replica)
            for box, inside in sharding.shard_boxes(mesh)
        ]
    return views
