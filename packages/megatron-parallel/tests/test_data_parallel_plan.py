"""Boundaries, order and padding of buckets, from shapes alone."""

import itertools
import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from megatron_parallel import LayoutError, Sharding
from megatron_parallel.data_parallel.plan import ALIGNMENT, BucketPlan, plan_buckets
from torch import Tensor


def tensors(**numels: int) -> dict[str, Tensor]:
    return {name: torch.empty(numel, device="meta") for name, numel in numels.items()}


def plan(
    parameters: dict[str, Tensor], size: int, *, parts: int = 1, **shardings: Sharding
) -> tuple[BucketPlan, ...]:
    table = {name: Sharding(tuple(t.shape)) for name, t in parameters.items()} | shardings
    return plan_buckets(parameters, table, {"dp_cp": parts, "expert_dp": parts}, size)


def names(plans: tuple[BucketPlan, ...]) -> list[list[str]]:
    return [[slot.name for slot in bucket.slots] for bucket in plans]


def test_parameters_come_in_backward_order_and_buckets_close_when_full() -> None:
    parameters = tensors(a=64, b=64, c=65, d=1, e=500, f=10)
    plans = plan(parameters, 255)
    assert names(plans) == [["f"], ["e"], ["d", "c"], ["b", "a"]]
    assert [bucket.numel for bucket in plans] == [64, 512, 192, 128]
    assert [slot.start for slot in plans[2].slots] == [0, 64]
    assert names(plan(parameters, 10**6)) == [["f", "e", "d", "c", "b", "a"]]


def test_a_tied_weight_has_a_bucket_of_its_own() -> None:
    parameters = tensors(embedding=30, a=10, b=10)
    plans = plan(parameters, 10**6, embedding=Sharding((30,), tied="embedding"))
    assert names(plans) == [["b", "a"], ["embedding"]]
    assert [bucket.tied for bucket in plans] == [None, "embedding"]
    alone = plan(tensors(embedding=30), 10**6, embedding=Sharding((30,), tied="embedding"))
    assert alone == plans[1:]  # the other stage, with other neighbours, has an equal bucket
    last = plan(tensors(a=10, b=10, head=30), 10**6, head=Sharding((30,), tied="embedding"))
    assert names(last) == [["head"], ["b", "a"]]


def test_partial_gradients_of_all_layers_share_a_bucket() -> None:
    parameters = tensors(norm0=10, a=100, norm1=10, b=100, norm2=10, c=100)
    partial = {name: Sharding((10,), partial="tp") for name in ("norm0", "norm1", "norm2")}
    plans = plan(parameters, 150, **partial)
    assert names(plans) == [["c"], ["b"], ["a"], ["norm2", "norm1", "norm0"]]
    assert [bucket.partial for bucket in plans] == [None, None, None, "tp"]
    in_two = names(plan(parameters, 100, **partial))
    assert [n for n in in_two if "norm" in n[0]] == [["norm2", "norm1"], ["norm0"]]
    both = plan(tensors(w=10), 100, w=Sharding((10,), partial="tp", tied="embedding"))
    assert [(bucket.partial, bucket.tied) for bucket in both] == [("tp", "embedding")]


def test_axes_and_dtypes_do_not_mix() -> None:
    parameters = tensors(a=10, b=10, c=10, d=10)
    parameters["b"] = parameters["b"].double()
    parameters["c"] = parameters["c"].bfloat16()
    plans = plan(parameters, 10**6, a=Sharding((4, 10), experts=True))
    assert names(plans) == [["d"], ["c"], ["b"], ["a"]]
    narrow, wide = torch.float32, torch.float64
    assert [bucket.dtype for bucket in plans] == [narrow, narrow, wide, narrow]
    assert [bucket.parameter_dtype for bucket in plans] == [narrow, torch.bfloat16, wide, narrow]
    assert [bucket.axis for bucket in plans] == ["dp_cp", "dp_cp", "dp_cp", "expert_dp"]


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(LayoutError, match="'b' is not in the sharding table"):
        plan_buckets(tensors(a=1, b=1), {"a": Sharding((1,))}, {"dp_cp": 1}, 10)
    with pytest.raises(LayoutError, match="bucket size 0"):
        plan(tensors(a=1), 0)
    with pytest.raises(LayoutError, match="int64"):
        plan({"a": torch.empty(1, dtype=torch.int64, device="meta")}, 10)
    with pytest.raises(LayoutError, match="shard 2 does not exist: the bucket has 2"):
        plan(tensors(a=1), 10, parts=2)[0].shard_range(2)


