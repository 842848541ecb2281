"""Sums of gradients: over near and far ranks, in each precision, and checks for finite values."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron_parallel import (
    DataParallelConfig,
    GradientBuffers,
    LayoutError,
    Mesh,
    ParallelLayout,
    Sharding,
)
from megatron_parallel.data_parallel import describe_nonfinite_gradients
from megatron_parallel.data_parallel.reduction import (
    AsyncCollectives,
    ReductionAxes,
    all_reduce_bucket,
    reduce_scatter_bucket,
)
from megatron_parallel.data_parallel.reduction import reduce_in_bf16 as in_bf16
from megatron_parallel.mesh.axes import Axis
from megatron_parallel.testing import WorkerPool
from torch import Tensor, nn

NAMES = "abc"


def summed(mesh: Mesh, config: DataParallelConfig, own: dict[str, Tensor]) -> GradientBuffers:
    """Returns buffers after a step in which each rank's gradients are `own`."""
    weights = {name: nn.Parameter(torch.zeros_like(value)) for name, value in own.items()}
    table = {name: Sharding(tuple(value.shape)) for name, value in own.items()}
    buffers = GradientBuffers(weights, table, mesh, config)
    buffers.begin(last=True)
    sum((weights[name] * value).sum() for name, value in own.items()).backward()
    buffers.finish()
    return buffers


@pytest.mark.parametrize("sharded", [False, True])
def test_instances_sum_inside_then_across(worker_pool: WorkerPool, sharded: bool) -> None:
    def step(mesh: Mesh) -> tuple[bool, dict[tuple[str, str], int]]:
        config = DataParallelConfig(use_distributed_optimizer=sharded, ddp_bucket_size=1)
        own = {n: torch.full((128,), 10.0**mesh.rank, dtype=torch.float64) for n in NAMES}
        with mesh.counting() as traffic:
            buffers = summed(mesh, config, own)
        right = all(bool((g == 1111.0).all()) for g in buffers.gradients().values())
        return right, {(r.axis, r.operation): r.nbytes for r in traffic.records}

    whole, gradients = 3 * 128 * 8, "of gradients"
    expected = {
        ("dp_cp_inner", f"reduce_scatter {gradients}"): whole,
        ("dp_cp_outer", f"all_reduce {gradients}"): whole // 2,
    }
    if not sharded:
        expected["dp_cp_inner", f"all_gather {gradients}"] = whole // 2
    for right, traffic in worker_pool.run_mesh(ParallelLayout(dp=4, dp_outer=2), step):
        assert right and traffic == expected


def test_instances_divide_all_ranks_evenly() -> None:
    layout = ParallelLayout(tp=2, dp=4, dp_outer=2)
    assert layout.groups("dp_cp_inner") == [(0, 2), (4, 6), (1, 3), (5, 7)]
    assert layout.groups("dp_cp_outer") == [(0, 4), (2, 6), (1, 5), (3, 7)]
    assert "dp_cp_outer" not in ParallelLayout(dp=4).group_names
    with pytest.raises(LayoutError, match="dp_outer=3 does not divide dp 4 x cp 1"):
        ParallelLayout(dp=4, dp_outer=3)


IN_BF16 = DataParallelConfig(accumulate_allreduce_grads_in_fp32=False)


@dataclass(frozen=True)
class InBf16:
    """A rank's result after gradients were sent in bf16: element `i` of all of them."""

    errors: Tensor  # against the sum in float64
    sizes: Tensor  # sum of the absolute values
    dtype: torch.dtype
    traffic: dict[tuple[str, str], int]


def reduce_in_bf16(mesh: Mesh, built: bool, **settings: bool) -> InBf16:
    """Sums random values over all ranks, or 256 on one rank and 1 on the others."""
    config = DataParallelConfig(
        accumulate_allreduce_grads_in_fp32=False, ddp_bucket_size=1, **settings
    )
    ranks, length = mesh.layout.dp, 4096
    if built:
        every = torch.ones(ranks, length)
        every[torch.arange(length) % ranks, torch.arange(length)] = 256
    else:
        every = torch.randn(ranks, length, generator=torch.Generator().manual_seed(3))
    every = every.bfloat16()
    with mesh.counting() as traffic:
        buffers = summed(mesh, config, {"w": every[mesh.rank]})
    (bucket,) = buffers.buckets
    begin = next(part.start for part in bucket.plan.shard_ranges(bucket.axes.inner.index))
    found = buffers.gradients()["w"]
    own = every.double()[:, begin : begin + len(found)] if bucket.sharded else every.double()
    return InBf16(
        errors=(found.double() - own.sum(0)).abs(),
        sizes=own.abs().sum(0),
        dtype=found.dtype,
        traffic={(r.axis, r.operation.split()[0]): r.nbytes for r in traffic.records},
    )


