"""Tensors that are cast once for both dims, against casts of the matrix and of its transpose."""

import pytest
import torch
from megatron_kernels import (
    FP8_BLOCK,
    FP8_BLOCK_2D,
    FP8_GRADIENT,
    FP8_TENSOR,
    NVFP4_2D,
    KernelError,
    QuantFormat,
    dequantize,
    quantize,
    quantize_tensor,
    transpose,
)

BACKENDS = ("torch", "reference")
FORMATS = [
    QuantFormat(elements, scale=rule)
    for elements in ("e4m3", "e5m2")
    for rule in ("float32", "power_of_two")
]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 3e-3).to(dtype)


def codes(elements: torch.Tensor) -> torch.Tensor:
    return elements.contiguous().view(torch.uint8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_one_cast_has_the_bits_of_two(form: QuantFormat, dtype: torch.dtype, backend: str) -> None:
    for x in (draw(33, 70, dtype=dtype), draw(70, 33, dtype=dtype).t()):
        both = quantize_tensor(x, form.elements, form.scale, backend=backend)
        one, other = quantize(x, form), quantize(x.t(), form)
        assert torch.equal(codes(both.rows), codes(one.elements))
        assert torch.equal(codes(both.columns), codes(other.elements))
        assert torch.equal(both.scale.view(1, 1), one.scales)
        assert torch.equal(one.scales, other.scales)
        assert both.amax == x.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_given_scale_is_taken_unless_it_is_zero(backend: str) -> None:
    x = draw(9, 17)
    for scale in (torch.tensor(2e-6), torch.tensor(0.7)):
        expected = quantize(x, FP8_TENSOR, scale=scale)
        for measures in (True, False):
            found = quantize_tensor(x, scale=scale, measures=measures, backend=backend)
            assert torch.equal(codes(found.rows), codes(expected.elements))
            assert found.amax.numel() == measures
    none = quantize_tensor(x, scale=torch.tensor(0.0), backend=backend)
    assert torch.equal(codes(none.rows), codes(quantize(x, FP8_TENSOR).elements))
    assert none.scale == x.abs().max() / 448


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinities_become_nan_and_large_numbers_are_clipped(backend: str) -> None:
    x = torch.tensor([[torch.inf, 3e38, -500.0], [1.0, torch.nan, 0.0]])
    found = quantize_tensor(x, scale=torch.tensor(1.0), backend=backend)
    assert found.rows.float().nan_to_num(-1).tolist() == [[-1, 448, -448], [1, -1, 0]]
    assert found.columns.float().isnan().sum() == 2
    tiny = quantize_tensor(x, scale=torch.tensor(1e-3), backend=backend)
    assert tiny.rows.float()[0, 1] == 448  # the quotient overflows, the number is finite
    assert quantize_tensor(x, backend=backend).rows.float().isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_what_is_asked_for_is_returned(backend: str) -> None:
    x = draw(2, 5, 3)
    rows = quantize_tensor(x, columns=False, backend=backend)
    columns = quantize_tensor(x, rows=False, backend=backend)
    assert (rows.rows.shape, rows.columns.shape) == ((2, 5, 3), (0,))
    assert (columns.rows.shape, columns.columns.shape) == ((0,), (2, 3, 5))
    assert torch.equal(codes(rows.rows.mT), codes(columns.columns))
    empty = quantize_tensor(torch.ones(0, 3), backend=backend)
    assert (empty.columns.shape, float(empty.scale), float(empty.amax)) == ((3, 0), 1.0, 0.0)


@pytest.mark.parametrize("form", [FP8_TENSOR, FP8_BLOCK_2D, NVFP4_2D], ids=str)
def test_a_transpose_of_square_blocks_has_the_bits_of_another_cast(form: QuantFormat) -> None:
    x = draw(150, 261)
    found, expected = transpose(quantize(x, form)), quantize(x.t(), form)
    assert found.shape == expected.shape == (261, 150)
    assert torch.equal(codes(found.elements), codes(expected.elements))
    assert torch.equal(found.scales.float(), expected.scales.float())


def test_what_is_not_defined_is_refused() -> None:
    with pytest.raises(KernelError, match="other scales; quantize it instead"):
        transpose(quantize(draw(3, 4), FP8_BLOCK))
    with pytest.raises(KernelError, match="use quantize"):
        quantize_tensor(draw(3, 4), "int8")
    with pytest.raises(KernelError, match="needs a scale or measures=True"):
        quantize_tensor(draw(3, 4), measures=False)


def test_both_casts_are_one_memory_on_a_cpu_and_contiguous_elsewhere() -> None:
    x = draw(6, 4)
    for given in (x, x.t()):
        both = quantize_tensor(given, backend="torch")
        assert both.rows.data_ptr() == both.columns.data_ptr()  # nothing is copied
    for given in (torch.empty(6, 4, device="meta"), torch.empty(4, 6, device="meta").t()):
        both = quantize_tensor(given, backend="torch")
        assert (both.rows.shape, both.columns.shape) == ((6, 4), (4, 6))
        assert both.rows.is_contiguous() and both.columns.is_contiguous()


@pytest.mark.parametrize("form", [FP8_TENSOR, FP8_GRADIENT], ids=str)
def test_elements_of_both_orders_are_quantized_matrices(form: QuantFormat) -> None:
    x = draw(5, 7)
    both = quantize_tensor(x, form.elements)
    for found, matrix in ((both.of_rows(form), x), (both.of_columns(form), x.t())):
        expected = quantize(matrix, form)
        assert found.shape == expected.shape == tuple(matrix.shape) and found.format == form
        assert torch.equal(found.scales, expected.scales)
        assert torch.equal(dequantize(found), dequantize(expected))


def test_magnitudes_are_read_in_the_order_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, absolute, read = torch.linalg.vector_norm, torch.Tensor.abs, []

    def noted(x: torch.Tensor, order: float) -> torch.Tensor:
        read.append(x.is_contiguous())
        return norm(x, order)

    def magnitudes(x: torch.Tensor) -> torch.Tensor:
        read.append(x.is_contiguous())
        return absolute(x)

    monkeypatch.setattr(torch.linalg, "vector_norm", noted)
    monkeypatch.setattr(torch.Tensor, "abs", magnitudes)
    x = draw(5, 7)
    for matrix in (x, x.t()):
        quantize_tensor(matrix, backend="torch")
        quantize(matrix, FP8_TENSOR)
    quantize_tensor(draw(2, 5, 7), backend="torch")
    assert read == [True] * 5
