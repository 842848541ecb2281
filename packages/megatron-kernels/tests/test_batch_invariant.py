"""Batch-invariant backends: a row has the same bits, whatever is computed with it."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_kernels import (
    KernelError,
    Mask,
    Scores,
    attention,
    gelu,
    layer_norm,
    linear,
    pointwise,
    rms_norm,
    swiglu,
)
from megatron_kernels.ops import batch_invariant
from torch import Tensor

BACKEND = batch_invariant.NAME
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rows_are_independent(
    function: Callable[[Tensor], Tensor], x: Tensor, first: int, count: int
) -> None:
    whole = function(x)
    assert torch.equal(function(x[first : first + count]), whole[first : first + count])
    backwards = function(x.flip(0)).flip(0)
    assert torch.equal(backwards, whole)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 200), st.integers(1, 130), st.integers(1, 40), st.data(), DTYPES)
def test_rows_of_products_are_independent(
    rows: int, width: int, out: int, data: st.DataObject, dtype: torch.dtype
) -> None:
    first = data.draw(st.integers(0, rows - 1))
    weight, bias = drawn(2, out, width, dtype=dtype), drawn(3, out, dtype=dtype)
    function = partial(linear, weight=weight, bias=bias, backend=BACKEND)
    assert_rows_are_independent(function, drawn(1, rows, width, dtype=dtype), first, 5)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 90), st.integers(1, 150), st.data(), DTYPES)
def test_rows_of_norms_and_activations_are_independent(
    rows: int, width: int, data: st.DataObject, dtype: torch.dtype
) -> None:
    first = data.draw(st.integers(0, rows - 1))
    x, weight = drawn(1, rows, width, dtype=dtype), drawn(2, width, dtype=dtype)
    functions: list[Callable[[Tensor], Tensor]] = [
        partial(rms_norm, weight=weight, backend=BACKEND),
        partial(layer_norm, weight=weight, bias=weight, backend=BACKEND),
        partial(gelu, backend=BACKEND),
        partial(gelu, approximate="tanh", backend=BACKEND),
        partial(pointwise, kind="silu", backend=BACKEND),
    ]
    for function in functions:
        assert_rows_are_independent(function, x, first, 3)
    pairs = torch.stack((x, x.flip(0)), 1)
    assert_rows_are_independent(partial(swiglu, backend=BACKEND), pairs, first, 3)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 50]),
    st.sampled_from([0.0, 3.0]),
    st.data(),
    DTYPES,
)
def test_queries_do_not_depend_on_others_or_on_keys_after_them(
    length: int,
    batch: int,
    groups: int,
    window: int,
    cap: float,
    data: st.DataObject,
    dtype: torch.dtype,
) -> None:
    q = drawn(1, length, batch, 4, 8, dtype=dtype)
    k, v = (drawn(seed, length, batch, groups, 8, dtype=dtype) for seed in (2, 3))
    mask, scores = Mask(window=window or None), Scores(softcap=cap)
    of = partial(attention, mask=mask, scores=scores, backend=BACKEND)
    whole = of(q, k, v)
    start = data.draw(st.integers(0, length - 1))
    end = data.draw(st.integers(start + 1, length))
    row = data.draw(st.integers(0, batch - 1))
    part = of(q[start:end], k[:end], v[:end], query_offset=start)
    assert torch.equal(part, whole[start:end])
    alone = of(*(x[:, row : row + 1] for x in (q, k, v)))
    assert torch.equal(alone, whole[:, row : row + 1])


def test_an_order_of_sums_that_depends_on_the_rows_is_detected() -> None:
    def by_all_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        middle = len(x) % x.shape[1]
        parts = [x[:, :middle] @ weight[:, :middle].t(), x[:, middle:] @ weight[:, middle:].t()]
        return parts[0] + parts[1] + (0 if bias is None else bias)

    function: Any = partial(linear, weight=drawn(2, 9, 70), backend=BACKEND)
    assert_rows_are_independent(function, drawn(1, 40, 70), 3, 5)
    defect = mock.patch.object(batch_invariant, "multiply_in_tiles", by_all_rows)
    with defect, pytest.raises(AssertionError):
        assert_rows_are_independent(function, drawn(1, 40, 70), 3, 5)


def test_sums_of_rows_are_exact_in_float64() -> None:
    for width in (1, 2, 3, 7, 64, 129):
        x = drawn(width, 5, width, dtype=torch.float64)
        found = batch_invariant.row_sum(x)
        torch.testing.assert_close(found, x.sum(-1, keepdim=True), rtol=1e-13, atol=1e-13)


def test_the_backend_is_used_on_request_only() -> None:
    x, weight = drawn(1, 3, 8), drawn(2, 5, 8)
    assert linear.explain(x, weight).backend == "torch"
    assert linear.explain(x, weight, backend=BACKEND).backend == BACKEND
    (status,) = (s for s in linear.explain(x, weight).statuses if s.backend == BACKEND)
    assert status.skipped_reason == f"on request only, {batch_invariant.SLOWER}"
    q = drawn(1, 3, 1, 2, 8)
    with pytest.raises(KernelError, match="it does not support sinks"):
        attention(q, q, q, Mask(), Scores(sinks=torch.zeros(2)), backend=BACKEND)


def test_gradients_of_products_in_tiles_equal_finite_differences() -> None:
    x, weight, bias = (
        drawn(seed, *shape, dtype=torch.float64).requires_grad_()
        for seed, shape in ((1, (70, 3)), (2, (4, 3)), (3, (4,)))
    )
    function: Any = partial(linear, backend=BACKEND)
    assert torch.autograd.gradcheck(function, (x, weight, bias))
