"""Settings of data parallelism, and limits of buckets and of what is reported about gradients."""

import json
from typing import Any

import megatron_parallel.data_parallel.finite as finite
import pytest
import torch
from megatron_parallel import (
    DataParallelConfig,
    LayoutError,
    Mesh,
    ParallelLayout,
    Sharding,
    TrainableParameters,
)
from megatron_parallel.data_parallel import GradientFusion
from megatron_parallel.data_parallel.finite import (
    NonFiniteGradient,
    describe_nonfinite_gradients,
)
from megatron_parallel.data_parallel.fusion import why_product_unsupported
from megatron_parallel.data_parallel.plan import (
    BucketPlan,
    main_dtype,
    plan_buckets,
    reduction_axis,
)
from torch.nn import Parameter


def test_defaults_are_those_that_are_documented() -> None:
    on = {
        "overlap_grad_reduce",
        "accumulate_allreduce_grads_in_fp32",
        "gradient_accumulation_fusion",
        "check_for_nan_in_loss_and_grad",
    }
    found = vars(DataParallelConfig())
    assert found.pop("ddp_bucket_size") == 4194304
    assert {name for name, value in found.items() if value is True} == on
    assert {value for name, value in found.items() if name not in on} == {False}


WIRE = {"ddp_reduce_scatter_with_fp32_accumulation": True}
BF16 = {"accumulate_allreduce_grads_in_fp32": False}
FSDP, ZERO1 = {"use_torch_fsdp2": True}, {"use_distributed_optimizer": True}
GATHER, KEEP = {"overlap_param_gather": True}, {"torch_fsdp2_no_reshard_after_forward": True}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ddp_bucket_size": 0}, "ddp_bucket_size 0 is below 1"),
        (FSDP | ZERO1, "use_torch_fsdp2 shards optimizer state as well, so it excludes"),
        (KEEP, "needs use_torch_fsdp2; use both or neither"),
        (WIRE, "needs gradients that are sent in bf16"),
        (WIRE | BF16 | FSDP, "excludes use_torch_fsdp2, whose sums are torch's"),
        (GATHER, "overlap_param_gather needs use_distributed_optimizer"),
        (GATHER | ZERO1 | {"overlap_grad_reduce": False}, "needs overlap_grad_reduce; use both"),
    ],
)
def test_settings_that_exclude_one_another_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        DataParallelConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        *({"ddp_bucket_size": 1}, BF16, FSDP | KEEP, FSDP | BF16, WIRE | BF16 | ZERO1),
        *(GATHER | ZERO1, ZERO1 | {"overlap_grad_reduce": False}),
    ],
    ids=str,
)
def test_settings_that_go_together_are_allowed(settings: dict[str, Any]) -> None:
    made = DataParallelConfig(**settings)
    assert settings.items() <= vars(made).items()
    assert made.low_precision == (
        settings.items() >= BF16.items() and not WIRE.items() <= settings.items()
    )


def test_gradients_have_a_dtype_of_their_own() -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    single = torch.float32
    assert [main_dtype(each) for each in dtypes] == [torch.float64, single, single, single]
    assert [main_dtype(each, low_precision=True) for each in dtypes] == [*dtypes]
    with pytest.raises(LayoutError, match=r"parameters of torch\.int8 have no gradients"):
        main_dtype(torch.int8, low_precision=True)
    assert reduction_axis(Sharding((2, 2), experts=True)) == "expert_dp"
    assert reduction_axis(Sharding((2, 2))) == "dp_cp"


def plans(size: int, parts: int = 1, **numels: int) -> tuple[BucketPlan, ...]:
    parameters = {name: torch.empty(numel, device="meta") for name, numel in numels.items()}
    table = {name: Sharding((numel,)) for name, numel in numels.items()}
    return plan_buckets(parameters, table, {"dp_cp": parts, "expert_dp": parts}, size)


