"""Angles of rotary position embedding: frequencies and tables of cosines and sines.

All values are computed in float64 and rounded once, in `rope_tables`: at position 100,000 a float32
frequency would change the angle by up to 0.006.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_kernels.errors import KernelError
from megatron_kernels.ops.rope.scaling import RopeScaling


def rope_frequencies(
    dim: int,
    base: float = 10000.0,
    percent: float = 1.0,
    scaling: RopeScaling | None = None,
    *,
    device: torch.device | str | None = None,
) -> Float[Tensor, " half"]:
    """Returns the angles per position: base^(-2i/r) for i < r/2, r = int(dim * percent).

    Args:
        dim: Head dimension d.
        base: The longest period is about 2 pi * base positions.
        percent: Fraction of the channels that is rotated.
        scaling: Rule for a longer context, or None.
        device: Device of the result.

    Returns:
        float64 `[r/2]`, highest frequency first.

    Raises:
        KernelError: r, the number of rotated channels, is not a positive even number.
    """
    rotated = int(dim * percent)
    if rotated <= 0 or rotated % 2 or rotated > dim:
        raise KernelError(
            f"rope needs a positive even number of rotated channels, at most {dim}; "
            f"{percent} of {dim} gives {rotated}"
        )
    exponents = torch.arange(0, rotated, 2, dtype=torch.float64, device=device) / rotated
    frequencies = torch.pow(torch.tensor(base, dtype=torch.float64, device=device), -exponents)
    return frequencies if scaling is None else scaling.scale(frequencies, base)


def rope_tables(
    positions: Int[Tensor, "..."],
    frequencies: Float[Tensor, " half"],
    dtype: torch.dtype = torch.float32,
    scaling: RopeScaling | None = None,
) -> tuple[Float[Tensor, "s b_or_1 half"], Float[Tensor, "s b_or_1 half"]]:
    """Returns cosines and sines for `rope`.

    Args:
        positions: `[s]`, or `[b, s]` if they differ between the samples of a batch.
        frequencies: `[r/2]` from `rope_frequencies`.
        dtype: float32, also for queries of low precision, or float64 for tests of exactness.
        scaling: The rule passed to `rope_frequencies`; its attention factor is part of the tables.

    Returns:
        cos and sin, `[s, 1, r/2]` or `[s, b, r/2]`.
    """
    by_token = positions[:, None] if positions.ndim == 1 else positions.t()
    angles = by_token[..., None].to(frequencies.dtype) * frequencies
    factor = 1.0 if scaling is None else scaling.attention_factor
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
