"""Formats of few bits against published definitions, hand-computed numbers and torch's casts."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
    dequantize,
    quantize,
    quantized_matmul,
    tensor_scale,
)
from megatron_kernels.ops.low_precision.elements import from_elements, to_elements
from megatron_kernels.ops.low_precision.matmul import scaled

FORMATS = {
    "fp8": FP8_TENSOR,
    "e5m2": FP8_GRADIENT,
    "block": FP8_BLOCK,
    "block2d": FP8_BLOCK_2D,
    "mxfp8": MXFP8,
    "nvfp4": NVFP4,
    "nvfp4_2d": NVFP4_2D,
    "int8": INT8_ROW,
}
every_format = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


def magnitudes(exponent_bits, mantissa_bits, bias, codes):
    """Returns the values of codes, from the definition of a binary floating-point format."""
    found = []
    for code in range(codes):
        exponent, fraction = divmod(code, 2**mantissa_bits)
        lead = 1 if exponent else 0
        value = Fraction(fraction, 2**mantissa_bits) + lead
        found.append(value * Fraction(2) ** (max(exponent, 1) - bias))
    return found


# E4M3 has no infinity and one NaN, E5M2 those of IEEE 754 (Micikevicius et al. 2022, table 1).
TABLES = {
    "e4m3": magnitudes(4, 3, 7, 127),
    "e5m2": magnitudes(5, 2, 15, 124),
    "e2m1": magnitudes(2, 1, 1, 8),
}


def nearest(value, table):
    """Returns the code of the nearest magnitude, on a tie the even one, by exact arithmetic."""
    wanted = Fraction(value)
    return min(range(len(table)), key=lambda code: (abs(table[code] - wanted), code % 2))


@pytest.mark.parametrize("elements", TABLES)
def test_elements_are_those_of_the_published_tables(elements):
    table = TABLES[elements]
    assert float(table[-1]) == {"e4m3": 448, "e5m2": 57344, "e2m1": 6}[elements]
    middles = [(a + b) / 2 for a, b in pairwise(table)]
    step = torch.finfo(torch.float32).eps
    close = [float(m) * (1 + s * step) for m in middles for s in (-1, 0, 1)]
    values = [*map(float, table), *close, float(table[-1]) * 1.5]
    x = torch.tensor([values, [-v for v in values]])
    found = from_elements(to_elements(x, elements), elements, len(values), torch.float64)
    expected = [float(table[nearest(v, table)]) for v in x[0].tolist()]
    assert found[0].tolist() == expected
    assert found[1].tolist() == [-v for v in expected]


@pytest.mark.parametrize(
    ("elements", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)]
)
def test_elements_in_fp8_are_those_of_torch(elements, dtype):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) * 3
    assert torch.equal(to_elements(x, elements).view(torch.uint8), x.to(dtype).view(torch.uint8))


def test_two_elements_in_e2m1_share_a_byte_with_the_first_one_in_its_lower_half():
    x = torch.tensor([[0.5, -6.0, 1.5]])
    stored = to_elements(x, "e2m1")
    assert stored.tolist() == [[0b1111_0001, 0b0000_0011]]
    assert stored.view(torch.float4_e2m1fn_x2).shape == (1, 2)
    assert from_elements(stored, "e2m1", 3, torch.float32).tolist() == x.tolist()


def test_one_scale_makes_the_largest_magnitude_the_largest_element():
    x = torch.tensor([[1.0, -7.0], [0.5, 3.5]])
    found = quantize(x, FP8_TENSOR)
    assert float(found.scales) == 7 / 448
    assert found.elements.float().tolist() == [[64, -448], [32, 224]]
    assert dequantize(found).tolist() == x.tolist()
    assert float(quantize(x, FP8_GRADIENT).scales) == pytest.approx(7 / 57344)
    assert float(tensor_scale(x, FP8_TENSOR)) == 7 / 448
    with pytest.raises(KernelError, match="several scales"):
        tensor_scale(x, MXFP8)


def test_a_given_scale_clips_and_makes_infinities_nan():
    x = torch.tensor([[1.0, 2000.0, -math.inf, math.nan]])
    found = dequantize(quantize(x, FP8_TENSOR, scale=torch.tensor(2.0)))[0]
    assert found[:2].tolist() == [1, 896]
    assert found[2:].isnan().all()


def test_a_power_of_two_clips_nothing_and_is_the_smallest_that_does():
    for largest, scale in ((448.0, 1.0), (449.0, 2.0), (896.0, 2.0), (7.0, 2**-6), (0.0, 1.0)):
        found = quantize(torch.full((1, 4), largest), FP8_BLOCK)
        assert float(found.scales) == scale


def test_blocks_have_scales_of_their_own():
    x = torch.ones(3, 130)
    x[0, 129], x[2, 0] = 2.0**10, 2.0**-10
    rows = quantize(x, FP8_BLOCK)
    assert rows.scales.shape == (3, 2)
    assert rows.scales[0].tolist() == [2**-8, 4]  # the largest element is 448 = 1.75 * 2^8
    square = quantize(x, FP8_BLOCK_2D)
    assert square.scales.tolist() == [[2**-8, 4]]
    assert torch.equal(dequantize(rows), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "form", [FP8_BLOCK, MXFP8, QuantFormat("e4m3", 1, 32, "e8m0_floor")], ids=str
)
def test_scales_beside_powers_of_two_are_those_of_exact_arithmetic(form, dtype):
    near = (math.nextafter(1.0, 0.0), 1.0, math.nextafter(1.0, 2.0))
    if dtype is torch.float32:
        near = (1 - 2.0**-24, 1.0, 1 + 2.0**-23)
    powers = [Fraction(2) ** exponent for exponent in (-90, -1, 0, 9, 90)]
    largest = [Fraction(one) * power for one in near for power in powers]
    x = torch.zeros(len(largest), form.columns, dtype=dtype)
    x[:, 0] = torch.tensor([float(one) for one in largest], dtype=dtype)

    def scale(amax: Fraction) -> Fraction:
        power = -200
        if form.scale == "e8m0_floor":
            while Fraction(2) ** (power + 1) <= amax:
                power += 1
            return Fraction(2) ** (power - 8)
        exact = Fraction(float(torch.tensor(float(amax), dtype=dtype) / 448))
        while Fraction(2) ** power < exact:
            power += 1
        return Fraction(2) ** power

    scales = quantize(x, form).scales.to(torch.float64)[:, 0].tolist()
    assert scales == [float(scale(one)) for one in largest]


def test_mxfp8_has_scales_of_eight_bits_as_nvidia_and_ocp_define_them():
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 40] = 500.0, 3.0
    up, down = quantize(x, MXFP8), quantize(x, QuantFormat("e4m3", 1, 32, "e8m0_floor"))
    assert up.scales.dtype == torch.float8_e8m0fnu
    # OCP: floor(log2(500)) - 8 = 0 and floor(log2(3)) - 8 = -7; a scale of 2^0 clips 500 to 448.
    assert down.scales.view(torch.uint8).tolist() == [[127, 120]]
    assert float(dequantize(down)[0, 0]) == 448
    # NVIDIA: the least power of two that clips nothing, 2^ceil(log2(amax / 448)).
    assert up.scales.view(torch.uint8).tolist() == [[128, 120]]
    assert float(dequantize(up)[0, 0]) == 512  # 250 is between 240 and 256
    assert float(dequantize(up)[0, 40]) == float(dequantize(down)[0, 40]) == 3


def test_nvfp4_has_scales_relative_to_that_of_the_tensor():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 16], x[0, 17] = 2688.0, 400.0, 10.0, 3.0
    found = quantize(x, NVFP4)
    # The tensor's scale is amax / (448 * 6) = 1; blocks have 2688 / 6 = 448 and 10 / 6 -> 1.625.
    assert float(found.tensor_scale) == 1
    assert found.scales.float().tolist() == [[448, 1.625]]
    again = dequantize(found)[0]
    assert again[:2].tolist() == [2688, 448]  # 400 / 448 = 0.89 -> 1
    assert again[16:18].tolist() == [6 * 1.625, 2 * 1.625]  # 10 / 1.625 -> 6, 3 / 1.625 -> 2


def test_int8_rows_are_scaled_by_their_largest_magnitude():
    found = quantize(torch.tensor([[127.0, -1.4, 2.5], [0.0, 0.0, 0.0]]), INT8_ROW)
    assert found.scales.tolist() == [[1], [1]]
    assert found.elements.tolist() == [[127, -1, 2], [0, 0, 0]]


def test_stochastic_rounding_has_the_mean_of_the_number():
    x = torch.tensor([[0.1, 0.6, 1.3, 1.9, 2.2, 3.7, 5.5, -4.6, 6.0]])
    steps = 400
    noise = (torch.arange(steps) + 0.5) / steps
    total = torch.zeros(9, dtype=torch.float64)
    for u in noise:
        stored = to_elements(x, "e2m1", torch.full_like(x, float(u)))
        total += from_elements(stored, "e2m1", 9, torch.float64)[0]
    assert torch.allclose(total / steps, x[0].double(), atol=2 / steps)


@every_format
def test_quantizing_again_changes_nothing_and_zeros_stay_zeros(form):
    x = torch.randn(40, 70, generator=torch.Generator().manual_seed(3))
    once = dequantize(quantize(x, form))
    # The largest magnitude of a block in E4M3 may be rounded below the largest element.
    if form.scale != "e4m3":
        assert torch.equal(dequantize(quantize(once, form)), once)
    assert not dequantize(quantize(torch.zeros(3, 5), form)).any()


@every_format
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_block_with_an_infinity_or_nan_becomes_nan(form, value):
    x = torch.ones(40, 70)
    x[3, 5] = value
    found = dequantize(quantize(x, form))
    assert found[3, 5].isnan()
    if form.rows == 1:
        assert not found[4].isnan().any() or form.scale == "e4m3"


@every_format
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 150),
    size=st.integers(-60, 60),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_errors_are_at_most_half_a_step_of_the_block(form, rows, columns, size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 2.0**size
    found = dequantize(quantize(x, form), torch.float64)
    block = x.abs().amax() if form.is_per_tensor else x.abs().amax(1, keepdim=True)
    # Half of the gap between neighbours: below the element's own magnitude, and for subnormal
    # elements below that of the block.
    relative, absolute = {
        "e4m3": (2**-4, 2**-10 / 448),
        "e5m2": (2**-3, 2**-17 / 57344),
        "e2m1": (2**-2 + 2**-3, 1 / 4),
        "int8": (0.0, 0.5 / 127),
    }[form.elements]
    bound = relative * x.abs() + 2 * absolute * (x.abs().amax() if form.rows != 1 else block)
    assert bool(((found - x).abs() <= bound * (1 + 1e-9)).all())


@every_format
def test_products_equal_those_of_the_dequantized_matrices_in_float64(form):
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(n, 70, generator=generator) for n in (33, 21))
    bias = torch.randn(21, generator=generator)
    qa, qb = quantize(a, form), quantize(b, form)
    exact = dequantize(qa, torch.float64) @ dequantize(qb, torch.float64).t() + bias.double()
    for backend in quantized_matmul.backends:
        if backend.unsupported_reason(qa, qb, bias, torch.float32) is not None:
            continue
        found = quantized_matmul(qa, qb, bias, backend=backend.name)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
    if form == FP8_TENSOR:  # torch's CPU kernel, which no call uses
        found = scaled(qa, qb, bias, torch.float32)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
    found = quantized_matmul(qa, qb, bias, torch.float64, backend="reference")
    torch.testing.assert_close(found, exact, rtol=1e-13, atol=1e-13)


def test_products_are_near_those_of_the_numbers():
    generator = torch.Generator().manual_seed(7)
    a, b = (torch.randn(n, 512, generator=generator) for n in (32, 48))
    exact = a @ b.t()
    for form, error in ((FP8_TENSOR, 0.04), (MXFP8, 0.04), (NVFP4, 0.15), (INT8_ROW, 0.015)):
        found = quantized_matmul(quantize(a, form), quantize(b, form))
        assert float((found - exact).norm() / exact.norm()) < error


def test_backends_are_chosen_with_a_reason():
    a = torch.randn(32, 64)
    integers, floats = quantize(a, INT8_ROW), quantize(a, FP8_TENSOR)
    assert quantized_matmul.explain(integers, integers).backend == "int_mm"
    choice = quantized_matmul.explain(floats, floats)
    assert choice.backend == "reference"
    assert "int8" in choice.reason
    assert "thousands of times as long on cpu as on cuda" in choice.reason
    blocks = quantize(a, MXFP8)
    with pytest.raises(KernelError, match="scale for each row or tensor, not QuantFormat"):
        quantized_matmul(blocks, blocks, backend="int_mm")


def test_bits_count_scales():
    assert FP8_TENSOR.bits(1000, 1000) == pytest.approx(8, abs=1e-4)
    assert MXFP8.bits(64, 64) == 8.25
    assert FP8_BLOCK.bits(64, 256) == 8.25
    assert NVFP4.bits(1024, 1024) == pytest.approx(4.5, abs=1e-4)


def test_contradictions_are_refused():
    with pytest.raises(KernelError, match="blocks of -1 x 4"):
        QuantFormat("e4m3", -1, 4)
    with pytest.raises(KernelError, match="no exponent"):
        QuantFormat("int8", 1, 32, "e8m0_floor")
    with pytest.raises(KernelError, match="leave it out"):
        quantize(torch.ones(2, 2), MXFP8, scale=torch.tensor(1.0))
    with pytest.raises(KernelError, match="leave it out"):
        quantize(torch.ones(2, 2), MXFP8, noise=torch.zeros(2, 2))