def test_a_bucket_may_be_exactly_full() -> None:
    sizes = {size: len(plans(size, a=64, b=64)) for size in (1, 127, 128, 129)}
    assert sizes == {1: 2, 127: 2, 128: 1, 129: 1}
    assert [len(plans(size, a=64, b=1)) for size in (127, 128)] == [2, 1]  # b comes first
    assert not plans(128, a=64)[0].whole


def test_shards_have_the_ranges_that_reach_into_them() -> None:
    (plan,) = plans(10**6, 2, a=64, b=100, c=64)
    # 64 + 128 (with padding) + 64 elements in two shards of 128.
    assert (plan.numel, plan.num_shards) == (256, 2)
    assert plan.shard_ranges(0) == (("c", 0, 64, 0), ("b", 0, 64, 64))
    assert plan.shard_ranges(1) == (("b", 64, 100, 0), ("a", 0, 64, 64))
    parts = plan.split_shard(torch.arange(128.0), 1)
    assert {name: (part[0].item(), len(part)) for name, part in parts.items()} == {
        "b": (0.0, 36),
        "a": (64.0, 64),
    }
    for index in (-1, 2):
        with pytest.raises(LayoutError, match=f"shard {index} does not exist: the bucket has 2"):
            plan.shard_range(index)


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ([], ""),
        ([("bucket 1", "a", True, True)], "the gradient of 'a' (bucket 1) is NaN"),
        ([("bucket 1", "a", False, None)], "the gradient of 'a' (bucket 1) is infinite"),
        (
            [("bucket 1", "a", False, False), ("bucket 1", "b", True, True)],
            "the gradient of 'a' (bucket 1) is infinite, and so are those of 1 more parameters",
        ),
        (
            [("b", "a", True, None), ("b", "c", True, None), ("b", "d", True, None)],
            "the gradient of 'a' (b) is NaN, and so are those of 2 more parameters",
        ),
    ],
)
def test_one_rank_reports_its_gradients_without_naming_itself(
    found: list[tuple[str, str, bool, bool | None]], line: str, single: Mesh
) -> None:
    assert (
        describe_nonfinite_gradients([NonFiniteGradient(*each) for each in found], single) == line
    )


@pytest.mark.parametrize(
    ("of_ranks", "line"),
    [
        (
            # Only the own gradients of the same parameter count, NaN or not; `b` is another one.
            [[["x", "a", False, False]], [["x", "a", True, True]], [["x", "b", True, True]]],
            "the gradient of 'a' (x) is infinite, and so it was on rank 1 before it was summed, "
            "and so are those of 1 more parameters",
        ),
        ([[], [["x", "a", False, False]], []], "the gradient of 'a' (x) is infinite"),
        ([[], [], []], ""),
    ],
)
def test_ranks_whose_own_gradients_were_not_finite_are_named(
    of_ranks: list[Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = list(map(json.dumps, of_ranks))
    monkeypatch.setattr(finite, "all_gather_texts", lambda *_, **__: texts)
    assert describe_nonfinite_gradients([], Mesh(ParallelLayout(dp=3), 0)) == line


def test_fusion_as_text_counts_weights_and_reasons() -> None:
    assert str(GradientFusion(disabled_reason="off")) == "gradient accumulation is not fused: off"
    reasons = {"c": "late", "d": "late", "e": "odd"}
    assert str(GradientFusion(("a", "b"), reasons)) == (
        "gradient accumulation is fused for 2 of 5 weight matrices; not for 2: late; not for 1: odd"
    )
    assert str(GradientFusion()).endswith("is fused for 0 of 0 weight matrices")
    cpu = torch.device("cpu")
    assert why_product_unsupported(torch.float32, torch.float32, cpu) is None


def test_gradients_without_buffers_are_those_of_the_parameters(single: Mesh) -> None:
    parameter = Parameter(torch.ones(2))
    trainable = TrainableParameters([("a", parameter)], {"a": Sharding((2,))}, single)
    assert trainable.gradients() == {"a": None} and trainable.shards == ()
    parameter.grad = torch.ones(2)
    assert trainable.gradients()["a"] is parameter.grad
    assert trainable.shard_gradients() is None
    trainable.zero()
    assert parameter.grad is None
