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
from megatron_kernels.ops import batch_invariant, invariant_product
from megatron_kernels.ops.attention import batch_invariant as tiled_attention
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
    defect = mock.patch.object(invariant_product, "multiply_in_tiles", by_all_rows)
    with defect, pytest.raises(AssertionError):
        assert_rows_are_independent(function, drawn(1, 40, 70), 3, 5)


def test_tiles_cover_each_row_once_with_few_rows_of_padding() -> None:
    for rows in range(1, 300):
        found = list(invariant_product.tiles(rows, invariant_product.SIZES))
        assert [row for start, end, _ in found for row in range(start, end)] == list(range(rows))
        assert all(end - start <= size for start, end, size in found)
        padding = sum(size - (end - start) for start, end, size in found)
        assert padding < max(4, rows), rows
    assert list(invariant_product.tiles(300, (128,)))[-1] == (256, 300, 128)


SETTING = invariant_product.Setting.of(torch.zeros(1))
sizes_of_weight = invariant_product.weight_sizes.__wrapped__


def test_sizes_of_tiles_with_another_order_of_sums_are_not_used() -> None:
    multiply = invariant_product._multiply

    def differs(of: Callable[[Tensor], Tensor]) -> Any:
        def product(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
            rows = of(torch.arange(len(x))) if len(x) > 8 else torch.ones(len(x)) > 0
            middle = x.shape[1] // 3
            parts = multiply(x[:, :middle], matrix[:middle], bias), x[:, middle:] @ matrix[middle:]
            return torch.where(rows[:, None], multiply(x, matrix, bias), parts[0] + parts[1])

        return mock.patch.object(invariant_product, "_multiply", product)

    arguments = 96, 5, False, 0, SETTING
    equal = sizes_of_weight(*arguments)
    assert equal[-1] == 128
    with differs(lambda index: index < 0):  # all rows of tiles of more than 8 rows
        assert sizes_of_weight(*arguments) == tuple(size for size in equal if size > 8)
    refused = pytest.raises(KernelError, match="bits that depend on their index")
    with differs(lambda index: index != 13), refused:  # one row of each
        sizes_of_weight(*arguments)


@pytest.mark.parametrize("biased", [False, True])
def test_a_bias_that_is_added_before_the_sum_is_another_order(biased: bool) -> None:
    def first(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None or len(x) != 16:
            return x @ matrix if bias is None else x @ matrix + bias
        ones = torch.ones(len(x), 1)
        return torch.cat((ones, x), 1) @ torch.cat((bias[None], matrix))

    with mock.patch.object(invariant_product, "_multiply", first):
        assert (16 in sizes_of_weight(96, 5, biased, 0, SETTING)) is not biased


def test_attention_computes_one_sequence_after_another_if_several_have_other_bits() -> None:
    q = drawn(1, 70, 2, 4, 8)
    k, v = (drawn(seed, 70, 2, 2, 8) for seed in (2, 3))
    ids = torch.arange(70).expand(2, -1) // torch.tensor([[70], [30]])
    sizes = tiled_attention.row_sizes

    def of_one(batch: int, *others: Any) -> tuple[int, ...]:
        return sizes(batch, *others) if batch == 1 else ()

    for mask in (Mask(), Mask(document_ids=ids.int())):
        of = partial(attention, mask=mask, backend=BACKEND)
        together = of(q, k, v)
        with mock.patch.object(tiled_attention, "row_sizes", of_one):
            assert torch.equal(of(q, k, v), together)


def test_an_order_of_attention_that_depends_on_the_batch_is_found() -> None:
    bmm = torch.bmm

    def by_batch(x: Tensor, y: Tensor) -> Tensor:
        if len(x) < 4:
            return bmm(x, y)
        return bmm(x[..., :7], y[:, :7]) + bmm(x[..., 7:], y[:, 7:])

    sizes = tiled_attention.row_sizes.__wrapped__
    with mock.patch.object(torch, "bmm", by_batch):
        assert sizes(1, 2, 1, 16, 16, SETTING)
        assert sizes(2, 2, 1, 16, 16, SETTING) == ()

    def by_row(x: Tensor, y: Tensor) -> Tensor:
        other = bmm(x[..., :7], y[:, :7]) + bmm(x[..., 7:], y[:, 7:])
        return torch.where((torch.arange(x.shape[1]) == 13)[:, None], other, bmm(x, y))

    with mock.patch.object(torch, "bmm", by_row):
        assert sizes(2, 2, 1, 16, 16, SETTING) == ()
        with pytest.raises(KernelError, match="products of attention have bits that depend on the"):
            sizes(1, 2, 1, 16, 16, SETTING)


def test_keys_in_another_order_than_their_positions_are_attended_to() -> None:
    q = drawn(1, 3, 1, 2, 8)
    k, v = (drawn(seed, 300, 1, 2, 8) for seed in (2, 3))
    positions = torch.arange(300).flip(0)[None].int()
    mask = Mask(positions=positions, query_positions=torch.tensor([[0, 150, 299]]).int())
    found = attention(q, k, v, mask, backend=BACKEND)
    expected = attention(q, k, v, mask, backend="reference")
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("mask", "queries", "offset"),
    [
        (Mask(), 200, 0),
        (Mask(), 3, 150),
        (Mask(window=90), 200, 0),
        (Mask(prefix=150), 3, 0),
        (Mask(causal=False), 3, 0),
    ],
    ids=["causal", "cache", "window", "prefix", "full"],
)
def test_attention_in_several_tiles_equals_the_reference(
    mask: Mask, queries: int, offset: int
) -> None:
    q, k = drawn(1, queries, 2, 4, 8).double(), drawn(2, 200, 2, 2, 8).double()
    v = drawn(3, 200, 2, 2, 6).double()
    for scores in (Scores(), Scores(0.3, softcap=2.0)):
        found, expected = (
            attention(q, k, v, mask, scores, offset, backend=name)
            for name in (BACKEND, "reference")
        )
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


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


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (3, [(0, 3, 4)]),
        (24, [(0, 24, 32)]),  # no call for a tile of fewer than 32 rows
        (32, [(0, 32, 32)]),
        (40, [(0, 32, 32), (32, 40, 8)]),
        (48, [(0, 32, 32), (32, 48, 16)]),
        (49, [(0, 49, 64)]),
        (130, [(0, 128, 128), (128, 130, 4)]),
        (230, [(0, 128, 128), (128, 230, 128)]),
    ],
)
def test_rows_are_cut_where_a_further_tile_has_at_most_half_the_rows(
    rows: int, expected: list[tuple[int, int, int]]
) -> None:
    assert list(invariant_product.tiles(rows, invariant_product.SIZES)) == expected


@pytest.mark.parametrize("k", [1, 2, 7, 96])
def test_compared_products_are_rounding_errors_alone(k: int) -> None:
    """Each term of a sum has its negative at another index."""
    contents, columns = invariant_product.order_sensitive(
        k, 5, invariant_product.Setting.of(torch.zeros(1).double())
    )
    assert contents.shape[1] == columns.shape[1] == k and len(columns) == 5
    terms = contents[:, None] * columns
    assert ((terms != 0).sum(-1) == k - k % 2).all()
    for row in terms.flatten(0, 1):
        values = row.tolist()
        assert sorted(values) == sorted(-value for value in values)
        assert values != [-value for value in reversed(values)] or k < 3
    assert len({tuple(row.tolist()) for row in contents}) == (len(contents) if k > 1 else 1)