@hypothesis.settings(deadline=None)
@hypothesis.given(
    st.lists(st.integers(0, 700), min_size=1, max_size=20),
    st.integers(1, 1500),
    st.integers(1, 7),
)
def test_boundaries_do_not_depend_on_how_many_ranks_share_a_bucket(
    numels: list[int], size: int, parts: int
) -> None:
    parameters = tensors(**{f"p{i}": numel for i, numel in enumerate(numels)})
    one, many = plan(parameters, size), plan(parameters, size, parts=parts)
    assert [bucket.slots for bucket in one] == [bucket.slots for bucket in many]
    assert [name for bucket in names(many) for name in bucket] == list(reversed(parameters))
    for bucket in many:
        assert len(bucket.slots) == 1 or bucket.slots[-1].stop <= size
        ends = [0, *(slot.stop for slot in bucket.slots)]
        for end, slot in zip(ends, bucket.slots, strict=False):
            assert slot.start % ALIGNMENT == 0
            assert end <= slot.start < end + ALIGNMENT
            assert slot.stop - slot.start == math.prod(slot.shape)
        shards = [bucket.shard_range(index) for index in range(parts)]
        assert shards[0][0] == 0 and shards[-1][1] == bucket.numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(shards))
        assert len({stop - start for start, stop in shards}) == 1
        assert all(start % ALIGNMENT == 0 for start, _ in shards)
        assert bucket.numel - bucket.slots[-1].stop < ALIGNMENT * (parts + 1)


def plan_whole(
    shapes: dict[str, tuple[int, ...]], size: int, parts: int, **shardings: Sharding
) -> tuple[BucketPlan, ...]:
    parameters = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    table = {name: Sharding(shape) for name, shape in shapes.items()} | shardings
    sizes = {"dp_cp": parts, "expert_dp": parts}
    return plan_buckets(parameters, table, sizes, size, whole_matrices=True)


def test_whole_matrices_have_buckets_of_their_own_and_the_rest_is_cut() -> None:
    shapes = {"word": (9, 30), "a": (2, 100), "gain": (50,), "b": (3, 100), "c": (1, 100)}
    word = Sharding((9, 30), vocabulary=True)
    plans = plan_whole(shapes, 10**6, 2, word=word)
    assert [(bucket.whole, sorted(n)) for bucket, n in zip(plans, names(plans), strict=True)] == [
        (True, ["a", "b", "c"]),
        (False, ["gain", "word"]),
    ]
    assert [[part.name for part in plans[0].shard_ranges(i)] for i in (0, 1)] == [["b"], ["c", "a"]]
    assert plans[0].numel == 2 * 384  # of 256 + 128 elements with padding, and 320
    assert plans[0].split_shard(torch.empty(384), 0)["b"].shape == (3, 100)
    assert plans[1].split_shard(torch.empty(192), 1)["word"].shape == (142,)  # 64 + 270 - 192
    assert not any(bucket.whole for bucket in plan({"a": torch.empty(4, 16, device="meta")}, 10))


def test_buckets_of_whole_matrices_fill_all_shards() -> None:
    layers = {f"m{layer}": (8, 16) for layer in range(8)}
    plans = plan_whole(layers, 64, 4)  # a matrix alone is larger than a bucket
    assert [len(n) for n in names(plans)] == [4, 4]
    for bucket in plans:
        assert bucket.numel == 4 * 128  # matrices without padding
        assert [len(bucket.shard_ranges(index)) for index in range(4)] == [1, 1, 1, 1]
    assert [len(n) for n in names(plan_whole(layers, 256, 2))] == [4, 4]


@hypothesis.given(
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    parts=st.integers(1, 5),
    size=st.integers(1, 2000),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_no_whole_matrix_is_cut_and_none_overlap(rows: list[int], parts: int, size: int) -> None:
    shapes = {f"m{number}": (count, 16) for number, count in enumerate(rows)}
    plans = plan_whole(shapes, size, parts)
    assert sorted(name for n in names(plans) for name in n) == sorted(shapes)
    for bucket in plans:
        held = [part for index in range(parts) for part in bucket.shard_ranges(index)]
        assert sorted(part.name for part in held) == sorted(slot.name for slot in bucket.slots)
        ends = 0
        for slot in sorted(bucket.slots, key=lambda slot: slot.start):
            assert slot.start >= ends and slot.start % ALIGNMENT == 0
            ends = slot.stop
        assert ends <= bucket.numel and bucket.numel % (ALIGNMENT * parts) == 0
        padded = [-(-slot.numel // ALIGNMENT) * ALIGNMENT for slot in bucket.slots]
        assert bucket.numel <= sum(padded) + (parts - 1) * max(padded)
