"""Angles of rotary position embedding: base frequencies, scaling for longer contexts, tables.

All values are computed in float64 and rounded once, in `rope_tables`: at position 100,000 a float32
frequency would change the angle by up to 0.006.
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_kernels.errors import KernelError


@runtime_checkable
class RopeScaling(Protocol):
    """A rule that adapts the frequencies of a short context to a longer one.

    `LinearScaling`, `Llama3Scaling` and `YarnScaling` implement it. Their fields have the names of
    Hugging Face's `rope_scaling`.
    """

    @property
    def attention_factor(self) -> float:
        """Factor of cosines and sines; attention logits scale with its square."""

    def scale(self, frequencies: Tensor, base: float) -> Tensor:
        """Returns the scaled frequencies (float64 `[r/2]`, highest first)."""


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al., 2023): divides positions by `factor`."""

    factor: float

    @property
    def attention_factor(self) -> float:
        """1: the logits are not scaled."""
        return 1.0

    def scale(self, frequencies: Tensor, base: float) -> Tensor:
        """Divides all frequencies by `factor`."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: divides low frequencies by `factor`, keeps high ones, blends those between."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @property
    def attention_factor(self) -> float:
        """1: the logits are not scaled."""
        return 1.0

    def scale(self, frequencies: Tensor, base: float) -> Tensor:
        """Blends by the number of periods of a frequency within the original context."""
        periods = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        weight = (periods - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        weight = weight.clamp(0, 1)
        return frequencies * (weight + (1 - weight) / self.factor)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., 2023): divides low frequencies by `factor`, and scales the logits.

    A frequency with fewer than `beta_slow` periods within the original context is divided by
    `factor`, one with more than `beta_fast` is kept, and those between are blended.
    """

    factor: float
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    @property
    def attention_factor(self) -> float:
        """Ratio of the two magnitude scales (section 3.4, with DeepSeek's second scale)."""
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    def correction_range(self, dim: int, base: float) -> tuple[float, float]:
        """Returns the range of blended frequency indices, for `dim` rotated channels."""
        low, high = (
            dim
            * math.log(self.original_max_position_embeddings / (periods * 2 * math.pi))
            / (2 * math.log(base))
            for periods in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = float(math.floor(low)), float(math.ceil(high))
        return max(low, 0.0), min(high, dim - 1.0)

    def scale(self, frequencies: Tensor, base: float) -> Tensor:
        """Blends along a ramp over the correction range."""
        low, high = self.correction_range(2 * len(frequencies), base)
        index = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
        slowed = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
        return frequencies * (1 - slowed + slowed / self.factor)

    def _magnitude(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0


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
