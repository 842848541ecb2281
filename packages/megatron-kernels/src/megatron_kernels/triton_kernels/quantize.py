"""Casts to FP8 with one scale: one read for the largest magnitude, one for both casts.

Bits of numbers that are not negative are ordered as the numbers, with NaN above infinity, so the
largest magnitude of all programs is an atomic maximum of integers. Every program of the cast finds
the scale from it again, which is cheaper than a kernel for one number.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_kernels.ops.low_precision.elements import DTYPES
from megatron_kernels.ops.low_precision.formats import LARGEST, ElementType
from megatron_kernels.triton_kernels.launch import accumulator, accumulator_dtype

_BLOCK: Final = 4096
_TILE: Final = 128
_LAYOUTS: Final[dict[ElementType, tuple[int, int]]] = {"e4m3": (3, 7), "e5m2": (2, 15)}
"""Bits of the mantissa, and bias of the exponent."""


@triton.jit
def _magnitude(x, BITS: tl.constexpr, ACC: tl.constexpr):
    """Returns the bits of absolute values."""
    bits = x.to(ACC).to(BITS, bitcast=True)
    return bits & (0x7FFFFFFFFFFFFFFF if tl.int64 == BITS else 0x7FFFFFFF)


@triton.jit
def _amax(
    X, GIVEN, AMAX, numel,
    HAS_GIVEN: tl.constexpr, ACC: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    needed = True
    if HAS_GIVEN:  # the cast finds the magnitude of a tensor with a scale
        needed = tl.load(GIVEN) <= 0
    if needed:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(X + at, mask=at < numel, other=0.0)
        tl.atomic_max(AMAX, tl.max(_magnitude(x, BITS, ACC), axis=0))


@triton.jit
def _own_scale(amax, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, ACC: tl.constexpr):
    """Returns the scale of a tensor with this largest magnitude."""
    tiny = 1.1754943508222875e-38
    scale = tl.div_rn(amax, tl.full((), LARGEST, ACC)) if tl.float32 == ACC else amax / LARGEST
    scale = tl.where(scale < tiny, tl.full((), tiny, ACC), scale)
    if POWER_OF_TWO:
        if tl.float32 == ACC:
            bits = scale.to(tl.int32, bitcast=True)
            scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        else:
            bits = scale.to(tl.int64, bitcast=True)
            scale = ((bits + 0xFFFFFFFFFFFFF) >> 52 << 52).to(tl.float64, bitcast=True)
    scale = tl.where(amax > 0, scale, 1.0)
    return tl.where(amax < float("inf"), scale, float("nan"))


@triton.jit
def _codes(y, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Returns the codes of numbers in FP8, to the nearest, ties to even, and clipped; keeps NaN."""
    size = tl.abs(y)
    size = tl.where(size > LARGEST, LARGEST, size)
    bits = size.to(tl.int32, bitcast=True)
    dropped: tl.constexpr = 23 - MANTISSA
    half: tl.constexpr = (1 << (dropped - 1)) - 1
    rounded = (bits + half + ((bits >> dropped) & 1)) >> dropped
    normal = rounded - ((127 - BIAS) << MANTISSA)
    # Subnormal numbers are multiples of the smallest one: the sum with 1.5 * 2^23 rounds to them.
    multiples = size * (1 << (BIAS - 1 + MANTISSA)) + 12582912.0
    subnormal = multiples.to(tl.int32, bitcast=True) - 0x4B400000
    code = tl.where(rounded < ((128 - BIAS) << MANTISSA), subnormal, normal)
    code = tl.where(y == y, code, 0x7F)
    return (code | ((y.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _cast(
    X, GIVEN, AMAX, SCALE, ROWS, COLUMNS, m, k,
    HAS_GIVEN: tl.constexpr, MEASURES: tl.constexpr, HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, ACC: tl.constexpr, BITS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64) * m * k
    across = tl.cdiv(k, TILE)
    row = (tl.program_id(0) // across).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(0) % across).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < m)[:, None] & (column < k)[None, :]
    x = tl.load(X + batch + row[:, None] * k + column[None, :], mask=inside, other=0.0).to(ACC)
    given = 0.0
    if HAS_GIVEN:
        given = tl.load(GIVEN).to(ACC)
    if MEASURES:
        if HAS_GIVEN and given > 0:
            tl.atomic_max(AMAX, tl.max(tl.max(_magnitude(x, BITS, ACC), axis=1), axis=0))
        # Of a tensor with a scale, the maximum is not complete, and not used.
        amax = tl.load(AMAX).to(ACC, bitcast=True)
        scale = _own_scale(amax, LARGEST, POWER_OF_TWO, ACC)
        if HAS_GIVEN:
            scale = tl.where(given > 0, given, scale)
    else:
        scale = given
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(SCALE, scale)
    if tl.float64 == ACC:
        y = x / scale
    elif POWER_OF_TWO and not HAS_GIVEN:
        y = x * (1.0 / scale)  # exact
    else:
        y = tl.div_rn(x, tl.zeros_like(x) + scale)
    y = tl.where(tl.abs(x) < float("inf"), y, float("nan"))
    stored = _codes(y.to(tl.float32), LARGEST, MANTISSA, BIAS)
    if HAS_ROWS:
        tl.store(ROWS + batch + row[:, None] * k + column[None, :], stored, mask=inside)
    if HAS_COLUMNS:
        at = COLUMNS + batch + column[:, None] * m + row[None, :]
        tl.store(at, tl.trans(stored), mask=tl.trans(inside))


def quantize_tensor(
    x: Tensor,
    given: Tensor | None,
    elements: ElementType,
    power_of_two: bool,
    rows: bool,
    columns: bool,
    measures: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns elements of rows and of columns, the scale and the largest magnitude."""
    *batch, m, k = x.shape
    exact = accumulator_dtype(x.dtype)
    bits = torch.int64 if exact == torch.float64 else torch.int32
    shared: dict[str, Any] = {
        "HAS_GIVEN": given is not None,
        "ACC": accumulator(x.dtype),
        "BITS": tl.int64 if exact == torch.float64 else tl.int32,
    }
    amax = torch.zeros((), dtype=bits, device=x.device)
    scale = torch.empty((), dtype=exact, device=x.device)
    dtype, (mantissa, bias) = DTYPES[elements], _LAYOUTS[elements]
    of_rows = x.new_empty(x.shape if rows else 0, dtype=dtype)
    of_columns = x.new_empty((*batch, k, m) if columns else 0, dtype=dtype)
    if given is not None:
        given = given.to(exact)
    if x.numel():
        if measures:
            grid = (triton.cdiv(x.numel(), _BLOCK),)
            _amax[grid](x, given, amax, x.numel(), BLOCK=_BLOCK, **shared)
        tiles = triton.cdiv(m, _TILE) * triton.cdiv(k, _TILE)
        _cast[(tiles, x.numel() // (m * k))](
            x, given, amax, scale, of_rows.view(torch.uint8), of_columns.view(torch.uint8), m, k,
            MEASURES=measures, HAS_ROWS=rows, HAS_COLUMNS=columns,
            LARGEST=LARGEST[elements], MANTISSA=mantissa, BIAS=bias,
            POWER_OF_TWO=power_of_two, TILE=_TILE, num_warps=8,
            **shared,
        )  # fmt: skip
    else:
        scale.fill_(1.0)
        if given is not None:
            scale = torch.where(given > 0, given, scale) if measures else given.clone()
    found = amax.view(exact)
    return of_rows, of_columns, scale, found if measures else found.new_empty(0)
