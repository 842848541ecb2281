"""Quantization of a matrix, and its inverse.

    quantized = quantize(x, MXFP8)
    x_again = dequantize(quantized, torch.float32)

A block of zeros has the scale 1. Blocks with an infinity or a NaN consist of NaN afterwards, so
that an overflow of a gradient is still found.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from megatron_kernels.errors import KernelError
from megatron_kernels.ops.low_precision.elements import (
    from_elements,
    pack_e2m1,
    to_elements,
    unpack_e2m1,
)
from megatron_kernels.ops.low_precision.formats import (
    LARGEST,
    LARGEST_EXPONENT,
    QuantFormat,
)
from megatron_kernels.ops.precision import upcast

_E8M0_RANGE = (-127, 127)
_FLOAT32_RANGE = (-126, 127)
_FRACTION_BITS, _BIAS = 52, 1023  # of float64


@dataclass(frozen=True, eq=False)
class Quantized:
    """A matrix in few bits.

    Attributes:
        elements: Elements `[m, k]` in `torch.float8_e4m3fn`, `torch.float8_e5m2` or `torch.int8`;
            bytes `[m, ceil(k / 2)]` of E2M1, as in `torch.float4_e2m1fn_x2`.
        scales: Factors of the blocks, `[ceil(m / rows), ceil(k / columns)]`, in float32 (float64
            if the matrix was), `torch.float8_e8m0fnu` or `torch.float8_e4m3fn`. A block of all
            rows or columns has a factor even if there are none.
        format: The format.
        shape: Rows and columns.
        tensor_scale: Factor of all elements, a scalar; None unless scales are in E4M3.
    """

    elements: Tensor
    scales: Tensor
    format: QuantFormat
    shape: tuple[int, int]
    tensor_scale: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Device of the elements."""
        return self.elements.device


def quantize(
    x: Float[Tensor, "m k"],
    format: QuantFormat,  # noqa: A002
    *,
    scale: Float[Tensor, ""] | None = None,
    noise: Float[Tensor, "m k"] | None = None,
) -> Quantized:
    """Returns a matrix in few bits.

    Args:
        x: The matrix.
        format: The format.
        scale: Factor of all elements, for a format with one scale. Magnitudes above it are clipped;
            infinities become NaN. Defaults to the factor that clips nothing.
        noise: Numbers in [0, 1) for stochastic rounding of E2M1. Defaults to rounding to the
            nearest.

    Raises:
        KernelError: A scale or noise is given for a format that takes none.
    """
    numbers = upcast(x)
    m, k = numbers.shape
    if noise is not None and format.elements != "e2m1":
        raise KernelError(
            f"noise rounds elements 'e2m1' stochastically, not {format.elements!r}; leave it out"
        )
    if scale is not None:
        if not format.is_per_tensor:
            raise KernelError(
                f"a scale of all elements is given, but {format} has one for each block; leave it "
                "out"
            )
        finite = numbers.masked_fill(numbers.isinf(), torch.nan)
        scales = scale.to(numbers.dtype).view(1, 1)
        return Quantized(to_elements(finite / scales, format.elements), scales, format, (m, k))
    amax = block_amax(numbers, format)
    scales, tensor_scale = scales_of_blocks(amax, format)
    factors = _factors(scales, tensor_scale, numbers.dtype)
    divisor = _per_element(factors, format, m, k)
    # A scale in E4M3 may be rounded to zero; the elements of its block are then zero.
    divided = torch.where(divisor == 0, 0.0, numbers / divisor)
    elements = to_elements(divided, format.elements, noise)
    return Quantized(elements, scales, format, (m, k), tensor_scale)