UNIT = 2.0**-8
"""Half of the distance from 1 to the next bf16 number."""


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bf16_gradients_added_up_in_fp32_are_nearer_to_the_float64_sum(
    worker_pool: WorkerPool, ranks: int, sharded: bool
) -> None:
    """256 + 1 + 1 + 1: bf16 has 8 bits, so an addition in it may lose the 1."""

    def found(built: bool, fp32: bool) -> list[InBf16]:
        settings = {
            "use_distributed_optimizer": sharded,
            "ddp_reduce_scatter_with_fp32_accumulation": fp32,
        }
        layout = ParallelLayout(dp=ranks)
        return worker_pool.run_mesh(layout, partial(reduce_in_bf16, built=built, **settings))

    for built in (False, True):
        exact, rough = found(built, True), found(built, False)
        for one in exact:  # bf16 values are sent exactly: only whole sums are rounded, once
            limit = (0 if sharded else UNIT) + ranks * 2.0**-24
            assert one.dtype == torch.float32 and bool((one.errors <= limit * one.sizes).all())
        for one in rough:
            assert one.dtype == torch.bfloat16
            assert bool((one.errors <= ((1 + UNIT) ** (ranks - 1) - 1) * one.sizes).all())
        better = [torch.cat([one.errors for one in all_]).mean() for all_ in (exact, rough)]
        if sharded or ranks > 2:  # of two numbers, both round their sum once
            assert better[0] < better[1]
        else:
            assert better[0] == better[1]
    whole = 4096 * 2
    if sharded:
        assert exact[0].traffic == {("dp", "all_to_all"): whole}
        assert rough[0].traffic == {("dp", "reduce_scatter"): whole}
    else:  # as many bytes are sent as in an all-reduce: 2 (n - 1) / n of the gradient
        gathered = whole // ranks
        assert exact[0].traffic == {("dp", "all_to_all"): whole, ("dp", "all_gather"): gathered}
        assert rough[0].traffic == {("dp", "all_reduce"): whole}


@pytest.mark.parametrize("sharded", [False, True])
def test_bf16_on_the_wire_inside_an_instance_fp32_between_them(
    worker_pool: WorkerPool, sharded: bool
) -> None:
    step = partial(
        reduce_in_bf16,
        built=True,
        use_distributed_optimizer=sharded,
        ddp_reduce_scatter_with_fp32_accumulation=True,
    )
    for one in worker_pool.run_mesh(ParallelLayout(dp=4, dp_outer=2), step):
        assert bool((one.errors <= (0 if sharded else UNIT) * one.sizes).all())
        wire = {
            ("dp_cp_inner", "all_to_all"): 4096 * 2,
            ("dp_cp_outer", "all_reduce"): 4096 // 2 * 4,
        }
        if not sharded:
            wire["dp_cp_inner", "all_gather"] = 4096 // 2 * 2
        assert one.traffic == wire


def test_gradients_are_accumulated_in_bf16_only_on_request(single: Mesh) -> None:
    def added(config: DataParallelConfig) -> float:
        weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        buffers = GradientBuffers({"w": weight}, {"w": Sharding((1,))}, single, config)
        for value in (256.0, 1.0, 1.0, 1.0):
            buffers.begin()
            (weight * value).sum().backward()
        buffers.finish()
        return buffers.gradients()["w"].item()

    assert added(DataParallelConfig()) == 259.0
    assert added(IN_BF16) == 256.0
    # One rank sends nothing, so nothing is rounded.
    sent = replace(IN_BF16, ddp_reduce_scatter_with_fp32_accumulation=True)
    assert added(sent) == 259.0
    with pytest.raises(LayoutError, match="add --grad-reduce-in-bf16"):
        DataParallelConfig(ddp_reduce_scatter_with_fp32_accumulation=True)


def reported_line(mesh: Mesh, value: float, *, sharded: bool, one_bucket: bool = False) -> str:
    """Returns the line about a gradient of which rank 1 has one element that is not finite."""
    own = {name: torch.ones(100, dtype=torch.float64) for name in NAMES}
    if mesh.rank == 1:
        own["b"][99] = value
    config = DataParallelConfig(use_distributed_optimizer=sharded, ddp_bucket_size=1)
    buffers = summed(mesh, config, own)
    if one_bucket:
        with patch.object(buffers, "buckets", buffers.buckets[:1]):
            return describe_nonfinite_gradients(buffers.nonfinite_gradients(), mesh)
    return describe_nonfinite_gradients(buffers.nonfinite_gradients(), mesh)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("value", "word"), [(math.nan, "NaN"), (-math.inf, "infinite")])
