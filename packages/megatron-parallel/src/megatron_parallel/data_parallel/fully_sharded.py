"""Fully sharded data parallelism (ZeRO-3) through torch's `fully_shard`.

    sharded = FullySharded(model, blocks, collect_shardings(model), mesh)
    for number, batch in enumerate(micro_batches):
        sharded.begin(last=number == len(micro_batches) - 1)
        (losses(sharded.module, batch).sum() / true_tokens_of_all_ranks).backward()
    sharded.finish()
    ...update sharded.local_shards() with sharded.gradients()...
    sharded.zero()

A rank holds a box of every parameter, its gradient and its optimizer state. Each unit (a block) is
gathered before its forward and its backward pass and dropped after it. Parameters in no unit
(embeddings, output layer, last norm) are gathered once per pass. Gradients are *summed* over the
ranks, once a step: those of earlier micro-batches stay whole on each rank, accumulated in main
precision. With several instances (`ParallelLayout.dp_outer`) parameters are sharded over the ranks
of one instance, and gradients summed across instances: hybrid sharding, on torch's 2D mesh.

Experts are units of their own, sharded over the ranks that hold the same experts (`expert_dp`). If
that is one rank, it holds its experts whole, with gradients in `GradientBuffers`.

The sharding table gives the dim that is sharded, never one that only enumerates fused weights.
torch shards the first dim unevenly if necessary, others into equal shards only.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_parallel import _compat
from megatron_parallel.collectives.failure import raise_collective_errors
from megatron_parallel.data_parallel.bucket import PURPOSE, BucketCollective
from megatron_parallel.data_parallel.buffers import GradientBuffers, data_reduction_axes
from megatron_parallel.data_parallel.config import DEFAULT_CONFIG, DataParallelConfig
from megatron_parallel.data_parallel.finite import NonFiniteGradient
from megatron_parallel.data_parallel.plan import main_dtype
from megatron_parallel.data_parallel.reduction import AsyncCollectives, ReductionAxes
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.sharding.cut import Cut
from megatron_parallel.sharding.region import Region
from megatron_parallel.sharding.sharding import Box, Sharding
from megatron_parallel.sharding.views import View, box_views

GATHERED: Final = "parameters"
"""Purpose of the gathers of parameters, as reported in `Traffic`."""


class FullySharded:
    """One model chunk whose parameters are sharded over data-parallel ranks.

    Args:
        module: The chunk. Its parameters become torch's `DTensor`s under the same names.
        units: Submodules that are gathered one at a time, in forward order.
        table: Sharding of each parameter: the dim to shard, and the axes over which its gradient is
            also summed.
        mesh: The mesh of this rank.
        config: Whether units are resharded between their forward and backward pass, and the dtype
            of the gradient reduction.

    Attributes:
        module: Runs the chunk; pass it to a pipeline.

    Raises:
        LayoutError: The (inner) data-parallel axis has one rank, or a parameter cannot be sharded.
        CollectiveError: A rank of the axis does not take part within the mesh's time-out.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[nn.Module],
        table: Mapping[str, Sharding],
        mesh: Mesh,
        config: DataParallelConfig = DEFAULT_CONFIG,
    ) -> None:
        axes = data_reduction_axes(mesh)
        self._table = table
        self._mesh = mesh
        if axes.inner.size == 1:
            raise LayoutError(
                "fully sharded training needs at least 2 data parallel ranks in an instance, not "
                "1: add ranks or leave it out"
            )
        named = dict(module.named_parameters())
        _check_parameters(named, table)
        experts = {name for name in named if table[name].experts}
        expert_axes = ReductionAxes(mesh.axis("expert_dp")) if experts else axes
        self._axis_of = {n: (expert_axes if n in experts else axes).inner for n in named}
        whole = {name: tuple(parameter.shape) for name, parameter in named.items()}
        self._dims = {n: shard_dim(n, table[n], whole[n], self._axis_of[n].size) for n in named}
        dims = {id(parameter): self._dims[name] for name, parameter in named.items()}
        unsharded = {n: p for n, p in named.items() if self._axis_of[n].size == 1}
        self._unsharded = GradientBuffers(unsharded, table, mesh, config)
        dense_ranks, nested = _shard_ranks(axes, mesh), []
        if experts and not unsharded:
            expert_ranks = _shard_ranks(expert_axes, mesh)
            nested = [(part, expert_ranks) for part in _modules_of(module, experts)]
        # torch registers hooks on the outputs of the chunk, and warns if one is a view.
        module.register_forward_hook(lambda _, given, output: _own_memory(output))
        self._sharded = _compat.fully_shard(
            module,
            [*nested, *((unit, dense_ranks) for unit in units)],
            dense_ranks,
            device=mesh.device.type,
            dim_of=lambda parameter: dims[id(parameter)],
            ignored=unsharded.values(),
            reduce_dtype=None if config.low_precision else _reduce_dtype(named),
            keep_gathered=config.torch_fsdp2_no_reshard_after_forward,
        )
        self.module: nn.Module = _Wrapper(module)
        self._parameters: dict[str, Parameter] = dict(module.named_parameters())
        self._cuts = {name: self._cut(name, whole[name]) for name in named}
        self._reductions: list[BucketCollective] = []
        self._finished = False

    # -- a step --------------------------------------------------------------------------------

    def begin(self, *, last: bool = False) -> None:
        """Announces a backward pass. `last`: it is the last of the step and sums gradients."""
        if self._finished:
            raise LayoutError("begin() after finish(): call zero() to start the next step")
        self._sharded.set_gradient_sync(last)
        self._unsharded.begin(last=last)

    def finish(self) -> None:
        """Sums gradients that are partial over tensor-parallel ranks or tied over stages.

        The sums over data-parallel ranks are complete by then.
        """
        self.sum_partial()
        for name in sorted(self.tied):
            self.sum_over_stages(name)

    def sum_partial(self) -> None:
        """Sums gradients that are partial over tensor-parallel ranks: the first part of `finish`.

        `sum_over_stages` follows for each parameter in `tied`.
        """
        if self._finished:
            raise LayoutError("finish() was called twice: call zero() after the optimizer's step")
        names = [name for name in self._parameters if self._table[name].partial is not None]
        if names and self._mesh.axis("tp").size > 1:
            self._sum(names, "tp")
        self._unsharded.finish()
        self._finished = True

    @property
    def tied(self) -> list[str]:
        """Names of parameters that other pipeline ranks hold too."""
        return [name for name in self._parameters if self._tied_axis(name) is not None]

    def sum_over_stages(self, name: str) -> None:
        """Sums the gradient of a parameter in `tied` over the stages that hold it.

        All ranks sum such parameters in the same order.
        """
        axis = self._tied_axis(name)
        if axis is not None:
            self._sum([name], axis)

    def _tied_axis(self, name: str) -> str | None:
        axis = self._table[name].tied
        if axis is None or not self._mesh.has_axis(axis) or self._mesh.axis(axis).size == 1:
            return None
        return axis

    def gradients(self) -> dict[str, Float[Tensor, "..."]]:
        """Returns this rank's boxes of the summed gradients by global name.

        The gradient of a parameter that no backward pass reached is zero.
        """
        if not self._finished:
            raise LayoutError("the gradients are not summed yet: call finish() first")
        whole = self._unsharded.gradients()
        return {
            name: whole[name] if name in whole else self._gradient(name)
            for name in self.local_shards()
        }

    def nonfinite_gradients(self) -> list[NonFiniteGradient]:
        """Returns the gradients that are NaN or infinite after `finish`, in this rank's boxes."""
        return [
            NonFiniteGradient("fully sharded", name, bool(gradient.isnan().any()), None)
            for name, gradient in self.gradients().items()
            if not bool(gradient.isfinite().all())
        ]

    def zero(self) -> None:
        """Drops all gradients and starts the next step."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self._unsharded.zero()
        self._finished = False
        self._reductions = []

    def reductions(self) -> list[BucketCollective]:
        """Returns the collectives of `finish`; those of torch are recorded in `Traffic` only."""
        return [*self._reductions, *self._unsharded.reductions()]

    # -- parameters ----------------------------------------------------------------------------

    def local_shards(self) -> dict[str, Shaped[Tensor, "..."]]:
        """Returns this rank's boxes of the parameters that have a gradient, without empty boxes."""
        boxes = {
            name: _compat.local_shard(parameter)
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        }
        return {name: box for name, box in boxes.items() if box.numel()}

    def cuts(self) -> dict[str, Cut]:
        """Returns how the parameters lie on data-parallel ranks, without those on one rank."""
        return {
            name: cut
            for name, cut in self._cuts.items()
            if cut.axis.size > 1 and self._parameters[name].requires_grad
        }

    def regions(self) -> dict[str, Region]:
        """Returns this rank's box of each parameter with a gradient; none if it is empty."""
        return {
            name: Region(cut.axis, (cut.own,) if cut.own.numel else ())
            for name, cut in self._cuts.items()
            if self._parameters[name].requires_grad
        }

    def views(self, tensors: Mapping[str, Tensor], mesh: Mesh) -> dict[str, list[View]]:
        """Returns views, for a checkpoint, of tensors with the shapes of this rank's boxes."""
        found = {}
        for name in self._cuts.keys() & tensors.keys():
            sharding, offsets = self._table[name], self._cuts[name].own.offsets
            replica = sharding.replica(mesh, sharded=True)
            found[name] = box_views(tensors[name], offsets, sharding, mesh, replica)
        return found

    def all_local_shards(self) -> dict[str, Shaped[Tensor, "..."]]:
        """Returns this rank's boxes of all parameters, with or without a gradient."""
        self.wait_for_parameters()
        return {name: _compat.local_shard(p) for name, p in self._parameters.items()}

    def start_gather(self) -> None:
        """Does nothing: every forward pass gathers the parameters that it needs."""

    def wait_for_parameters(self) -> None:
        """Drops parameters that an evaluation left gathered, so that only the boxes remain."""
        self._sharded.reshard()

    # -- helpers -------------------------------------------------------------------------------

    @torch.no_grad()
    def _sum(self, names: Sequence[str], axis: str) -> None:
        """Sums this rank's boxes of several gradients over an axis, in one collective."""
        boxes = [self._gradient(name) for name in names]
        flat = torch.cat([box.flatten() for box in boxes])
        collectives = AsyncCollectives(PURPOSE, f"fully sharded gradients ({names[0]!r} ...)")
        started = collectives.all_reduce(flat, self._mesh.axis(axis))
        started.wait()
        totals = torch.split(flat, [box.numel() for box in boxes])
        for box, total in zip(boxes, totals, strict=True):
            box.copy_(total.view(box.shape))
        self._reductions.append(BucketCollective.of(started, names))

    def _gradient(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return _compat.local_shard(parameter.grad)

    def _cut(self, name: str, whole: tuple[int, ...]) -> Cut:
        """Returns how the tensor of the tensor-parallel rank is cut: like `torch.chunk`."""
        dim, axis = self._dims[name], self._axis_of[name]
        length, boxes = -(-whole[dim] // axis.size), []
        for index in range(axis.size):
            start = min(index * length, whole[dim])
            offsets = tuple(start if d == dim else 0 for d in range(len(whole)))
            size = min(length, whole[dim] - start)
            boxes.append(Box(offsets, (*whole[:dim], size, *whole[dim + 1 :])))
        cut = Cut(axis, whole, tuple(boxes))
        box = _compat.local_shard(self._parameters[name])
        if box.numel() and tuple(box.shape) != cut.own.lengths:
            raise LayoutError(
                f"torch sharded {name!r} {whole} into {tuple(box.shape)}, not {cut.own.lengths}: "
                "this version of torch is not supported"
            )
        return cut


class _Wrapper(nn.Module):
    """Wraps a sharded module, so that torch's schedules do not treat it as an `FSDPModule`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inside = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the wrapped module."""
        return self.inside(*args, **kwargs)


def _what(operation: str) -> str:
    return f"{operation} of {GATHERED if operation == 'all_gather' else PURPOSE}"


def _own_memory(output: Any) -> Any:
    if isinstance(output, tuple):
        items = [_own_memory(item) for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else tuple(items)
    return output.clone() if isinstance(output, Tensor) and output._is_view() else output


def shard_dim(name: str, sharding: Sharding, shape: tuple[int, ...], num_shards: int) -> int:
    """Returns the dim of a rank's tensor that is sharded over `num_shards` data-parallel ranks.

    That is the first dim that is not fused, if torch can shard it; otherwise another that
    `num_shards` divides.
    """
    if not shape:
        raise LayoutError(f"parameter {name!r} is a scalar and cannot be sharded: give it one dim")
    first = sharding.fully_shard_dim
    if first == 0 or shape[first] % num_shards == 0:
        return first
    for dim, size in enumerate(shape):
        if dim not in (0, sharding.fused_dim) and size % num_shards == 0:
            return dim
    raise LayoutError(
        f"parameter {name!r} of shape {shape} on a rank has no dim, other than that of fused "
        f"weights, that {num_shards} data parallel ranks divide: use a number that divides "
        f"{shape[first]}"
    )


def _check_parameters(named: Mapping[str, Parameter], table: Mapping[str, Sharding]) -> None:
    for name in named:
        if name not in table:
            raise LayoutError(f"parameter {name!r} is not in the sharding table")
        axis = table[name].partial
        if axis not in (None, "tp"):
            raise LayoutError(f"the gradient of {name!r} is partial over axis {axis!r}")


def _reduce_dtype(named: Mapping[str, Parameter]) -> torch.dtype | None:
    """Returns the main dtype, if it differs from that of a parameter."""
    wider = (main_dtype(p.dtype) for p in named.values() if p.dtype != main_dtype(p.dtype))
    return next(wider, None)


def _shard_ranks(axes: ReductionAxes, mesh: Mesh) -> _compat.ShardRanks:
    """Returns the ranks of data axes, with a row of the grid for each instance."""
    inner, outer = axes.inner, axes.outer
    ranks = inner.ranks if outer is None else mesh.axis("dp_cp").ranks
    return _compat.ShardRanks(
        inner.process_group,
        None if outer is None else outer.process_group,
        [list(ranks[i : i + inner.size]) for i in range(0, len(ranks), inner.size)],
        on_start=lambda operation, payload: inner.count(_what(operation), payload),
        name_failures=lambda operation, payload: raise_collective_errors(
            inner, _what(operation), payload
        ),
    )


def _modules_of(module: nn.Module, names: Collection[str]) -> Iterator[nn.Module]:
    """Yields the largest submodules that have only parameters of these names."""
    for prefix, part in module.named_children():
        own = {name.removeprefix(f"{prefix}.") for name in names if name.startswith(f"{prefix}.")}
        if own and own == {name for name, _ in part.named_parameters()}:
            yield part
        elif own:
            yield from _modules_of(part, own)
