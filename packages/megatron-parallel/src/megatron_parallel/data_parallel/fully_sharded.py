"""Fully sharded data parallelism (ZeRO-3) through torch's `fully_shard`.

    sharded = FullySharded(model, blocks, collect_shardings(model), mesh)
    for number, batch in enumerate(micro_batches):
        sharded.begin(last=number == len(micro_batches) - 1)
        (losses(sharded.module, batch).sum() / true_tokens_of_all_ranks).backward()
    sharded.finish()
    ...update sharded.local_shards() by sharded.gradients()...
    sharded.zero()

A rank holds a box of every parameter, its gradient and its optimizer state. Each unit (a block) is
gathered before its forward and its backward pass and dropped after it; what is in no unit
(embeddings, output layer, last norm) is gathered once per pass. Gradients are *summed* over the
ranks, once a step: those of earlier micro-batches stay whole on each rank, added up in main
precision. With several instances (`ParallelLayout.dp_outer`) parameters are cut over the ranks of
one, and gradients summed across: hybrid sharding, on torch's mesh of two dims.

Which dim is cut, the sharding table says: never one that only enumerates fused weights. torch cuts
the first dim anywhere, others into equal parts only.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_parallel import _compat
from megatron_parallel.collectives.failure import raise_collective_errors
from megatron_parallel.data_parallel.bucket import PURPOSE, BucketCollective
from megatron_parallel.data_parallel.buffers import data_reduction_axes
from megatron_parallel.data_parallel.config import DEFAULT_CONFIG, DataParallelConfig
from megatron_parallel.data_parallel.finite import NonFiniteGradient
from megatron_parallel.data_parallel.plan import main_dtype
from megatron_parallel.data_parallel.reduction import AsyncCollectives, ReductionAxes
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.sharding.sharding import Sharding
from megatron_parallel.sharding.views import View, box_views

GATHERED: Final = "parameters"
"""What the messages of gathers are for, in `Traffic`."""


class FullySharded:
    """One stage whose parameters are cut over data-parallel ranks.

    Args:
        module: The stage; its parameters become torch's `DTensor`s under the names they had.
        units: Modules of it that are gathered one at a time, in forward order.
        table: Says where each parameter may be cut, and how its gradient is summed further.
        mesh: Where this rank stands.
        config: Whether units are dropped between their forward and backward pass.

    Attributes:
        module: Runs the stage; what a pipeline is given.

    Raises:
        LayoutError: There is nobody to cut over, or a parameter cannot be cut.
        CollectiveError: Within the mesh's time-out, if a rank of the axis does not take part.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[nn.Module],
        table: Mapping[str, Sharding],
        mesh: Mesh,
        config: DataParallelConfig = DEFAULT_CONFIG,
    ) -> None:
        self._route = data_reduction_axes(mesh)
        self._table = table
        self._mesh = mesh
        parts = self._route.inner.size
        if parts == 1:
            raise LayoutError(
                "fully sharded training needs at least 2 data parallel ranks in an instance, and "
                "there is 1: it has nobody to share parameters with"
            )
        named = dict(module.named_parameters())
        _require_known(named, table, mesh)
        whole = {name: tuple(parameter.shape) for name, parameter in named.items()}
        self._dims = {name: cut_dim(name, table[name], whole[name], parts) for name in named}
        dims = {id(parameter): self._dims[name] for name, parameter in named.items()}
        # torch hangs its hooks on what the stage returns, and warns if that is a view.
        module.register_forward_hook(lambda _, given, output: _own_memory(output))
        self._sharded = _compat.fully_shard(
            module,
            units,
            inner=self._route.inner.process_group,
            outer=None if self._route.outer is None else self._route.outer.process_group,
            ranks=_grid(self._route, mesh),
            device=mesh.device.type,
            dim_of=lambda parameter: dims[id(parameter)],
            reduce_dtype=None if config.low_precision else _reduce_dtype(named),
            keep_gathered=config.torch_fsdp2_no_reshard_after_forward,
            on_start=lambda operation, payload: self._route.inner.count(_what(operation), payload),
            name_failures=lambda operation, payload: raise_collective_errors(
                self._route.inner, _what(operation), payload
            ),
        )
        self.module: nn.Module = _Wrapper(module)
        self._parameters: dict[str, Parameter] = dict(module.named_parameters())
        self._offsets = {name: self._offset(name, whole[name]) for name in named}
        self._reductions: list[BucketCollective] = []
        self._finished = False

    # -- a step --------------------------------------------------------------------------------

    def begin(self, *, last: bool = False) -> None:
        """Announces a backward pass; `last`: no other one follows, so gradients may be summed."""
        if self._finished:
            raise LayoutError("begin() after finish(): call zero() to start the next step")
        self._sharded.set_gradient_sync(last)

    def finish(self) -> None:
        """Sums what is partial over tensor ranks, and tied over stages; data ranks have summed."""
        if self._finished:
            raise LayoutError("finish() was called twice: call zero() after the optimizer's step")
        for axis in ("tp", "embedding"):
            names = [name for name in self._parameters if axis in _extra_axes(self._table[name])]
            if names and self._mesh.has_axis(axis) and self._mesh.axis(axis).size > 1:
                self._sum(names, axis)
        self._finished = True

    def gradients(self) -> dict[str, Float[Tensor, "..."]]:
        """This rank's boxes of the summed gradients by global name; zero where there is none."""
        if not self._finished:
            raise LayoutError("the gradients are not summed yet: call finish() first")
        return {name: self._gradient(name) for name in self.local_shards()}

    def nonfinite_gradients(self) -> list[NonFiniteGradient]:
        """Returns which gradients are NaN or infinite after `finish`, on this rank's boxes."""
        return [
            NonFiniteGradient("fully sharded", name, bool(gradient.isnan().any()), None)
            for name, gradient in self.gradients().items()
            if not bool(gradient.isfinite().all())
        ]

    def zero(self) -> None:
        """Drops all gradients and starts the next step."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self._finished = False
        self._reductions = []

    def reductions(self) -> list[BucketCollective]:
        """Returns what `finish` has summed; torch's own sums are in `Traffic` alone."""
        return list(self._reductions)

    # -- parameters ----------------------------------------------------------------------------

    def local_shards(self) -> dict[str, Shaped[Tensor, "..."]]:
        """This rank's boxes of the parameters that have a gradient; empty ones are left out."""
        boxes = {
            name: _compat.local_part(parameter)
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        }
        return {name: box for name, box in boxes.items() if box.numel()}

    def views(self, tensors: Mapping[str, Tensor], mesh: Mesh) -> dict[str, list[View]]:
        """Views, for a checkpoint, of tensors shaped like this rank's boxes."""
        found = {}
        for name in self._offsets.keys() & tensors.keys():
            sharding = self._table[name]
            replica = sharding.replica(mesh, sharded=True)
            found[name] = box_views(tensors[name], self._offsets[name], sharding, mesh, replica)
        return found

    def all_local_shards(self) -> dict[str, Shaped[Tensor, "..."]]:
        """This rank's boxes of all parameters, those without a gradient too."""
        self.wait_for_parameters()
        return {name: _compat.local_part(p) for name, p in self._parameters.items()}

    def start_gather(self) -> None:
        """Nothing: every forward pass gathers what it needs."""

    def wait_for_parameters(self) -> None:
        """Drops what an evaluation has left gathered, so that boxes are all there is."""
        self._sharded.reshard()

    # -- parts of a step -----------------------------------------------------------------------

    @torch.no_grad()
    def _sum(self, names: Sequence[str], axis: str) -> None:
        """Sums this rank's boxes of several gradients over an axis, in one message."""
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
        return _compat.local_part(parameter.grad)

    def _offset(self, name: str, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Where this rank's box begins in this rank's whole tensor, which torch cut by `chunk`."""
        dim, axis = self._dims[name], self._route.inner
        length = -(-whole[dim] // axis.size)
        start = min(axis.index * length, whole[dim])
        expected = (*whole[:dim], min(length, whole[dim] - start), *whole[dim + 1 :])
        box = _compat.local_part(self._parameters[name])
        if box.numel() and tuple(box.shape) != expected:
            raise LayoutError(
                f"torch cut {name!r} {whole} into {tuple(box.shape)}, not {expected}: this "
                "version of torch shards in another way than known"
            )
        return tuple(start if d == dim else 0 for d in range(len(whole)))


class _Wrapper(nn.Module):
    """Around a sharded module, for whoever would treat it otherwise than a plain one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inside = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module inside."""
        return self.inside(*args, **kwargs)


def _what(operation: str) -> str:
    return f"{operation} of {GATHERED if operation == 'all_gather' else PURPOSE}"


def _own_memory(output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(_own_memory(item) for item in output)
    return output.clone() if isinstance(output, Tensor) and output._is_view() else output


def cut_dim(name: str, sharding: Sharding, shape: tuple[int, ...], parts: int) -> int:
    """Returns the dim of a rank's tensor that is cut over `parts` data-parallel ranks.

    The first that is not fused, if torch can cut it there; else another that divides evenly.
    """
    if not shape:
        raise LayoutError(f"parameter {name!r} is a scalar, which cannot be cut: give it one dim")
    first = sharding.fully_shard_dim
    if first == 0 or shape[first] % parts == 0:
        return first
    for dim, size in enumerate(shape):
        if dim not in (0, sharding.fused_dim) and size % parts == 0:
            return dim
    raise LayoutError(
        f"parameter {name!r} of shape {shape} on a rank cannot be cut into {parts} equal parts, "
        "except where weights are fused: use a number of data parallel ranks that divides "
        f"{shape[first]}"
    )


def _require_known(
    named: Mapping[str, Parameter], table: Mapping[str, Sharding], mesh: Mesh
) -> None:
    for name in named:
        if name not in table:
            raise LayoutError(f"parameter {name!r} is not in the sharding table")
        if table[name].experts and mesh.layout.has_expert_parallelism:
            raise LayoutError(
                f"{name!r} belongs to experts, which are not copied on every data parallel rank "
                f"({mesh.layout}): fully sharded training cannot cut them"
            )
        unknown = set(_extra_axes(table[name])) - {"tp", "embedding"}
        if unknown:
            raise LayoutError(f"the gradient of {name!r} is partial over axis {unknown.pop()!r}")


def _extra_axes(sharding: Sharding) -> tuple[str, ...]:
    """Axes over which a gradient is summed after the data axis."""
    partial = () if sharding.partial is None else (sharding.partial,)
    return (*partial, "embedding") if sharding.tied else partial


def _reduce_dtype(named: Mapping[str, Parameter]) -> torch.dtype | None:
    """Main precision, where it is another than the parameters' own."""
    wider = (main_dtype(p.dtype) for p in named.values() if p.dtype != main_dtype(p.dtype))
    return next(wider, None)


def _grid(axes: ReductionAxes, mesh: Mesh) -> list[list[int]]:
    """Global ranks of this rank's data-parallel group: a row for each instance."""
    ranks = mesh.axis("dp_cp").ranks
    size = axes.inner.size
    return [list(ranks[i : i + size]) for i in range(0, len(ranks), size)]
