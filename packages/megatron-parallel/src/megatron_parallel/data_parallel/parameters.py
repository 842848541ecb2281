"""Parameters in the buckets of their gradients: each rank updates a shard, then all gather them.

    shards = ParameterBuffers(module, buffers, table)
    optimizer updates shards.local_shards()  # flat ranges, in place
    shards.start_gather()                    # the next forward pass waits where it must

This is the second half of ZeRO-1 (Rajbhandari et al. 2020): gradients are reduce-scattered in
`GradientBuffers`, each rank updates a flat shard of every bucket, and weights are all-gathered.
With overlap, all gathers start at once, in forward order. Before its forward pass, a module waits
for the buckets that hold its own parameters, and a unit for all that are below it: a layer that is
compiled as a whole has no hooks inside. Parameters that are tied over pipeline stages are read
by a module that does not own them, so the whole stage waits for those. Other code that reads
parameters (a checkpoint) calls `wait_for_parameters` first.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from megatron_parallel.collectives.async_collective import AsyncCollective
from megatron_parallel.data_parallel.bucket import Bucket, BucketCollective
from megatron_parallel.data_parallel.buffers import GradientBuffers
from megatron_parallel.data_parallel.reduction import AsyncCollectives
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.sharding.cut import Cut
from megatron_parallel.sharding.flat_ranges import flat_range_boxes
from megatron_parallel.sharding.region import Region
from megatron_parallel.sharding.sharding import Sharding
from megatron_parallel.sharding.views import View, flat_range_views

PURPOSE: Final = "parameters"
"""Purpose of the gathers, as reported in `Traffic`."""


class ParameterBuffers:
    """Parameters of one model chunk, or shared by several, in flat storage that is sharded.

    Moves the parameters into that storage: tensors that shared memory with them no longer do.

    Args:
        module: The chunk, or the chunks of this rank that share the parameters. With
            `overlap_param_gather`, forward hooks are installed on their submodules.
        buffers: Sharded gradient buffers of the same parameters; the parameters use their plan.
        table: Sharding of the parameters.
        units: Modules that wait before their forward pass for the parameters of all their
            submodules, which have no hooks of their own. Defaults to none.

    Raises:
        LayoutError: The buffers are not sharded.
        CollectiveError: A rank of the axis does not take part within the mesh's time-out.
    """

    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module],
        buffers: GradientBuffers,
        table: Mapping[str, Sharding],
        units: Iterable[nn.Module] = (),
    ) -> None:
        if not buffers.config.use_distributed_optimizer:
            raise LayoutError(
                "parameters are sharded only with their gradients: set use_distributed_optimizer"
            )
        self.buckets = tuple(_ParameterBucket(bucket) for bucket in buffers.buckets)
        self.overlap = buffers.config.overlap_param_gather
        self._table = table
        self._gathers_in_flight = 0
        self._hooks: list[RemovableHandle] = []
        if self.overlap:
            whole = set(units)
            for each in [module] if isinstance(module, nn.Module) else module:
                self._watch(each, whole)

    def local_shards(self) -> dict[str, Shaped[Tensor, "..."]]:
        """Returns what this rank updates, by global name: views of the parameters.

        They are flat, or in buckets of whole matrices have the parameters' shapes.
        """
        return {
            name: part for bucket in self.buckets for name, part in bucket.local_shards().items()
        }

    def cuts(self) -> dict[str, Cut]:
        """Returns nothing: buckets are cut into flat ranges."""
        return {}

    def regions(self) -> dict[str, Region]:
        """Returns which part of each parameter lies in this rank's shards."""
        return {name: r for bucket in self.buckets for name, r in bucket.regions().items()}

    def views(self, tensors: Mapping[str, Tensor], mesh: Mesh) -> dict[str, list[View]]:
        """Returns views, for a checkpoint, of tensors with the shapes of the shards.

        Such tensors are moments or main weights.
        """
        starts = {name: start for bucket in self.buckets for name, start in bucket.starts().items()}
        found = {}
        for name in starts.keys() & tensors.keys():
            sharding = self._table[name]
            replica = sharding.replica(mesh, sharded=True)
            flat = tensors[name].view(-1)
            found[name] = flat_range_views(flat, starts[name], sharding, mesh, replica)
        return found

    @torch.no_grad()
    def start_gather(self) -> None:
        """Starts gathering all shards on every rank, in forward order.

        Without overlap, returns when all are gathered.
        """
        for bucket in reversed(self.buckets):
            self._gathers_in_flight += bucket.start()
        if not self.overlap:
            self.wait_for_parameters()

    def wait_for_parameters(self) -> None:
        """Returns when all parameters may be read."""
        for bucket in self.buckets if self._gathers_in_flight else ():
            self._gathers_in_flight -= bucket.wait()

    def gathers(self) -> list[BucketCollective]:
        """Returns the collectives of the latest `start_gather`, in the order of their start."""
        found = [bucket.gathered for bucket in self.buckets if bucket.gathered is not None]
        return sorted(found, key=lambda gathered: gathered.launched)

    def close(self) -> None:
        """Waits for the gathers in flight and removes the hooks."""
        self.wait_for_parameters()
        for hook in self._hooks:
            hook.remove()

    def _watch(self, module: nn.Module, units: set[nn.Module]) -> None:
        """Installs hooks: before its forward pass, a module waits for the buckets that it reads."""
        owners = {id(p): bucket for bucket in self.buckets for p in bucket.parameters.values()}
        tied = [bucket for bucket in self.buckets if bucket.tied]
        inside = {child for unit in units for child in unit.modules()} - units
        for child in module.modules():
            if child in inside:
                continue
            own = child.parameters(recurse=child in units)
            needed = [owners[id(p)] for p in own if id(p) in owners]
            if child is module:
                needed = [*tied, *needed]
            if needed:
                hook = partial(self._enter, tuple(dict.fromkeys(needed)))
                self._hooks.append(child.register_forward_pre_hook(hook))

    def _enter(self, needed: tuple["_ParameterBucket", ...], module: nn.Module, _: Any) -> None:
        """Waits for the buckets that a module needs; a forward hook."""
        if self._gathers_in_flight:
            for bucket in needed:
                self._gathers_in_flight -= bucket.wait()


