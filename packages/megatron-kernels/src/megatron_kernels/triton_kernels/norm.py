"""RMSNorm and LayerNorm, with the addition of a residual stream before them.

One program has whole rows in registers, so each pass reads and writes every tensor once. The
backward pass has a fixed number of programs, each of which adds up the gradients of gain and bias
over its rows; torch adds up these partial sums.
"""

import triton
import triton.language as tl
from torch import Tensor

from megatron_kernels.triton_kernels.launch import (
    accumulator,
    accumulator_dtype,
    power_of_two,
    resident_programs,
    warps,
)


@triton.jit
def _forward(
    X, ADDED, WEIGHT, BIAS, SUM, Y, MEAN, SCALE, h, x_stride, eps,
    ADDS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, CENTERS: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < h
    at = row * h + columns
    x = tl.load(X + row * x_stride + columns, mask=inside, other=0.0).to(ACC)
    if ADDS:
        x += tl.load(ADDED + at, mask=inside, other=0.0).to(ACC)
        x = x.to(SUM.dtype.element_ty)  # the norm reads what the stream holds
        tl.store(SUM + at, x, mask=inside)
        x = x.to(ACC)
    if CENTERS:
        mean = tl.sum(x, axis=0) / h
        x = tl.where(inside, x - mean, 0.0)
        tl.store(MEAN + row, mean)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / h + eps)
    tl.store(SCALE + row, scale)
    y = x * scale
    if HAS_WEIGHT:
        gain = tl.load(WEIGHT + columns, mask=inside).to(ACC)
        if ZERO_CENTERED:
            gain += 1.0
        y *= gain
    if HAS_BIAS:
        y += tl.load(BIAS + columns, mask=inside).to(ACC)
    tl.store(Y + at, y, mask=inside)


@triton.jit
def _backward(
    DY, DSUM, X, WEIGHT, MEAN, SCALE, DX, DWEIGHT, DBIAS, rows, h, x_stride,
    ADDS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, CENTERS: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < h
    gain = tl.full((BLOCK,), 1.0, ACC)
    if HAS_WEIGHT:
        gain = tl.load(WEIGHT + columns, mask=inside, other=0.0).to(ACC)
        if ZERO_CENTERED:
            gain += 1.0
    stride = tl.full((), h, tl.int64)
    of_x = tl.full((), x_stride, tl.int64)
    of_weight = tl.zeros((BLOCK,), ACC)
    of_bias = tl.zeros((BLOCK,), ACC)
    for row in range(program, rows, tl.num_programs(0)):
        at = row * stride + columns
        dy = tl.load(DY + at, mask=inside, other=0.0).to(ACC)
        x = tl.load(X + row * of_x + columns, mask=inside, other=0.0).to(ACC)
        scale = tl.load(SCALE + row)
        if CENTERS:
            x = tl.where(inside, x - tl.load(MEAN + row), 0.0)
        normal = x * scale
        of_weight += dy * normal
        of_bias += dy
        dy *= gain
        dx = dy - normal * (tl.sum(dy * normal, axis=0) / h)
        if CENTERS:
            dx -= tl.sum(dy, axis=0) / h
        dx *= scale
        if ADDS:
            dx += tl.load(DSUM + at, mask=inside).to(ACC)
        tl.store(DX + at, dx, mask=inside)
    if HAS_WEIGHT:
        tl.store(DWEIGHT + program * h + columns, of_weight, mask=inside)
    if HAS_BIAS:
        tl.store(DBIAS + program * h + columns, of_bias, mask=inside)


def norm_forward(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    centers: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the sum, its norm, and the mean and scale of each row; unused ones are empty."""
    h = x.shape[-1]
    rows = x.numel() // h if h else 0
    statistics = accumulator_dtype(x.dtype)
    total = x.new_empty(0 if added is None else x.shape)
    y = x.new_empty(x.shape)
    mean = x.new_empty(x.shape[:-1] if centers else (0,), dtype=statistics)
    scale = x.new_empty(x.shape[:-1], dtype=statistics)
    if rows:
        block = power_of_two(h)
        _forward[(rows,)](
            x, added, weight, bias, total, y, mean, scale, h, _row_stride(x), eps,
            ADDS=added is not None, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
            ZERO_CENTERED=zero_centered, CENTERS=centers, ACC=accumulator(x.dtype), BLOCK=block,
            num_warps=warps(block),
        )  # fmt: skip
    return total, y, mean, scale


def norm_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    zero_centered: bool,
    centers: bool,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of the sum, the gain and the bias; unused ones are empty."""
    h = x.shape[-1]
    rows = x.numel() // h if h else 0
    block = power_of_two(h)
    programs = resident_programs(x.device, rows, warps(block))
    dx = x.new_empty(x.shape)
    dtype = x.dtype if weight is None else weight.dtype
    partial = [
        x.new_empty((programs, h) if wanted else (0,), dtype=accumulator_dtype(x.dtype))
        for wanted in (weight is not None, has_bias)
    ]
    if rows:
        _backward[(programs,)](
            dy, dsum, x, weight, mean, scale, dx, *partial, rows, h, _row_stride(x),
            ADDS=dsum is not None, HAS_WEIGHT=weight is not None, HAS_BIAS=has_bias,
            ZERO_CENTERED=zero_centered, CENTERS=centers, ACC=accumulator(x.dtype), BLOCK=block,
            num_warps=warps(block),
        )  # fmt: skip
    of_weight, of_bias = (part.sum(0).to(dtype) if part.dim() == 2 else part for part in partial)
    return dx, of_weight, of_bias


def _row_stride(x: Tensor) -> int:
    """Returns the distance of rows in memory, which is the same for all."""
    dims = zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True)
    return next((stride for size, stride in dims if size > 1), x.shape[-1])