def test_gradients_that_are_not_finite_have_the_same_line_on_all_ranks(
    worker_pool: WorkerPool, value: float, word: str, sharded: bool
) -> None:
    def step(mesh: Mesh) -> str:
        pickled = dict.fromkeys(("_object_to_tensor", "_tensor_to_object"))  # None: no pickles
        with patch.multiple("torch.distributed.distributed_c10d", **pickled):
            return reported_line(mesh, value, sharded=sharded)

    line = (
        f"the gradient of 'b' (bucket 2 of 3) is {word}, and so it was on rank 1 before it was "
        "summed"
    )
    assert worker_pool.run_mesh(ParallelLayout(dp=2, pp=2), step) == [line] * 4


def test_finite_gradients_are_not_reported(worker_pool: WorkerPool) -> None:
    def step(mesh: Mesh) -> str:
        return reported_line(mesh, 1e300, sharded=True)

    assert worker_pool.run_mesh(ParallelLayout(dp=2), step) == ["", ""]


def test_a_check_of_one_bucket_only_shows(worker_pool: WorkerPool) -> None:
    def step(mesh: Mesh) -> str:
        return reported_line(mesh, math.nan, sharded=False, one_bucket=True)

    assert worker_pool.run_mesh(ParallelLayout(dp=2), step) == ["", ""]


def test_gradients_that_nothing_is_added_to_are_read_only_if_the_sum_is_not_finite(
    worker_pool: WorkerPool,
) -> None:
    def step(mesh: Mesh) -> tuple[bool, str]:
        own = {name: torch.ones(100, dtype=torch.bfloat16) for name in NAMES}
        if mesh.rank == 1:
            own["b"][99] = math.nan
        buffers = summed(mesh, DataParallelConfig(ddp_bucket_size=1), own)
        line = describe_nonfinite_gradients(buffers.nonfinite_gradients(), mesh)
        return all(bucket.overwritten is None for bucket in buffers.buckets), line

    line = "the gradient of 'b' (bucket 2 of 3) is NaN"
    on_one = f"{line}, and so it was on rank 1 before it was summed"
    assert worker_pool.run_mesh(ParallelLayout(dp=1, pp=2), step) == [(True, on_one)] * 2


class Recorder(AsyncCollectives):
    """Records collectives in place of starting them."""

    calls: list[str]

    def __getattribute__(self, name: str) -> Any:
        def call(*operands: Any) -> None:
            sizes = " ".join(str(t.numel()) for t in operands[:-1])
            self.calls.append(f"{name} {operands[-1].name} of {sizes}")

        is_collective = name.startswith(("all_", "reduce_"))
        return call if is_collective else super().__getattribute__(name)


def reductions_of(inner: int, outer: int | None) -> dict[str, list[str]]:
    """Returns the collectives of each kind of reduction of 8 gradients."""
    near = Axis("near", tuple(range(inner)), 0, None, inner)
    far = None if outer is None else Axis("far", tuple(range(outer)), 0, None, outer)
    axes, found = ReductionAxes(near, far), {}
    assert axes.size == inner * (outer or 1)
    for name, act in (
        ("whole", all_reduce_bucket),
        ("shard", reduce_scatter_bucket),
        ("bf16", partial(in_bf16, whole=True)),
        ("bf16 shard", partial(in_bf16, whole=False)),
    ):
        flat, recorder = torch.arange(8.0) + 2.0**-12, Recorder("gradients", "gradients")
        recorder.calls = []
        before = flat.clone()
        list(act(flat, flat[: 8 // inner], axes, recorder))
        found[name] = recorder.calls
        if inner == 1:  # nothing is sent between near ranks, so nothing is rounded
            assert torch.equal(flat, before)
    return found


def test_only_axes_of_several_ranks_have_messages() -> None:
    none: list[str] = []
    assert reductions_of(1, None) == dict.fromkeys(("whole", "shard", "bf16", "bf16 shard"), none)
    far = ["all_reduce far of 8"]
    assert reductions_of(1, 2) == dict.fromkeys(("whole", "shard", "bf16", "bf16 shard"), far)
    assert reductions_of(2, None) == {
        "whole": ["all_reduce near of 8"],
        "shard": ["reduce_scatter near of 4 8"],
        "bf16": ["all_to_all near of 8 8", "all_gather near of 8 4"],
        "bf16 shard": ["all_to_all near of 8 8"],
    }
    far = ["all_reduce far of 2"]
    assert reductions_of(4, 3) == {
        "whole": ["reduce_scatter near of 2 8", *far, "all_gather near of 8 2"],
        "shard": ["reduce_scatter near of 2 8", *far],
        "bf16": ["all_to_all near of 8 8", *far, "all_gather near of 8 2"],
        "bf16 shard": ["all_to_all near of 8 8", *far],
    }
