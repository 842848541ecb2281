"""Scales at the ends of their range, bits of formats, and calls of torch's scaled product."""

from dataclasses import replace
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron_kernels import (
    FP8_BLOCK,
    FP8_BLOCK_2D,
    FP8_GRADIENT,
    FP8_TENSOR,
    INT8_ROW,
    MXFP8,
    NVFP4,
    NVFP4_2D,
    KernelError,
    QuantFormat,
    Quantized,
    dequantize,
    quantize,
    quantized_matmul,
    tensor_scale,
)
from megatron_kernels.ops.low_precision.elements import DTYPES, from_elements, to_elements
from megatron_kernels.ops.low_precision.matmul import scaled
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

F64 = torch.float64
ROWS = QuantFormat("e4m3", 1, 0)
FLOOR = QuantFormat("e4m3", 1, 32, "e8m0_floor")


@pytest.mark.parametrize(
    ("form", "amax", "expected"),
    [
        # E8M0 has the powers from -127 to 127 (OCP Microscaling Formats 1.0, section 5.4.1).
        (FLOOR, -200, -127),
        (FLOOR, -119, -127),
        (FLOOR, -118, -126),
        (FLOOR, 134, 126),
        (FLOOR, 135, 127),
        (FLOOR, 200, 127),
        (QuantFormat("e5m2", 1, 32, "e8m0_floor"), 20, 20 - 15),  # the largest power is 2^15
        (QuantFormat("e2m1", 1, 32, "e8m0_floor"), 3, 3 - 2),
        (MXFP8, 200, 127),
        # Scales that are divided by are normal numbers of float32.
        (MXFP8, -200, -126),
        (FP8_BLOCK, -200, -126),
        (FP8_BLOCK, 200, 127),
        (FP8_TENSOR, -200, -126),
        (FP8_GRADIENT, -200, -126),
    ],
    ids=str,
)
def test_scales_end_with_the_range_of_their_type(
    form: QuantFormat, amax: int, expected: int
) -> None:
    found = quantize(torch.full((1, 4), 2.0**amax, dtype=F64), form)
    assert found.scales.double().tolist() == [[2.0**expected]]
    assert dequantize(found, F64).isfinite().all()


def test_a_block_whose_scale_is_rounded_to_zero_has_zeros() -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16], x[0, 17] = 2688.0, 1e-5, -1e-6
    found = quantize(x, NVFP4)
    assert found.scales.float().tolist() == [[448, 0]]
    assert not found.elements[:, 8:].any()
    assert dequantize(found).tolist() == [[2688, *[0] * 31]]
    tiny = quantize(torch.full((1, 16), 2.0**-160, dtype=F64), NVFP4)
    assert tiny.tensor_scale == 2.0**-126 and not dequantize(tiny).any()


def test_blocks_of_two_rows_and_columns_have_their_own_scales() -> None:
    x = torch.tensor([[1.0, 7.0, 3.0], [0.5, 2.0, 3.5], [10.0, -14.0, 448.0]])
    found = quantize(x, QuantFormat("e4m3", 2, 2))
    assert found.scales.tolist() == [[7 / 448, 3.5 / 448], [14 / 448, 1]]
    assert found.elements.float().tolist() == [[64, 448, 384], [32, 128, 448], [320, -448, 448]]
    assert torch.equal(dequantize(found), x)
    assert quantize(x[:1, :2], found.format).scales.tolist() == [[7 / 448]]  # half of a block


def test_a_quantized_matrix_equals_itself_alone() -> None:
    found = quantize(torch.ones(2, 2), FP8_TENSOR)
    assert found == found and found != replace(found)  # elements are not compared
    assert len({found, replace(found)}) == 2


def test_zeros_have_signs_and_elements_without_a_nan_have_0_for_it() -> None:
    x = torch.tensor([[-0.0, -0.1, 0.0, 0.1]])
    found = from_elements(to_elements(x, "e2m1"), "e2m1", 4, torch.float32)
    assert not found.any() and found.signbit().tolist() == [[True, True, False, False]]
    nan = torch.tensor([[torch.nan, 1.0]])
    for elements in ("e2m1", "int8"):
        again = from_elements(to_elements(nan, elements), elements, 2, torch.float32)
        assert again.tolist() == [[0, 1]]


def test_integer_products_in_float64_are_exact() -> None:
    generator = torch.Generator().manual_seed(6)
    a, b, bias = (
        torch.randn(*shape, generator=generator, dtype=F64) for shape in ((5, 9), (4, 9), (4,))
    )
    left, right = quantize(a, INT8_ROW), quantize(b, INT8_ROW)
    found = quantized_matmul(left, right, bias, F64, backend="int_mm")
    exact = (dequantize(left, F64)[:, None] * dequantize(right, F64)).sum(-1) + bias
    torch.testing.assert_close(found, exact, rtol=1e-13, atol=1e-13)


