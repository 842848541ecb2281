"""Elements of few bits from real numbers, and back.

The code of an element in E2M1 has the sign in its fourth bit. The lower three bits stand for the
magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
"""

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


def to_elements(
    x: Float[Tensor, "*batch m k"],
    elements: ElementType,
    noise: Float[Tensor, "m k"] | None = None,
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
    codes = unpack_e2m1(stored)[:, :columns]
    code = (codes & 7).to(dtype)
    magnitude = torch.where(code < 4, code / 2, torch.where(code < 6, code - 2, 2 * code - 8))
    return torch.where(codes > 7, -magnitude, magnitude)


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
    gap = _by_size(magnitude, 0.5, 1.0, 2.0)
    steps = magnitude / gap
    whole = steps.round() if noise is None else (steps + (1 - noise)).ceil() - 1
    value = whole * gap
    code = _by_size(value, value * 2, value + 2, value / 2 + 4)
    return (code + 8 * torch.signbit(x)).to(torch.uint8)


def _by_size(
    magnitude: Tensor, below_2: Tensor | float, below_4: Tensor | float, other: Tensor | float
) -> Tensor:
    """Returns one of three values: neighbours in E2M1 are 0.5, 1 or 2 apart."""
    larger = torch.where(magnitude < 4, below_4, other)
    return torch.where(magnitude < 2, below_2, larger).to(magnitude.dtype)
