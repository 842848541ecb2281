"""Plans buckets of flat storage for gradients, from shapes and dtypes alone.

Parameters are taken in backward order (last registered first), which is roughly the order in which
their gradients are computed. A bucket is closed when the next parameter would overfill it, so its
reduction can start while the backward pass continues.

    bucket 0  | output.weight ........................... |pad|
    bucket 1  | final_norm.bias | final_norm.weight | layers.1.mlp.down.bias | ... |pad|

The boundaries depend on the parameters and on the bucket size only. The number of ranks, and
whether a bucket is reduced whole or in one shard per rank, changes only the padding at its end.

An update rule that needs whole matrices uses buckets of another kind (`whole_matrices`): every
matrix lies in one shard of its bucket. The matrices of a bucket are assigned to shards, the largest
first, each to the least full shard; all shards are as long as the fullest one. Such a bucket takes
enough matrices to fill its shards evenly, so it may be larger than the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Final, NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor

from megatron_parallel.data_parallel.config import BUCKET_SIZE
from megatron_parallel.errors import LayoutError
from megatron_parallel.sharding.sharding import Sharding

ALIGNMENT: Final = 64
"""Every parameter, and every shard of a bucket, starts at a multiple of this many elements."""

_MAIN_DTYPES: Final = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


@dataclass(frozen=True)
class Slot:
    """The position of one parameter's gradient: elements `start <= i < stop` of its bucket."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """End of the slot."""
        return self.start + self.numel

    @property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return prod(self.shape)


class SlotRange(NamedTuple):
    """The range of a parameter that lies in one shard of its bucket.

    Attributes:
        name: Name of the parameter.
        start: First element, in the flattened parameter.
        stop: End, in the flattened parameter.
        offset: Where the range begins in the shard.
    """

    name: str
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class BucketPlan:
    """The slots of one bucket.

    Attributes:
        slots: Parameters in backward order.
        numel: Number of elements with padding, a multiple of `ALIGNMENT * num_shards`.
        num_shards: Number of shards of the bucket: the size of the axis.
        axis: Mesh axis over which the gradients are summed.
        partial: Axis over which they are summed after that, if they are partial (`Sharding`).
        tied: Axis of the pipeline ranks that share the bucket's weight (`Sharding`), if any.
        dtype: Dtype of the main gradients.
        parameter_dtype: Dtype of the parameters.
        device: Device of the parameters.
        whole: Whether each parameter lies in one shard.
    """

    slots: tuple[Slot, ...]
    numel: int
    num_shards: int
    axis: str
    partial: str | None
    tied: str | None
    dtype: torch.dtype
    parameter_dtype: torch.dtype
    device: torch.device
    whole: bool = False

    def shard_range(self, index: int) -> tuple[int, int]:
        """Returns start and end of a rank's shard. `index` is the rank's coordinate on the axis."""
        if not 0 <= index < self.num_shards:
            raise LayoutError(f"shard {index} does not exist: the bucket has {self.num_shards}")
        length = self.numel // self.num_shards
        return index * length, (index + 1) * length

    def shard_ranges(self, index: int) -> tuple[SlotRange, ...]:
        """Returns the range of each parameter that reaches into that rank's shard."""
        begin, end = self.shard_range(index)
        ranges = []
        for slot in self.slots:
            start, stop = max(slot.start, begin), min(slot.stop, end)
            if start < stop:
                ranges.append(
                    SlotRange(slot.name, start - slot.start, stop - slot.start, start - begin)
                )
        return tuple(ranges)

    def split_shard(
        self, shard: Shaped[Tensor, " n"], index: int
    ) -> dict[str, Shaped[Tensor, "..."]]:
        """Returns the tensors in the storage of that rank's shard, by parameter name.

        They are flat ranges of parameters, or in a bucket of whole parameters have their shapes.
        """
        found = {
            part.name: shard[part.offset : part.offset + part.stop - part.start]
            for part in self.shard_ranges(index)
        }
        if not self.whole:
            return found
        shapes = {slot.name: slot.shape for slot in self.slots}
        return {name: tensor.view(shapes[name]) for name, tensor in found.items()}


def main_dtype(dtype: torch.dtype, *, low_precision: bool = False) -> torch.dtype:
    """Returns the dtype in which gradients of `dtype` parameters are accumulated and reduced.

    float32 for bfloat16, float16 and float32; float64 for float64. With `low_precision`, bfloat16
    for bfloat16 and float16 for float16.
    """
    if low_precision and dtype in (torch.bfloat16, torch.float16):
        return dtype
    if dtype not in _MAIN_DTYPES:
        raise LayoutError(f"parameters of {dtype} have no gradients: use a floating-point dtype")
    return _MAIN_DTYPES[dtype]


def reduction_axis(sharding: Sharding) -> str:
    """Returns the mesh axis whose ranks hold the same parameter and see other samples."""
    return "expert_dp" if sharding.experts else "dp_cp"


