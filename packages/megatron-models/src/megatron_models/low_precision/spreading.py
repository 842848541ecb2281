"""Stochastic rounding and Hadamard transforms of the recipe for FP4 (arXiv 2509.25149).

Neither has a random state: rounding is a hash of the number and its index, and the signs of the
transform are constants. A step that is computed again has the same gradients.
"""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

WIDTH: Final = 16
"""Tokens that a transform mixes."""

_SIGNS: Final = 0b0110_1011_0001_1101  # any constant signs; equal for all layers and steps
_MULTIPLIERS: Final = (0x1E3779B1, 0x25EBCA6B, 0x32B2AE35)  # products with 32 bits fit in int64


def hashed_noise(x: Float[Tensor, "m k"]) -> Float[Tensor, "m k"]:
    """Returns numbers in [0, 1) that are hashes of the elements of `x` and their indices."""
    first, second, third = _MULTIPLIERS
    index = torch.arange(x.numel(), device=x.device).view(x.shape)
    bits = x.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF
    mixed = (bits * first & 0xFFFFFFFF) ^ (index * second & 0xFFFFFFFF)
    mixed = ((mixed ^ mixed >> 15) * second) & 0xFFFFFFFF
    mixed = ((mixed ^ mixed >> 13) * third) & 0xFFFFFFFF
    return ((mixed ^ mixed >> 16) >> 8).to(x.dtype) / 2**24


def hadamard(x: Float[Tensor, "m k"]) -> Float[Tensor, "m padded"]:
    """Returns each 16 columns times a signed orthogonal Hadamard matrix, after padding with zeros.

    The product `a b^T` of two transformed matrices is that of the matrices.
    """
    padded = functional.pad(x, (0, -x.shape[1] % WIDTH))
    matrix = torch.ones(1, 1, dtype=x.dtype, device=x.device)
    while len(matrix) < WIDTH:
        pair = torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)
        matrix = torch.cat(pair, 0)
    numbers = torch.arange(WIDTH, device=x.device)
    signs = 1 - 2 * (_SIGNS >> numbers & 1)
    signed = signs[:, None] * matrix / WIDTH**0.5
    return (padded.view(len(x), -1, WIDTH) @ signed).view(padded.shape)