def test_one_scale_may_be_a_power_of_two() -> None:
    x = torch.tensor([[449.0, -3.0]])
    scale = tensor_scale(x, QuantFormat("e4m3", scale="power_of_two"))
    assert scale.shape == () and scale == 2
    assert tensor_scale(torch.zeros(2, 3), FP8_TENSOR) == 1
    with pytest.raises(KernelError, match="has several scales"):
        tensor_scale(x, QuantFormat("e2m1", scale="e4m3"))


def test_noise_decides_between_neighbours_in_e2m1_alone() -> None:
    """5 is in the middle of 4 and 6."""
    x = torch.tensor([[6.0, 5.0, -5.0, 5.0]])
    noise = torch.tensor([[0.9, 0.25, 0.25, 0.75]])
    found = dequantize(quantize(x, NVFP4, noise=noise))
    torch.testing.assert_close(found, torch.tensor([[6.0, 6.0, -6.0, 4.0]]))
    with pytest.raises(KernelError, match=r"noise rounds elements 'e2m1' .* not 'int8'; leave it"):
        quantize(x, INT8_ROW, noise=noise)


def test_integers_are_rounded_to_even_and_clipped_by_a_given_scale() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -2.5]])
    assert quantize(x, INT8_ROW).elements.tolist() == [[127, 0, 2, 2, -2]]
    given = quantize(x, QuantFormat("int8"), scale=torch.tensor(0.5, dtype=F64))
    assert given.elements.tolist() == [[127, 1, 3, 5, -5]]
    assert given.scales.dtype == torch.float32 and given.scales.shape == (1, 1)
    found = dequantize(given, torch.bfloat16)
    assert found.dtype == torch.bfloat16 and found.tolist() == [[63.5, 0.5, 1.5, 2.5, -2.5]]


@pytest.mark.parametrize(
    ("form", "shape", "expected"),
    [
        (MXFP8, (1, 33), 8 + Fraction(2 * 8, 33)),
        (MXFP8, (3, 32), 8 + Fraction(8, 32)),
        (QuantFormat("e5m2", 1, 32, "e8m0_floor"), (3, 32), 8 + Fraction(8, 32)),
        (FP8_BLOCK_2D, (129, 129), 8 + Fraction(4 * 32, 129**2)),
        (FP8_TENSOR, (5, 7), 8 + Fraction(32, 35)),
        (INT8_ROW, (5, 7), 8 + Fraction(32, 7)),
        (QuantFormat("int8", 0, 1), (5, 7), 8 + Fraction(32, 5)),
        (NVFP4, (2, 17), 4 + Fraction(4 * 8 + 32, 34)),
        (QuantFormat("e2m1", scale="e4m3"), (4, 4), 4 + Fraction(8 + 32, 16)),
    ],
    ids=str,
)
def test_bits_of_an_element_have_a_share_of_the_scales(
    form: QuantFormat, shape: tuple[int, int], expected: Fraction
) -> None:
    assert form.bits(*shape) == pytest.approx(float(expected), rel=1e-12)


def test_blocks_of_at_least_one_element_are_accepted() -> None:
    assert QuantFormat("e4m3", 1, 1).is_per_row is False
    assert ROWS.is_per_row and not ROWS.is_per_tensor and FP8_TENSOR.is_per_tensor
    assert not QuantFormat("e4m3", 0, 4).is_per_tensor and not QuantFormat("e4m3", 2).is_per_row
    for rows, columns in ((-1, 0), (0, -1)):
        with pytest.raises(KernelError, match=f"blocks of {rows} x {columns} elements"):
            QuantFormat("e4m3", rows, columns)


def emulated(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, out_dtype: Any) -> Tensor:
    """What `torch._scaled_mm` computes, with the checks of its CUDA implementation."""
    assert a.stride(1) == 1 and b.stride(0) == 1  # row-major, column-major
    assert scale_a.dtype == scale_b.dtype == torch.float32
    if scale_a.dim():
        assert scale_a.shape == (len(a), 1) and scale_b.shape == (1, b.shape[1])
    else:
        assert scale_b.dim() == 0
    return (a.double() @ b.double() * scale_a * scale_b).to(out_dtype)