def dequantize(quantized: Quantized, dtype: torch.dtype = torch.float32) -> Float[Tensor, "m k"]:
    """Returns the numbers of a quantized matrix.

    Args:
        quantized: The matrix.
        dtype: Dtype of the result. Products are computed in float32, or in float64 for it.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    form, (m, k) = quantized.format, quantized.shape
    numbers = from_elements(quantized.elements, form.elements, k, exact)
    factors = _factors(quantized.scales, quantized.tensor_scale, exact)
    return (numbers * _per_element(factors, form, m, k)).to(dtype)


def transpose(quantized: Quantized) -> Quantized:
    """Returns the transposed matrix, of a format whose blocks have as many rows as columns.

    Its elements and scales are those that `quantize` finds for the transposed matrix.

    Raises:
        KernelError: The blocks of the format are not square.
    """
    form, (m, k) = quantized.format, quantized.shape
    if form.rows != form.columns:
        raise KernelError(f"the transpose of {form} has other scales; quantize it instead")
    elements = quantized.elements
    if form.elements == "e2m1":
        elements = pack_e2m1(unpack_e2m1(elements)[:, :k].t())
    scales = quantized.scales.t()
    return replace(
        quantized,
        elements=elements.t() if elements is quantized.elements else elements,
        scales=scales,
        shape=(k, m),
    )


def tensor_scale(x: Float[Tensor, "m k"], format: QuantFormat) -> Float[Tensor, ""]:  # noqa: A002
    """Returns the scale of all elements that `quantize` chooses.

    Raises:
        KernelError: The format has several scales.
    """
    if not format.is_per_tensor or format.scale == "e4m3":
        raise KernelError(f"{format} has several scales; quantize the matrix instead")
    return scales_of_blocks(block_amax(upcast(x), format), format)[0].view(())


def block_amax(x: Float[Tensor, "m k"], format: QuantFormat) -> Float[Tensor, "down across"]:  # noqa: A002
    """Returns the largest magnitude of each block; NaN if the block has one."""
    m, k = x.shape
    if not x.numel():
        down = -(-m // format.rows) if format.rows else 1
        across = -(-k // format.columns) if format.columns else 1
        return x.new_zeros(down, across)
    if format.is_per_tensor:
        # In the order of memory: a reduction of a transposed matrix took a GPU ten times as long.
        ordered = x.t() if x.stride(0) == 1 else x
        return ordered.abs().amax().view(1, 1)
    rows, columns = format.rows or m, format.columns or k
    padded = x
    if m % rows or k % columns:
        padded = functional.pad(x, (0, -k % columns, 0, -m % rows))
    down, across = padded.shape[0] // rows, padded.shape[1] // columns
    return padded.reshape(down, rows, across, columns).abs().amax((1, 3))


def scales_of_blocks(amax: Tensor, format: QuantFormat) -> tuple[Tensor, Tensor | None]:  # noqa: A002
    """Returns the factors of blocks with these largest magnitudes, and that of the tensor."""
    largest, tiny = format.largest, torch.finfo(torch.float32).tiny
    if format.scale == "e4m3":
        of_tensor = amax.amax() if amax.numel() else amax.new_zeros(())
        above = LARGEST["e4m3"] * largest
        tensor_scale = torch.where(of_tensor > 0, (of_tensor / above).clamp(min=tiny), 1.0)
        tensor_scale = tensor_scale.masked_fill(~of_tensor.isfinite(), torch.nan)
        relative = (amax / largest / tensor_scale).clamp(max=LARGEST["e4m3"])
        return relative.to(torch.float8_e4m3fn), tensor_scale
    exact = (amax / largest).clamp(min=tiny)
    if format.scale == "float32":
        scales = torch.where(amax > 0, exact, 1.0)
    elif format.scale == "e8m0_floor":
        exponents, _ = _exponents(amax)
        below = 1 + LARGEST_EXPONENT[format.elements]
        scales = _power_of_two(exponents - below, amax, _E8M0_RANGE)
    else:
        exponents, is_power = _exponents(exact)
        rounded_up = exponents - is_power.to(exponents.dtype)
        # Normal numbers of float32, all of which E8M0 has.
        scales = _power_of_two(rounded_up, amax, _FLOAT32_RANGE)
    scales = scales.masked_fill(~amax.isfinite(), torch.nan)
    return (scales.to(torch.float8_e8m0fnu) if "e8m0" in format.scale else scales), None


def _exponents(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns e of 2^(e - 1) <= x < 2^e, and whether x is 2^(e - 1), of positive normal numbers."""
    if magnitudes.dtype is torch.float64:
        # Compiled for a CPU, frexp of float64 gives C++ that does not compile (torch 2.13, 2.15).
        bits = magnitudes.view(torch.int64)
        return (bits >> _FRACTION_BITS) - (_BIAS - 1), (bits & ((1 << _FRACTION_BITS) - 1)) == 0
    mantissa, exponents = torch.frexp(magnitudes)  # of a mantissa from 1/2 to 1
    return exponents, mantissa == 0.5


def _power_of_two(exponents: Tensor, amax: Tensor, limits: tuple[int, int]) -> Tensor:
    """Returns powers of two; 1 for blocks of zeros."""
    bounded = torch.where(amax > 0, exponents, 0).clamp(*limits)
    return torch.ldexp(torch.ones_like(amax), bounded)


def _factors(scales: Tensor, tensor_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns the factor of each block."""
    factors = scales.to(dtype)
    return factors if tensor_scale is None else factors * tensor_scale.to(dtype)


def _per_element(factors: Tensor, format: QuantFormat, m: int, k: int) -> Tensor:  # noqa: A002
    """Returns a factor for each element, `[m, k]` or a shape that broadcasts to it."""
    if format.rows > 1:
        factors = _repeated(factors, format.rows, 0, m)
    if format.columns > 1:
        factors = _repeated(factors, format.columns, 1, k)
    return factors


def _repeated(x: Tensor, times: int, dim: int, length: int) -> Tensor:
    """Returns each slice `times` times in a row, `length` in all."""
    if torch.compiler.is_compiling() and x.device.type == "cpu":
        # Inductor stops with an AssertionError when it splits a loop at the repetition and fuses
        # the result with transposed elements (torch 2.13, 2.15). This index it does not split.
        return x.index_select(dim, torch.arange(length, device=x.device) // times)
    return x.repeat_interleave(times, dim).narrow(dim, 0, length)
