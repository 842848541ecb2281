"""Data parallelism without other ranks: dims that are sharded, refused calls, and waits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron_parallel import (
    DataParallelConfig,
    GradientBuffers,
    LayoutError,
    Mesh,
    ParallelLayout,
    ParameterBuffers,
    Sharding,
    TrainableParameters,
)
from megatron_parallel.data_parallel.buffers import data_reduction_axes
from megatron_parallel.data_parallel.fully_sharded import shard_dim
from megatron_parallel.data_parallel.plan import plan_buckets
from megatron_parallel.sharding import Box
from torch import nn

from .test_parameter_buffers import (
    LAYERS,
    OVERLAPPED,
    SHARDED,
    WIDTH,
    Layer,
    played,
    slow_collectives,
    two_steps,
)


@pytest.mark.parametrize(
    ("sharding", "shape", "ranks", "dim"),
    [
        (Sharding((3, 4)), (3, 4), 2, 0),  # the first dim may be cut unevenly
        (Sharding((5,)), (5,), 4, 0),
        (Sharding((2, 6, 4), fused_dim=0), (2, 6, 4), 3, 1),
        (Sharding((2, 6, 4), fused_dim=0), (2, 6, 4), 4, 2),
        (Sharding((4, 6, 8), experts=True), (4, 6, 8), 4, 2),
        (Sharding((4, 2, 6, 8), fused_dim=1, experts=True), (2, 2, 6, 8), 8, 3),
    ],
)
def test_the_first_dim_that_can_be_cut_is_sharded(
    sharding: Sharding, shape: tuple[int, ...], ranks: int, dim: int
) -> None:
    assert shard_dim("w", sharding, shape, ranks) == dim


def test_parameters_without_such_a_dim_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"^parameter 'w' is a scalar .*: give it one dim$"):
        shard_dim("w", Sharding(()), (), 2)
    with pytest.raises(LayoutError, match=r"that 4 data parallel ranks divide: .* divides 6$"):
        shard_dim("w", Sharding((2, 6, 5), fused_dim=0), (2, 6, 5), 4)
    with pytest.raises(LayoutError, match=r"shape \(8, 6\) on a rank has no dim"):
        shard_dim("w", Sharding((8, 6), experts=True), (8, 6), 4)


def test_gradients_are_summed_over_all_ranks_with_other_tokens() -> None:
    for layout, names, size in (
        (ParallelLayout(dp=4, tp=2), ("dp", None), 4),
        (ParallelLayout(dp=2, cp=2), ("dp_cp", None), 4),
        (ParallelLayout(dp=6, dp_outer=2), ("dp_cp_inner", "dp_cp_outer"), 6),
        (ParallelLayout(dp=2, cp=2, dp_outer=2), ("dp_cp_inner", "dp_cp_outer"), 4),
        (ParallelLayout(dp=1), ("dp", None), 1),
    ):
        axes = data_reduction_axes(Mesh(layout, 0))
        found = axes.inner.name, None if axes.outer is None else axes.outer.name
        assert (found, axes.size) == (names, size)


def test_buckets_have_the_dtype_of_their_gradients() -> None:
    weights = {"a": torch.empty(8, dtype=torch.bfloat16), "b": torch.empty(8)}
    table = dict.fromkeys(weights, Sharding((8,)))
    for low, dtypes in ((True, (torch.float32, torch.bfloat16)), (False, (torch.float32,) * 2)):
        plans = plan_buckets(weights, table, {"dp_cp": 1}, low_precision=low)
        assert tuple(plan.dtype for plan in plans) == dtypes


@pytest.mark.parametrize("sharded", [False, True])
def test_gloo_may_overwrite_the_whole_bucket(sharded: bool) -> None:
    mesh = Mesh(ParallelLayout(dp=2), 1, groups={(0, 1): object()})  # type: ignore[dict-item]
    config = DataParallelConfig(use_distributed_optimizer=sharded)
    weights, table = {"w": nn.Parameter(torch.ones(70))}, {"w": Sharding((70,))}
    (bucket,) = GradientBuffers(weights, table, mesh, config).buckets
    assert bucket.flat is not None and bucket.shard is not None
    assert (len(bucket.flat), len(bucket.shard)) == (128, 64)
    assert bucket.shard.data_ptr() == bucket.flat[64:].data_ptr()
    assert bucket.overwritten is bucket.flat


CALLS = {
    "begin()": lambda buffers: buffers.begin(),
    "collect_gradients()": lambda buffers: buffers.collect_gradients(),
    "weight_backward()": lambda buffers: buffers.weight_backward().__enter__(),
    "start_reductions()": lambda buffers: buffers.start_reductions(),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_after_the_last_pass_are_refused(single: Mesh, call: str) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    buffers = GradientBuffers({"w": weight}, {"w": Sharding((2,))}, single)
    buffers.begin()
    weight.sum().backward()
    buffers.start_reductions()
    with pytest.raises(LayoutError) as caught:
        CALLS[call](buffers)
    assert str(caught.value) == (
        f"{call} after begin(last=True) or start_reductions(): call finish() first"
    )
    buffers.finish()
    with pytest.raises(LayoutError) as caught:
        CALLS[call](buffers)
    assert str(caught.value) == f"{call} after finish(): call zero() to start the next step"
    buffers.zero()
    CALLS[call](buffers)


def test_gradients_of_others_are_theirs_to_drop(single: Mesh) -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    summed = {"w": torch.full((2,), 3.0)}
    table = {"w": Sharding((2,))}
    trainable = TrainableParameters([("w", weight)], table, single, gradients=lambda: summed)
    assert trainable.gradients() is summed
    trainable.zero()
    assert weight.grad is not None and trainable.mesh is single and trainable.table is table


def test_without_overlap_sums_start_after_the_backward_pass() -> None:
    config = DataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=False, ddp_bucket_size=1
    )
    model, buffers, shards, events = played(config)
    with slow_collectives(model, events):
        two_steps(model, buffers, shards)
    for start in (i for i, event in enumerate(events) if event.startswith("starts sum")):
        before = [event for event in events[:start] if event.startswith("backward")]
        assert len(before) % LAYERS == 0


def unit_of_two(events: list[str]) -> tuple[nn.Sequential, Any]:
    """Returns a model on rank 0 of 2 whose middle layers are a unit, and its shards."""
    names = ("first", "one", "two", "last")
    first, one, two, last = (Layer(name, events) for name in names)
    model = nn.Sequential(first, nn.Sequential(one, two), last)
    mesh = Mesh(ParallelLayout(dp=2), 0, groups={(0, 1): object()})  # type: ignore[dict-item]
    table = {name: Sharding((WIDTH, WIDTH)) for name, _ in model.named_parameters()}
    buffers = GradientBuffers(model.named_parameters(), table, mesh, OVERLAPPED)
    return model, ParameterBuffers(model, buffers, table, [model[1]])


def test_a_unit_waits_for_all_weights_below_it() -> None:
    events: list[str] = []
    model, shards = unit_of_two(events)
    with slow_collectives(model, events):
        shards.start_gather()
        del events[:]
        assert model(torch.ones(1, WIDTH, dtype=torch.float64)).isfinite().all()
    assert events == [
        *("has weights 0.weight", "forward first"),
        *("has weights 1.0.weight", "has weights 1.1.weight", "forward one", "forward two"),
        *("has weights 2.weight", "forward last"),
    ]
    assert [gather.parameters for gather in shards.gathers()] == [
        (f"{name}.weight",) for name in ("0", "1.0", "1.1", "2")
    ]


def test_closing_waits_for_gathers_and_removes_the_hooks() -> None:
    events: list[str] = []
    model, shards = unit_of_two(events)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    assert hooks == [0, 1, 1, 0, 0, 1]  # the model, its first layer, the unit and its layers, ...
    with slow_collectives(model, events):
        shards.start_gather()
        shards.close()
    assert sum(event.startswith("has weights") for event in events) == 4
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_regions_are_the_ranges_that_a_rank_updates() -> None:
    weights = {"a": nn.Parameter(torch.ones(4, 16)), "b": nn.Parameter(torch.ones(8, 16))}
    table = {name: Sharding(tuple(p.shape)) for name, p in weights.items()}
    config = DataParallelConfig(use_distributed_optimizer=True)
    found = []
    for rank in range(3):
        mesh = Mesh(ParallelLayout(dp=3), rank)
        buffers = GradientBuffers(weights, table, mesh, config)
        shards = ParameterBuffers(nn.ParameterDict(weights), buffers, table)
        assert shards.cuts() == {}
        found.append({name: region.boxes for name, region in shards.regions().items()})
    # b comes first: its 128 elements fill the shards of 64 of ranks 0 and 1.
    assert found == [
        {"b": (Box((0, 0), (4, 16)),), "a": ()},
        {"b": (Box((4, 0), (4, 16)),), "a": ()},
        {"b": (), "a": (Box((0, 0), (4, 16)),)},
    ]


def test_layers_that_share_a_bucket_do_not_count_it_twice() -> None:
    model, _, shards, events = played(replace(OVERLAPPED, ddp_bucket_size=2 * WIDTH**2))
    with slow_collectives(model, events):
        shards.start_gather()
        assert model(torch.ones(1, WIDTH, dtype=torch.float64)).isfinite().all()
    assert len(shards.buckets) == 2
    assert [event for event in events if not event.startswith("starts")] == [
        *("has weights 0.weight", "forward 0.weight", "forward 1.weight"),
        *("has weights 2.weight", "forward 2.weight", "forward 3.weight"),
    ]


def test_a_gather_waits_for_the_one_before_of_its_bucket() -> None:
    model, _, shards, events = played(OVERLAPPED)
    with slow_collectives(model, events):
        shards.start_gather()
        assert events == [f"starts weights {n}.weight" for n in range(LAYERS)]
        events.clear()
        shards.start_gather()
        shards.wait_for_parameters()
    pairs = [(f"has weights {n}.weight", f"starts weights {n}.weight") for n in range(LAYERS)]
    assert events[: 2 * LAYERS] == [event for pair in pairs for event in pair]


def test_one_rank_gathers_nothing(single: Mesh) -> None:
    weights, table = {"w": nn.Parameter(torch.ones(3))}, {"w": Sharding((3,))}
    buffers = GradientBuffers(weights, table, single, SHARDED)
    shards = ParameterBuffers(nn.ParameterDict(weights), buffers, table)
    shards.start_gather()
    shards.wait_for_parameters()
    assert shards.gathers() == []


def test_tensors_of_other_chunks_have_no_views(single: Mesh) -> None:
    weights, table = {"w": nn.Parameter(torch.ones(3))}, {"w": Sharding((3,))}
    buffers = GradientBuffers(weights, table, single, SHARDED)
    shards = ParameterBuffers(nn.ParameterDict(weights), buffers, table)
    assert shards.views({"other": torch.ones(3)}, single) == {}
    found = shards.views({**shards.local_shards(), "other": torch.ones(3)}, single)
    assert list(found) == ["w"]
