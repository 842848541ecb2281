"""Buckets of gradients on one rank of a job, with collectives that only record their order."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_parallel import (
    DataParallelConfig,
    GradientBuffers,
    Mesh,
    ParallelLayout,
    Sharding,
    _compat,
)
from megatron_parallel.data_parallel import Bucket, BucketPlan
from megatron_parallel.data_parallel import bucket as bucket_module
from megatron_parallel.data_parallel.buffers import _largest
from torch import Tensor, nn

from .test_data_parallel_fully_sharded import with_groups

DP2, TWO_INSTANCES = ParallelLayout(dp=2), ParallelLayout(dp=4, dp_outer=2)
EACH = {"ddp_bucket_size": 1}  # a bucket for each parameter
ZERO1 = {"use_distributed_optimizer": True}
WIRE = {
    "ddp_reduce_scatter_with_fp32_accumulation": True,
    "accumulate_allreduce_grads_in_fp32": False,
}


class Work:
    """A collective that completes when it is waited for."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events, self.there = name, events, False
        events.append(f"starts {name}")

    def is_completed(self) -> bool:
        return self.there

    def wait(self) -> None:
        self.events.append(f"has {self.name}")
        self.there = True


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the events of collectives, with the elements that each sends."""
    found: list[str] = []

    def sum_in_place(t: Tensor, group: Any) -> Work:
        return Work(f"sum of {t.numel()}", found)

    def to_shard(part: Tensor, whole: Tensor, group: Any) -> Work:
        return Work(f"shard of {whole.numel()}", found)

    def to_whole(whole: Tensor, part: Tensor, group: Any) -> Work:
        return Work(f"gather of {part.numel()}", found)

    monkeypatch.setattr(_compat, "start_all_reduce", sum_in_place)
    monkeypatch.setattr(_compat, "start_reduce_scatter", to_shard)
    monkeypatch.setattr(_compat, "start_all_gather", to_whole)
    return found


def buffers_of(
    layout: ParallelLayout, rank: int, settings: dict[str, Any], **weights: Tensor | int
) -> tuple[GradientBuffers, dict[str, nn.Parameter]]:
    """Returns buffers of one rank, and its weights of these values or numbers of elements."""
    made = {
        name: nn.Parameter(torch.ones(given) if isinstance(given, int) else given)
        for name, given in weights.items()
    }
    table = {
        name: Sharding(tuple(weight.shape), partial="tp" if "norm" in name else None)
        for name, weight in made.items()
    }
    mesh, _ = with_groups(layout, rank)
    return GradientBuffers(made, table, mesh, DataParallelConfig(**settings)), made


def test_each_bucket_moves_on_when_the_next_one_starts(events: list[str]) -> None:
    """Sums over two instances take three collectives; b is complete before a, or with it."""
    buffers, weights = buffers_of(TWO_INSTANCES, 0, EACH, a=64, b=256)
    buffers.begin(last=True)
    (weights["a"].sum() + weights["b"].sum()).backward()
    assert events == [
        *("starts shard of 256", "has shard of 256", "starts sum of 128"),
        "starts shard of 128",  # with padding
    ]
    events.clear()
    buffers.finish()
    assert events == [
        *("has sum of 128", "starts gather of 128", "has gather of 128"),
        *("has shard of 128", "starts sum of 64", "has sum of 64"),
        *("starts gather of 64", "has gather of 64"),
    ]
    assert len(buffers.reductions()) == 6


def test_sums_over_other_axes_follow_all_those_over_data_ranks(events: list[str]) -> None:
    buffers, _ = buffers_of(ParallelLayout(tp=2, dp=2), 0, {}, weight=200, norm=10)
    buffers.finish()
    data = ["starts sum of 128", "starts sum of 256", "has sum of 128", "has sum of 256"]
    assert events == [*data, "starts sum of 128", "has sum of 128"]
    assert [each.axis for each in buffers.reductions()] == ["dp", "dp", "tp"]


def test_a_bucket_waits_for_its_sum_before_that_over_another_axis(events: list[str]) -> None:
    (bucket,) = buffers_of(ParallelLayout(tp=2, dp=2), 0, {}, norm=10)[0].buckets
    bucket.complete()
    bucket.launch(None)
    bucket.reduce_extra_axes()
    assert events == ["starts sum of 128", "has sum of 128", "starts sum of 128"]


def test_a_bucket_is_done_when_its_collective_is_complete(events: list[str]) -> None:
    (bucket,) = buffers_of(DP2, 0, {}, weight=10)[0].buckets
    assert not bucket.done
    bucket.complete()
    bucket.launch(None)
    assert not bucket.done
    assert bucket._started is not None
    bucket._started._work.wait()
    assert bucket.done
    bucket.wait()
    assert bucket.done and len(bucket.reductions) == 1


BF16 = torch.ones(10, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("layout", "settings", "weight", "several"),
    [
        (DP2, {}, BF16, False),
        (DP2, WIRE, BF16, True),  # an all-to-all, then an all-gather
        (DP2, WIRE, BF16.float(), False),
        (DP2, WIRE | ZERO1, BF16, False),
        (TWO_INSTANCES, {}, BF16, True),
        (TWO_INSTANCES, ZERO1, BF16, True),
    ],
)
def test_the_host_starts_several_collectives_for_whole_sums_in_bf16_and_over_instances(
    layout: ParallelLayout, settings: dict[str, Any], weight: Tensor, several: bool
) -> None:
    (bucket,) = buffers_of(layout, 0, settings, weight=weight.clone())[0].buckets
    assert bucket.needs_several_collectives == several


class Side:
    """A stream beside the one that computes."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    @contextmanager
    def running(self) -> Iterator[None]:
        self.events.append("beside")
        yield
        self.events.append("back")

    def join(self) -> None:
        self.events.append("joined")