@pytest.mark.parametrize("form", [FP8_TENSOR, ROWS], ids=["tensor", "rows"])
@pytest.mark.parametrize("biased", [False, True])
def test_the_scaled_product_of_torch_gets_what_it_takes(form: QuantFormat, biased: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(n, 32, generator=generator) for n in (17, 16))
    left, right = quantize(a, form), quantize(b.t().contiguous().t(), form)
    bias = torch.randn(16, generator=generator) if biased else None
    exact = dequantize(left, F64) @ dequantize(right, F64).t()
    exact = exact if bias is None else exact + bias
    with patch.object(torch, "_scaled_mm", emulated):
        found = scaled(left, right, bias, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-7)


def on_cuda(rows: int, columns: int, form: QuantFormat) -> Quantized:
    """Returns a matrix without values; only its shapes and dtypes are read."""
    elements = torch.empty(rows, columns, dtype=DTYPES[form.elements], device="cuda")
    scales = torch.empty(rows if form.rows else 1, 1, device="cuda")
    return Quantized(elements, scales, form, (rows, columns))


@pytest.mark.parametrize(
    ("left", "right", "dtype", "reason"),
    [
        ((1, 32, FP8_TENSOR), (16, 32, FP8_TENSOR), torch.bfloat16, None),
        ((3, 32, FP8_TENSOR), (48, 32, FP8_GRADIENT), torch.float16, None),
        ((3, 32, ROWS), (16, 32, ROWS), torch.bfloat16, None),
        ((3, 32, ROWS), (16, 32, ROWS), torch.float16, "it returns bfloat16, not torch.float16"),
        (
            (3, 32, ROWS),
            (16, 32, FP8_TENSOR),
            torch.bfloat16,
            "one matrix has a scale for each row",
        ),
        ((3, 32, FP8_TENSOR), (16, 32, FP8_TENSOR), torch.float32, "not for torch.float32"),
        ((3, 32, FP8_GRADIENT), (16, 32, FP8_GRADIENT), torch.bfloat16, "no two matrices in e5m2"),
        ((3, 32, FP8_TENSOR), (24, 32, FP8_TENSOR), torch.bfloat16, "of 16, not 24 and 32"),
        ((3, 40, FP8_TENSOR), (16, 40, FP8_TENSOR), torch.bfloat16, "of 16, not 16 and 40"),
        ((3, 32, MXFP8), (16, 32, MXFP8), torch.bfloat16, "it multiplies e4m3 and e5m2 with a sc"),
        ((3, 32, FP8_TENSOR), (16, 32, INT8_ROW), torch.bfloat16, "it multiplies e4m3 and e5m2"),
        ((0, 32, FP8_TENSOR), (16, 32, FP8_TENSOR), torch.bfloat16, "a matrix is empty"),
        ((3, 32, FP8_TENSOR), (0, 32, FP8_TENSOR), torch.bfloat16, "a matrix is empty"),
    ],
)
def test_shapes_and_dtypes_of_fp8_products_on_cuda(
    left: Any, right: Any, dtype: torch.dtype, reason: str | None
) -> None:
    (backend,) = (each for each in quantized_matmul.backends if each.name == "scaled_mm")
    with FakeTensorMode():
        found = backend.unsupported_reason(on_cuda(*left), on_cuda(*right), None, dtype)
    assert found is None if reason is None else found is not None and reason in found


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "reason"),
    [
        (17, 8, 8, None),
        (32, 24, 40, None),
        (16, 8, 8, "it needs at least 17 rows, not 16"),
        (17, 12, 8, "outputs and inputs must be multiples of 8, not 8 and 12"),
        (17, 8, 4, "outputs and inputs must be multiples of 8, not 4 and 8"),
        (17, 0, 8, "a matrix is empty"),
        (0, 8, 8, "a matrix is empty"),
    ],
)
def test_shapes_of_integer_products_on_cuda(
    rows: int, inputs: int, outputs: int, reason: str | None
) -> None:
    (backend,) = (each for each in quantized_matmul.backends if each.name == "int_mm")
    with FakeTensorMode():
        a, b = on_cuda(rows, inputs, INT8_ROW), on_cuda(outputs, inputs, INT8_ROW)
        assert backend.unsupported_reason(a, b, None, torch.float32) == reason
        float8 = on_cuda(rows, inputs, FP8_TENSOR)
        refused = backend.unsupported_reason(a, float8, None, torch.float32)
    assert refused is not None and refused.startswith("it multiplies int8 with a scale for each")


@pytest.mark.parametrize("form", [FP8_BLOCK, FP8_BLOCK_2D, MXFP8, NVFP4, NVFP4_2D, ROWS], ids=str)
def test_the_compiler_is_given_expressions_with_equal_numbers(
    form: QuantFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(150, 261, generator=torch.Generator().manual_seed(4))
    expected = dequantize(quantize(x, form))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(dequantize(quantize(x, form)), expected)
