"""Angles of rotary position embedding: base frequencies, rules for longer contexts, tables.

Everything is computed in float64 and rounded once, in `rope_tables`: at position 100 000 a float32
frequency alone would put the angle off by up to 0.006.
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
    """A rule that fits the frequencies of a short context to a longer one.

    `LinearScaling`, `Llama3Scaling` and `YarnScaling` are the rules; their fields have the names
    used in Hugging Face's `rope_scaling`.
    """

    @property
    def attention_factor(self) -> float:
        """Multiplies cosines and sines, and so scales the attention logits by its square."""

    def scale(self, frequencies: Tensor, base: float) -> Tensor:
        """Returns the frequencies to use in place of these (float64 `[r/2]`, highest first)."""


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al., 2023): positions are divided by `factor`."""

    factor: float

    @property
    def attention_factor(self) -> float:
        """One: the logits are left alone."""
        return 1.0

    def scale(self, frequencies: Tensor, base: float) -> Tensor:
        """Divides all."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @property
    def attention_factor(self) -> float:
        """One: the logits are left alone."""
        return 1.0

    def scale(self, frequencies: Tensor, base: float) -> Tensor:
        """Blend by how many turns a wave makes within the original context."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., 2023): long waves are slowed, and the logits sharpened to make up for it.

    A wave of fewer than `beta_slow` turns within the original context is slowed by `factor`, one of
    more than `beta_fast` is kept, those between are blended.
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
        """The ratio of the two magnitude scales (section 3.4, with DeepSeek's second scale)."""
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    def correction_range(self, dim: int, base: float) -> tuple[float, float]:
        """Indices of the frequencies between which the blend runs, for `dim` turned channels."""
        low, high = (
            dim
            * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(base))
            for turns in (self.beta_fast, self.beta_slow)
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
    """Angles per position: base^(-2i/r) for i < r/2, r = int(dim * percent) channels turned.

    Args:
        dim: Head dimension d.
        base: The longest wave takes about 2 pi * base positions.
        percent: Share of the channels that is turned.
        scaling: Rule for a longer context, or None.
        device: Where to put them.

    Returns:
        float64 `[r/2]`, highest frequency first.

    Raises:
        KernelError: r is not a positive even number.
    """
    turned = int(dim * percent)
    if turned <= 0 or turned % 2 or turned > dim:
        raise KernelError(
            f"rope needs a positive even number of channels to turn, at most {dim}; "
            f"{percent} of {dim} gives {turned}"
        )
    exponents = torch.arange(0, turned, 2, dtype=torch.float64, device=device) / turned
    frequencies = torch.pow(torch.tensor(base, dtype=torch.float64, device=device), -exponents)
    return frequencies if scaling is None else scaling.scale(frequencies, base)


def rope_tables(
    positions: Int[Tensor, "..."],
    frequencies: Float[Tensor, " half"],
    dtype: torch.dtype = torch.float32,
    scaling: RopeScaling | None = None,
) -> tuple[Float[Tensor, "s b_or_1 half"], Float[Tensor, "s b_or_1 half"]]:
    """Cosines and sines for `rope`.

    Args:
        positions: `[s]`, or `[b, s]` when they differ between the samples of a batch.
        frequencies: `[r/2]` from `rope_frequencies`.
        dtype: float32, also for queries of low precision, or float64 for proofs.
        scaling: The rule given to `rope_frequencies`; its attention factor goes into the tables.

    Returns:
        cos and sin, `[s, 1, r/2]` or `[s, b, r/2]`.
    """
    places = positions[:, None] if positions.ndim == 1 else positions.t()
    angles = places[..., None].to(frequencies.dtype) * frequencies
    factor = 1.0 if scaling is None else scaling.attention_factor
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
