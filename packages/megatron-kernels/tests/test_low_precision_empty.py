"""Matrices without rows or columns in formats of few bits."""

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
    QuantFormat,
    dequantize,
    quantize,
    quantized_matmul,
    tensor_scale,
    transpose,
)

BLOCKS_OF_NO_ROWS_AND_OF_NO_COLUMNS = {
    FP8_TENSOR: ((1, 1), (1, 1)),
    FP8_GRADIENT: ((1, 1), (1, 1)),
    QuantFormat("int8"): ((1, 1), (1, 1)),
    QuantFormat("e2m1", scale="e4m3"): ((1, 1), (1, 1)),
    QuantFormat("e4m3", 0, 1): ((1, 20), (1, 0)),
    QuantFormat("e4m3", 1, 0): ((0, 1), (3, 1)),
    INT8_ROW: ((0, 1), (3, 1)),
    FP8_BLOCK: ((0, 1), (3, 0)),
    FP8_BLOCK_2D: ((0, 1), (1, 0)),
    MXFP8: ((0, 1), (3, 0)),
    QuantFormat("e4m3", 1, 0, "e8m0_floor"): ((0, 1), (3, 1)),
    NVFP4: ((0, 2), (3, 0)),
    NVFP4_2D: ((0, 2), (1, 0)),
}
every_format = pytest.mark.parametrize("form", BLOCKS_OF_NO_ROWS_AND_OF_NO_COLUMNS, ids=str)


@every_format
def test_a_matrix_without_elements_is_quantized_and_read_again(form: QuantFormat) -> None:
    blocks = (*BLOCKS_OF_NO_ROWS_AND_OF_NO_COLUMNS[form], None)
    for shape, expected in zip(((0, 20), (3, 0), (0, 0)), blocks, strict=True):
        for dtype in (torch.float32, torch.float64):
            quantized = quantize(torch.zeros(shape, dtype=dtype), form)
            assert expected in (quantized.scales.shape, None)
            assert (quantized.scales.float() == (0 if form.scale == "e4m3" else 1)).all()
            assert quantized.tensor_scale in (None, 1)
            assert quantized.shape == dequantize(quantized, dtype).shape == shape
            if form.rows == form.columns:
                assert dequantize(transpose(quantized)).shape == shape[::-1]
            if form.is_per_tensor and form.scale != "e4m3":
                scale = tensor_scale(torch.zeros(shape, dtype=dtype), form)
                assert scale.shape == () and scale == 1


@every_format
def test_a_sum_over_no_columns_is_zero_and_a_product_of_no_rows_has_none(form: QuantFormat) -> None:
    bias = torch.tensor([1.0, -2.0])
    no_columns = (torch.zeros(3, 0), torch.zeros(2, 0), bias.expand(3, 2))
    no_rows = (torch.zeros(0, 20), torch.ones(2, 20), torch.zeros(0, 2))
    no_outputs = (torch.ones(3, 20), torch.zeros(0, 20), torch.zeros(3, 0))
    for left, right, expected in (no_columns, no_rows, no_outputs):
        a, b = quantize(left, form), quantize(right, form)
        added = bias[: len(right)]
        for backend in quantized_matmul.backends:
            if backend.unsupported_reason(a, b, added, torch.float32) is None:
                assert quantized_matmul(a, b, added, backend=backend.name).equal(expected)
                without = quantized_matmul(a, b, backend=backend.name)
                assert without.shape == expected.shape and not without.any()
