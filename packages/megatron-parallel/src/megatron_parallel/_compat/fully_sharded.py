"""torch's `fully_shard`, with the collectives and the sums of this project."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_parallel._compat.collectives import _all_gather, _reduce_scatter
from megatron_parallel._compat.imagined import values_exist


class Named(AbstractContextManager[None], Protocol):
    """Names the collective that fails in its block, as `raise_collective_errors` does."""

    def for_launch(self) -> AbstractContextManager[None]:
        """Returns the same for a block that starts a collective which a later block waits for."""


class ShardedModule:
    """A module and its units after torch's `fully_shard`."""

    def __init__(self, units: Sequence[Any]) -> None:
        self._units = units  # the stage itself comes last

    def set_gradient_sync(self, wanted: bool) -> None:
        """Sets whether the next backward pass sums gradients over ranks or accumulates them."""
        self._units[-1].set_requires_gradient_sync(wanted)

    def reshard(self) -> None:
        """Drops gathered parameters."""
        for unit in self._units:
            unit.reshard()


class ShardRanks(NamedTuple):
    """The ranks that share parameters.

    Attributes:
        inner: Ranks that hold one shard each, over which gradients are summed.
        outer: Ranks with the same shard, over which gradients are summed too; or None.
        grid: Global ranks of both groups, with a row for each inner group.
        on_start: Called with each all-gather and reduce-scatter of `inner`.
        name_failures: Returns the context in which these start and are waited for.
    """

    inner: dist.ProcessGroup
    outer: dist.ProcessGroup | None
    grid: list[list[int]]
    on_start: Callable[[str, Tensor], None]
    name_failures: Callable[[str, Tensor], Named]


def fully_shard(
    module: nn.Module,
    units: Sequence[tuple[nn.Module, ShardRanks]],
    ranks: ShardRanks,
    *,
    device: str,
    dim_of: Callable[[Parameter], int],
    ignored: Collection[Parameter],
    reduce_dtype: torch.dtype | None,
    keep_gathered: bool,
) -> ShardedModule:
    """Shards the parameters of `module` over `ranks`, except those of units and those `ignored`.

    Each unit is sharded over its own ranks. A unit inside another one comes before it.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as shard
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.tensor import Shard

    class NamedWork(dist.Work):
        """Work that torch waits for after the call has returned."""

        def __init__(self, work: dist.Work, named: Named) -> None:
            super().__init__()
            self._work, self._named = work, named

        def wait(self, *timeout: timedelta) -> bool:
            with self._named:
                return bool(self._work.wait(*timeout))

    class Allocating:
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

    class Gather(Allocating, AllGather):
        def __init__(self, over: ShardRanks) -> None:
            self._over = over

        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup,
            async_op: bool = False,
        ) -> dist.Work | None:
            self._over.on_start("all_gather", input_tensor)
            named = self._over.name_failures("all_gather", input_tensor)
            with named.for_launch() if async_op else named:
                work: dist.Work | None = _all_gather(
                    output_tensor, input_tensor, group=group, async_op=async_op
                )
            return None if work is None else NamedWork(work, named)

    class Scatter(Allocating, ReduceScatter):
        def __init__(self, over: ShardRanks) -> None:
            self._over = over

        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup,
            op: Any,
            async_op: bool = False,
        ) -> dist.Work | None:
            self._over.on_start("reduce_scatter", input_tensor)
            named = self._over.name_failures("reduce_scatter", input_tensor)
            with named.for_launch() if async_op else named:
                work: dist.Work | None = _reduce_scatter(
                    output_tensor, input_tensor, op, group=group, async_op=async_op
                )
            return None if work is None else NamedWork(work, named)

    def grid(over: ShardRanks) -> DeviceMesh:
        if over.outer is None:
            return DeviceMesh.from_group(over.inner, device, mesh_dim_names=("shard",))
        names = ("replicate", "shard")
        groups = [over.outer, over.inner]
        return DeviceMesh.from_group(groups, device, mesh=over.grid, mesh_dim_names=names)

    options: dict[str, Any] = {
        "shard_placement_fn": lambda parameter: Shard(dim_of(parameter)),
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False),
        "ignored_params": set(ignored),
    }
    with values_exist():  # a mesh computes with its ranks, also on an imagined device
        grids = {id(over): grid(over) for over in (*(over for _, over in units), ranks)}
    sharded: list[Any] = []
    for unit, over in (*units, (module, ranks)):
        drops = not keep_gathered and unit is not module
        each: Any = shard(unit, mesh=grids[id(over)], reshard_after_forward=drops, **options)
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)
        each.set_custom_all_gather(Gather(over))
        each.set_custom_reduce_scatter(Scatter(over))
        sharded.append(each)
    return ShardedModule(sharded)


@torch.no_grad()
def local_shard(t: Tensor) -> Tensor:
    """Returns this rank's shard of a `DTensor`, in the same memory; a plain tensor is whole."""
    part: Tensor = getattr(t, "_local_tensor", t)
    return part.detach()
