"""Calls of operations with operands in few bits at the sizes of models; see `workloads`."""

from functools import partial
from typing import Any, Final

import torch

from megatron_kernels.inputs import InputGenerator
from megatron_kernels.ops.low_precision.formats import (
    FP8_GRADIENT,
    FP8_TENSOR,
    INT8_ROW,
    MXFP8,
    QuantFormat,
)
from megatron_kernels.ops.low_precision.matmul import quantized_matmul
from megatron_kernels.ops.low_precision.quantize import quantize
from megatron_kernels.ops.low_precision.quantize_tensor import quantize_tensor
from megatron_kernels.ops.moe.quantized_grouped_matmul import (
    quantized_grouped_gradient,
    quantized_grouped_matmul,
)
from megatron_kernels.workload import EXPERTS, Shape, Workload


def _both_casts(draw: InputGenerator, shape: Shape, *, measures: bool) -> tuple[Any, ...]:
    """Returns an input that is cast for both products that read it, with its own scale or not."""
    x = draw.normal(shape.tokens, shape.width).detach()
    scale = None if measures else torch.tensor(2.0**-7, device=x.device)
    return (x, "e4m3", "float32", scale, True, True, measures)


def _up(draw: InputGenerator, shape: Shape, a: QuantFormat, b: QuantFormat) -> tuple[Any, ...]:
    """Returns the input and the weight of a feed-forward layer."""
    x = draw.normal(shape.tokens, shape.width).detach()
    weight = draw.normal(4 * shape.width, shape.width).detach()
    return (quantize(x, a), quantize(weight, b), None, draw.dtype)


def _experts(draw: InputGenerator, shape: Shape, *, gradient: bool) -> tuple[Any, ...]:
    """Returns rows in equal groups with a weight for each, or with the gradients of results."""
    rows, each = 2 * shape.tokens, 2 * shape.tokens // EXPERTS
    other = (rows, shape.width) if gradient else (EXPERTS, shape.width, shape.width)
    found = [quantize_tensor(draw.normal(*s).detach()) for s in ((rows, shape.width), other)]
    operands = [tensor for both in found for tensor in (both.rows, both.scale.float())]
    return (*operands, torch.full((EXPERTS,), each, device=draw.device), draw.dtype)


def _products_up(shape: Shape) -> float:
    return 8.0 * shape.tokens * shape.width**2


def _products_of_experts(shape: Shape) -> float:
    return 4.0 * shape.tokens * shape.width**2


LOW_PRECISION_WORKLOADS: Final = (
    Workload(quantize_tensor, "own scale", partial(_both_casts, measures=True)),
    Workload(quantize_tensor, "given scale", partial(_both_casts, measures=False)),
    Workload(quantized_matmul, "fp8", partial(_up, a=FP8_TENSOR, b=FP8_TENSOR), _products_up),
    Workload(
        quantized_matmul, "fp8, e5m2", partial(_up, a=FP8_GRADIENT, b=FP8_TENSOR), _products_up
    ),
    Workload(quantized_matmul, "int8", partial(_up, a=INT8_ROW, b=INT8_ROW), _products_up),
    Workload(quantized_matmul, "mxfp8", partial(_up, a=MXFP8, b=MXFP8), _products_up),
    Workload(
        quantized_grouped_matmul, "fp8", partial(_experts, gradient=False), _products_of_experts
    ),
    Workload(
        quantized_grouped_gradient, "fp8", partial(_experts, gradient=True), _products_of_experts
    ),
)
"""What `megatron-kernels bench` measures of them.

The bound is a product in the dtype of the run, which matrix units for fewer bits exceed.
"""