def plan_buckets(
    parameters: Mapping[str, Tensor],
    table: Mapping[str, Sharding],
    num_shards: Mapping[str, int],
    bucket_size: int = BUCKET_SIZE,
    *,
    low_precision: bool = False,
    whole_matrices: bool = False,
) -> tuple[BucketPlan, ...]:
    """Returns buckets for `parameters`, in the order in which the backward pass completes them.

    A bucket holds gradients of parameters of one dtype, device and axis. Partial gradients have
    buckets of their own, so that few small collectives sum them over their axis. A parameter that
    is tied over pipeline stages has a bucket of its own, with equal shards on both stages.

    Args:
        parameters: In forward order; only their shapes, dtypes and devices are read.
        table: Their sharding.
        num_shards: Sizes of the axes `dp_cp` and `expert_dp`.
        bucket_size: Maximum number of elements of a bucket with more than one parameter.
        low_precision: Whether gradients of bf16 and fp16 parameters are accumulated in their dtype
            (`main_dtype`).
        whole_matrices: Whether matrices (`Sharding.hidden_matrix`) have buckets of their own, in
            which each matrix lies in one shard.

    Raises:
        LayoutError: A parameter has no sharding or no gradient, or the bucket size is below 1.
    """
    if bucket_size < 1:
        raise LayoutError(f"bucket size {bucket_size} is below 1: use 1 element or more")
    closed: list[tuple[int, BucketPlan]] = []  # with the index of the last parameter
    filling: dict[_Kind, _Filling] = {}

    def close(bucket: "_Filling") -> None:
        closed.append((bucket.index, bucket.plan(num_shards[bucket.kind.axis])))

    for index, (name, parameter) in enumerate(reversed(list(parameters.items()))):
        if name not in table:
            raise LayoutError(f"parameter {name!r} is not in the sharding table")
        sharding = table[name]
        kind = _Kind(
            axis=reduction_axis(sharding),
            partial=sharding.partial,
            tied=sharding.tied,
            dtype=main_dtype(parameter.dtype, low_precision=low_precision),
            parameter_dtype=parameter.dtype,
            device=parameter.device,
            whole=whole_matrices and sharding.hidden_matrix,
        )
        if kind.tied is not None:
            close(_Filling(kind).add(name, parameter, index))
            continue
        bucket = filling.get(kind)
        if bucket is not None and bucket.would_overflow(
            parameter, bucket_size, num_shards[kind.axis]
        ):
            close(bucket)
            bucket = None
        if bucket is None:
            bucket = filling[kind] = _Filling(kind)
        bucket.add(name, parameter, index)
    for bucket in filling.values():
        close(bucket)
    return tuple(plan for _, plan in sorted(closed, key=lambda pair: pair[0]))


class _Kind(NamedTuple):
    """The properties that all gradients of a bucket share; see `BucketPlan`."""

    axis: str
    partial: str | None
    tied: str | None
    dtype: torch.dtype
    parameter_dtype: torch.dtype
    device: torch.device
    whole: bool


class _Filling:
    """A bucket that is being filled."""

    def __init__(self, kind: _Kind) -> None:
        self.kind = kind
        self.slots: list[Slot] = []
        self.end = 0
        self.index = 0

    def add(self, name: str, parameter: Tensor, index: int) -> "_Filling":
        self.slots.append(Slot(name, tuple(parameter.shape), self.end))
        self.end = _aligned(self.slots[-1].stop, ALIGNMENT)
        self.index = index
        return self

    def would_overflow(self, parameter: Tensor, bucket_size: int, num_shards: int) -> bool:
        """Returns whether the bucket would exceed its size with the parameter."""
        if self.kind.whole:
            largest = max(parameter.numel(), *(slot.numel for slot in self.slots))
            bucket_size = num_shards * max(bucket_size, largest)
        return self.end + parameter.numel() > bucket_size

    def plan(self, num_shards: int) -> BucketPlan:
        slots, numel = tuple(self.slots), _aligned(self.end, ALIGNMENT * num_shards)
        if self.kind.whole:
            slots, numel = _assign_to_shards(slots, num_shards)
        return BucketPlan(slots, numel, num_shards, *self.kind)


def _assign_to_shards(slots: tuple[Slot, ...], num_shards: int) -> tuple[tuple[Slot, ...], int]:
    """Returns slots that each lie in one of `num_shards` equal shards, and the total elements.

    The largest slots are assigned first, each to the shortest shard. Elements measure the work as
    well as the memory: Newton-Schulz iterations take operations in proportion to elements times the
    smaller dim, which is the hidden size for almost all matrices of a model.
    """
    ends = [0] * num_shards
    shard_starts: dict[str, tuple[int, int]] = {}  # shard, and start in it
    for slot in sorted(slots, key=lambda slot: -slot.numel):
        shard = ends.index(min(ends))
        shard_starts[slot.name] = shard, ends[shard]
        ends[shard] = _aligned(ends[shard] + slot.numel, ALIGNMENT)
    length = max(ends)
    moved = (
        replace(s, start=shard_starts[s.name][0] * length + shard_starts[s.name][1]) for s in slots
    )
    return tuple(moved), length * num_shards


def _aligned(number: int, step: int) -> int:
    return -(-number // step) * step
