"""Casts of a tensor to FP8 by our Triton kernels."""

from typing import Final

import torch
from torch import Tensor

from megatron_kernels.ops import triton_op
from megatron_kernels.ops.low_precision.elements import DTYPES
from megatron_kernels.ops.low_precision.formats import ElementType, ScaleType
from megatron_kernels.ops.low_precision.tensor_elements import TensorElements
from megatron_kernels.ops.triton_op import TritonOp

_QUANTIZE: Final = TritonOp(
    "quantize_tensor(Tensor x, Tensor? given, str elements, bool power_of_two, bool rows, "
    "bool columns, bool measures) -> (Tensor, Tensor, Tensor, Tensor)",
    "megatron_kernels.triton_kernels.quantize",
    "megatron_kernels.ops.low_precision.triton",
)


def quantize_tensor_fake(
    x: Tensor,
    given: Tensor | None,
    elements: ElementType,
    power_of_two: bool,
    rows: bool,
    columns: bool,
    measures: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the outputs of `quantize_tensor` without values."""
    *batch, m, k = x.shape
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (
        x.new_empty(x.shape if rows else 0, dtype=DTYPES[elements]),
        x.new_empty((*batch, k, m) if columns else 0, dtype=DTYPES[elements]),
        x.new_empty((), dtype=exact),
        x.new_empty(() if measures else 0, dtype=exact),
    )


def quantize_tensor(
    x: Tensor,
    elements: ElementType,
    rule: ScaleType,
    given: Tensor | None,
    rows: bool,
    columns: bool,
    measures: bool,
) -> TensorElements:
    """Casts in two kernels, or in one if the scale is given and no magnitude is wanted."""
    swaps = x.dim() == 2 and x.stride(0) == 1 and x.stride(1) > 1
    source = x.t() if swaps else x.contiguous()
    wanted = (columns, rows) if swaps else (rows, columns)
    first, second, scale, amax = _QUANTIZE(
        source.detach(), given, elements, rule == "power_of_two", *wanted, measures
    )
    found = (second, first) if swaps else (first, second)
    return TensorElements(*found, scale, amax)


def unsupported_reason(
    x: Tensor,
    elements: ElementType,
    rule: ScaleType,
    given: Tensor | None,
    rows: bool,
    columns: bool,
    measures: bool,
) -> str | None:
    """Returns why the kernels do not support these arguments."""
    return triton_op.unsupported_reason(x)
