"""Calls of operations with operands in few bits; see `megatron_kernels.cases`."""

from functools import partial
from typing import Any, Final

import torch

from megatron_kernels.case import Case
from megatron_kernels.inputs import InputGenerator
from megatron_kernels.ops.low_precision.formats import (
    FP8_GRADIENT,
    FP8_TENSOR,
    INT8_ROW,
    MXFP8,
    NVFP4,
    ElementType,
    QuantFormat,
)
from megatron_kernels.ops.low_precision.matmul import quantized_matmul
from megatron_kernels.ops.low_precision.quantize import quantize
from megatron_kernels.ops.low_precision.quantize_tensor import quantize_tensor
from megatron_kernels.ops.moe.quantized_grouped_matmul import (
    quantized_grouped_gradient,
    quantized_grouped_matmul,
)


def _quantized(
    draw: InputGenerator, a: QuantFormat, b: QuantFormat, outputs: int = 29, inputs: int = 43
) -> tuple[Any, ...]:
    x, weight = draw.normal(draw.rows(21), inputs), draw.normal(inputs, outputs)
    quantized = quantize(x.detach(), a), quantize(weight.detach().t(), b)  # as in backward passes
    return (*quantized, draw.normal(outputs), draw.dtype)


def _elements(
    draw: InputGenerator, elements: ElementType, *, given: bool = False, batch: int = 0
) -> tuple[Any, ...]:
    x = draw.normal(*((batch,) if batch else ()), draw.rows(21), 43).detach()
    # Powers of two, with which float32 and float64 have the same quotients.
    scale = torch.tensor(2.0**-7, device=x.device, dtype=torch.float32) if given else None
    return (x, elements, "power_of_two", scale, True, True, True)


def _grouped_elements(
    draw: InputGenerator, elements: ElementType, *, gradient: bool = False
) -> tuple[Any, ...]:
    counts = (7, 0, 12)
    rows = draw.rows(sum(counts) + 3)  # the last ones are in no group
    groups = torch.tensor([min(count, rows // len(counts)) for count in counts])
    other = (rows, 32) if gradient else (len(counts), 48, 32)
    shapes = ((rows, 48 if gradient else 32), other)
    found = [quantize_tensor(draw.normal(*shape).detach(), elements) for shape in shapes]
    operands = [each for both in found for each in (both.rows, both.scale.float())]
    return (*operands, groups.to(draw.device), draw.dtype)


LOW_PRECISION_CASES: Final = (
    Case(quantized_matmul, "fp8", partial(_quantized, a=FP8_TENSOR, b=FP8_GRADIENT)),
    Case(
        quantized_matmul,
        "fp8, multiples of 16",
        partial(_quantized, a=FP8_TENSOR, b=FP8_GRADIENT, outputs=48, inputs=64),
    ),
    Case(quantized_matmul, "int8", partial(_quantized, a=INT8_ROW, b=INT8_ROW)),
    Case(
        quantized_matmul,
        "int8, multiples of 16",
        partial(_quantized, a=INT8_ROW, b=INT8_ROW, outputs=48, inputs=64),
    ),
    Case(quantized_matmul, "mxfp8", partial(_quantized, a=MXFP8, b=MXFP8)),
    Case(quantized_grouped_matmul, "e4m3", partial(_grouped_elements, elements="e4m3")),
    Case(quantized_grouped_matmul, "e5m2", partial(_grouped_elements, elements="e5m2")),
    Case(
        quantized_grouped_gradient,
        "e4m3",
        partial(_grouped_elements, elements="e4m3", gradient=True),
    ),
    Case(quantize_tensor, "e4m3", partial(_elements, elements="e4m3")),
    Case(quantize_tensor, "e5m2", partial(_elements, elements="e5m2", batch=3)),
    Case(quantize_tensor, "given scale", partial(_elements, elements="e4m3", given=True)),
    Case(quantized_matmul, "nvfp4", partial(_quantized, a=NVFP4, b=NVFP4)),
)