class _ParameterBucket:
    """The parameters of one bucket, contiguous in flat storage."""

    def __init__(self, gradients: Bucket) -> None:
        plan = gradients.plan
        self.parameters: dict[str, Parameter] = gradients.parameters
        self.tied = plan.tied
        self.gathered: BucketCollective | None = None
        self._plan = plan
        self._axis = gradients.axes.inner
        self._collectives = AsyncCollectives(
            PURPOSE, f"parameter bucket {gradients.label} ({plan.slots[0].name!r} ...)"
        )
        self._started: AsyncCollective | None = None
        self._flat = torch.zeros(plan.numel, dtype=plan.parameter_dtype, device=plan.device)
        self._shard = self._flat[slice(*plan.shard_range(self._axis.index))]
        for slot in plan.slots:
            parameter = self.parameters[slot.name]
            view = self._flat[slot.start : slot.stop].view(slot.shape)
            view.copy_(parameter.detach())
            parameter.data = view

    def local_shards(self) -> dict[str, Tensor]:
        """Returns the range of each parameter that lies in this rank's shard."""
        return self._plan.split_shard(self._shard, self._axis.index)

    def starts(self) -> dict[str, int]:
        """Returns where each of these ranges begins in its flattened parameter."""
        return {part.name: part.start for part in self._plan.shard_ranges(self._axis.index)}

    def regions(self) -> dict[str, Region]:
        """Returns the boxes that cover these ranges; none of parameters in other shards."""
        ranges = {part.name: part for part in self._plan.shard_ranges(self._axis.index)}
        found = {}
        for slot in self._plan.slots:
            part = ranges.get(slot.name)
            boxes = () if part is None else flat_range_boxes(slot.shape, part.start, part.stop)
            found[slot.name] = Region(self._axis, boxes)
        return found

    def start(self) -> int:
        """Starts gathering; returns the number of gathers to wait for."""
        self.wait()
        self.gathered = None
        if self._axis.size == 1:
            return 0
        self._started = self._collectives.all_gather(self._flat, self._shard, self._axis)
        return 1

    def wait(self) -> int:
        """Waits until the parameters may be read; returns the number of gathers waited for."""
        started = self._started
        if started is None:
            return 0
        started.wait()
        self._started = None
        self.gathered = BucketCollective.of(started, self.parameters)
        return 1