def test_a_stream_gets_all_collectives_at_once(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    side = SimpleNamespace(of=lambda device: Side(events))
    monkeypatch.setattr(bucket_module, "SideStream", side)
    buffers, weights = buffers_of(TWO_INSTANCES, 0, {}, weight=128)
    buffers.begin(last=True)
    weights["weight"].sum().backward()
    queued = ("shard of 128", "sum of 64", "gather of 64")
    each = [event for name in queued for event in (f"starts {name}", f"has {name}")]
    assert events == ["beside", *each, "back"]
    (bucket,) = buffers.buckets
    assert len(bucket.reductions) == 2 and not bucket.needs_several_collectives
    buffers.finish()
    assert events[-1] == "joined" and events.count("joined") == 1
    assert [record.operation.partition(" ")[0] for record in buffers.reductions()] == [
        *("reduce_scatter", "all_reduce", "all_gather")
    ]


# -- gradients that hooks do not report ------------------------------------------------------------


def test_gradients_without_hooks_are_collected_up_to_the_reduction(single: Mesh) -> None:
    """The parameter that is first in the bucket has none."""
    weights = {n: nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for n in ("a", "first")}
    buffers = GradientBuffers(weights, dict.fromkeys(weights, Sharding((3,))), single)
    for value in (3.0, 1.0):
        weights["a"].grad = torch.full((3,), value, dtype=torch.bfloat16)
        if value == 3.0:
            buffers.collect_gradients()
            assert weights["a"].grad is None
    buffers.start_reductions()
    buffers.finish()
    found = buffers.gradients()
    assert found["a"].eq(4).all() and not found["first"].any()


def test_every_weight_half_is_added_up_in_fp32(single: Mesh) -> None:
    """1 and twice 2^-9: bf16, with 8 bits, would stay at 1."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    buffers = GradientBuffers({"w": weight}, {"w": Sharding((3,))}, single)
    for value in (1.0, 2.0**-9, 2.0**-9):
        with buffers.weight_backward():
            gradient = torch.full((3,), value, dtype=torch.bfloat16)
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
    buffers.finish()
    assert torch.equal(buffers.gradients()["w"], torch.full((3,), 1 + 2.0**-8))


def test_a_weight_half_leaves_what_fused_weights_have(single: Mesh) -> None:
    """It reaches `both` and `new` by other operations, `product` by its product, others not."""
    names = ("both", "new", "held", "product", "nothing")
    weights = {name: nn.Parameter(torch.ones(3)) for name in names}
    (bucket,) = GradientBuffers(weights, dict.fromkeys(names, Sharding((3,))), single).buckets
    for name in names:
        bucket.mark_fused(name)
    for name in ("both", "held"):
        weights[name].grad = torch.full((3,), 2.0)
    assert not bucket.in_weight_backward
    bucket.begin_weight_backward()
    assert bucket.in_weight_backward and all(w.grad is None for w in weights.values())
    for name in ("both", "new"):
        weights[name].grad = torch.full((3,), 5.0)
    target, first = bucket.accumulation_target("product")
    assert first
    target.fill_(6.0)
    weights["product"].grad = bucket.dummy_gradient.expand(3)
    bucket.end_weight_backward()
    found = {n: None if w.grad is None else w.grad[0].item() for n, w in weights.items()}
    assert found == {"both": 7.0, "new": 5.0, "held": 2.0, "product": 6.0, "nothing": None}


def test_a_product_adds_to_the_gradient_that_autograd_left() -> None:
    buffers, weights = buffers_of(DP2, 0, {}, weight=3)
    (bucket,), weight = buffers.buckets, weights["weight"]
    weight.grad = torch.full((3,), 2.0)
    target, first = bucket.accumulation_target("weight")
    assert target is bucket.views["weight"] and not first and target.eq(2).all()
    buffers.zero()
    target, first = bucket.accumulation_target("weight")
    assert target is bucket.views["weight"] is weight.grad and first


# -- gradients that are not finite -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "place"), [(0, 0), (0, 100), (0, None), (1, 0), (1, 100), (1, None)]
)
def test_on_a_gpu_the_rest_of_a_bucket_shows_where_a_gradient_was_not_finite(
    monkeypatch: pytest.MonkeyPatch, rank: int, place: int | None
) -> None:
    """Rank 0 has the elements up to 63; NCCL writes nothing else."""
    buffers, weights = buffers_of(DP2, rank, ZERO1, weight=128)
    (bucket,) = buffers.buckets
    bucket.plan = replace(bucket.plan, device=torch.device("cuda"))
    assert bucket.overwritten is bucket.shard

    def scatter(part: Tensor, whole: Tensor, group: Any) -> Work:
        part.fill_(math.nan)
        return Work("shard", [])

    monkeypatch.setattr(_compat, "start_reduce_scatter", scatter)
    weights["weight"].grad = torch.ones(128)
    if place is not None:
        weights["weight"].grad[place] = math.inf
    bucket.complete()
    assert bucket.shard is not None
    bucket.launch(bucket.shard.sum())
    bucket.wait()
    (found,) = bucket.nonfinite_gradients()
    assert (found.parameter, found.nan, found.own) == ("weight", True, place is not None)


@pytest.mark.parametrize("checked", [False, True])
def test_the_gradients_of_a_rank_are_checked_if_asked_for(events: list[str], checked: bool) -> None:
    settings = {"check_for_nan_in_loss_and_grad": checked}
    buffers, weights = buffers_of(DP2, 0, settings, weight=10)
    weights["weight"].grad = torch.full((10,), math.inf)
    buffers.finish()
    (found,) = buffers.nonfinite_gradients()
    assert (found.nan, found.own) == (False, True if checked else None)


class Given(Bucket):
    """A bucket whose reduction would overwrite these gradients."""

    def __init__(self, gradients: Tensor | None, checked: bool = True) -> None:
        self.gradients_of_rank, self.checks_finite = gradients, checked

    @property
    def overwritten(self) -> Tensor | None:
        """The gradients."""
        return self.gradients_of_rank


def test_one_number_of_each_bucket_is_a_sum_on_a_cpu_and_a_norm_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    norm, calls = torch._foreach_norm, []

    def counted(tensors: list[Tensor], order: float) -> tuple[Tensor, ...]:
        calls.append((len(tensors), order))
        return norm(tensors, order)

    monkeypatch.setattr(torch, "_foreach_norm", counted)
    first, *others = _largest(
        [Given(torch.ones(3)), Given(None), Given(torch.ones(2), checked=False)]
    )
    assert first == 3 and others == [None, None] and calls == []
    assert _largest([]) == [] and _largest([Given(None)]) == [None]
    elsewhere = torch.ones(3, device="meta")
    found = _largest([Given(elsewhere), Given(None), Given(elsewhere)])
    assert [each is not None and each.is_meta for each in found] == [True, False, True]
    assert calls == [(2, math.inf)]


def test_labels_number_the_buckets() -> None:
    buffers, _ = buffers_of(DP2, 0, EACH, a=1, b=1)
    assert [bucket.label for bucket in buffers.buckets] == ["1 of 2", "2 of 2"]
    assert all(isinstance(b, Bucket) and isinstance(b.plan, BucketPlan) for b in buffers.buckets)
