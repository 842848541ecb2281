"""Elements of few bits from real numbers, and back."""

from typing import Final

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from megatron_kernels.ops.low_precision.formats import LARGEST, ElementType

DTYPES: Final[dict[ElementType, torch.dtype]] = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e2m1": torch.uint8,
    "int8": torch.int8,
}
"""Dtype in which elements are stored. Two elements in E2M1 share a byte."""

E2M1_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of E2M1, by the lower three bits of their code. The fourth bit is the sign."""

# Midpoints of neighbours. A number on a midpoint becomes the neighbour with the even code, so every
# second limit lies just below its midpoint.
_MIDPOINTS: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def to_elements(
    x: Float[Tensor, "m k"], elements: ElementType, noise: Float[Tensor, "m k"] | None = None
) -> Tensor:
    """Returns numbers as elements, rounded to the nearest (ties to even) and clipped.

    A NaN stays one, except in E2M1 and in 8-bit integers, which have none: there it becomes 0, and
    the scale of its block is NaN.

    Args:
        x: Numbers in float32 or float64.
        elements: How elements are stored.
        noise: Numbers in [0, 1) for stochastic rounding, for E2M1 alone. Defaults to rounding to
            the nearest.

    Returns:
        Elements `[m, k]`, or `[m, ceil(k / 2)]` bytes of E2M1.
    """
    largest = LARGEST[elements]
    clipped = x.clamp(-largest, largest)
    if elements == "e2m1":
        return pack_e2m1(_e2m1_codes(clipped.nan_to_num(0.0), noise))
    if elements == "int8":
        return clipped.nan_to_num(0.0).round().to(torch.int8)
    return clipped.to(DTYPES[elements])


def from_elements(
    stored: Tensor, elements: ElementType, columns: int, dtype: torch.dtype
) -> Float[Tensor, "m k"]:
    """Returns elements as numbers.

    Args:
        stored: Elements, as returned by `to_elements`.
        elements: How elements are stored.
        columns: Number of columns.
        dtype: Dtype of the numbers.
    """
    if elements != "e2m1":
        return stored.to(dtype)
    codes = unpack_e2m1(stored)[:, :columns].long()
    values = torch.tensor(E2M1_VALUES, dtype=dtype, device=stored.device)
    return torch.cat((values, -values))[codes]


def pack_e2m1(codes: UInt8[Tensor, "m k"]) -> UInt8[Tensor, "m bytes"]:
    """Returns codes of four bits as bytes, as in `torch.float4_e2m1fn_x2`.

    The code of an even column is in the lower half of its byte. An odd number of columns is padded.
    """
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpack_e2m1(packed: UInt8[Tensor, "m bytes"]) -> UInt8[Tensor, "m k"]:
    """Returns the codes in bytes, in the order of columns."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def _e2m1_codes(x: Tensor, noise: Tensor | None) -> Tensor:
    """Returns the codes of numbers of magnitudes up to 6."""
    magnitude = x.abs()
    if noise is None:
        limits = torch.tensor(_MIDPOINTS, dtype=x.dtype, device=x.device)
        below = torch.nextafter(limits[1::2], limits.new_zeros(()))
        limits[1::2] = below
        code = torch.bucketize(magnitude, limits)
    else:
        values = torch.tensor(E2M1_VALUES, dtype=x.dtype, device=x.device)
        lower = torch.bucketize(magnitude, values[1:], right=True)
        upper = (lower + 1).clamp(max=len(E2M1_VALUES) - 1)
        gap = (values[upper] - values[lower]).clamp(min=0.5)
        code = torch.where(noise < (magnitude - values[lower]) / gap, upper, lower)
    return (code + 8 * torch.signbit(x)).to(torch.uint8)
