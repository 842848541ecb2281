"""Rules that scale rotary frequencies for longer contexts, as plain data.

Importing this module does not import torch, so that a configuration can hold a rule.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from megatron_kernels.errors import KernelError

if TYPE_CHECKING:
    import torch


@runtime_checkable
class RopeScaling(Protocol):
    """A rule that adapts the frequencies of a short context to a longer one.

    `LinearScaling`, `NtkScaling`, `Llama3Scaling`, `YarnScaling` and `FactorScaling` implement it.
    Their fields have the names of Hugging Face's `rope_scaling`.
    """

    @property
    def attention_factor(self) -> float:
        """Factor of cosines and sines; attention logits scale with its square."""

    def scale(self, frequencies: "torch.Tensor", base: float) -> "torch.Tensor":
        """Returns the scaled frequencies (float64 `[r/2]`, highest first)."""


@runtime_checkable
class LengthScaling(Protocol):
    """A rule that depends on the length of the context: `DynamicNtkScaling`, `LongRopeScaling`."""

    def at(self, length: int) -> RopeScaling:
        """Returns the rule for contexts of `length` tokens."""


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al., 2023): divides positions by `factor`."""

    factor: float

    @property
    def attention_factor(self) -> float:
        """1: the logits are not scaled."""
        return 1.0

    def scale(self, frequencies: "torch.Tensor", base: float) -> "torch.Tensor":
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

    def scale(self, frequencies: "torch.Tensor", base: float) -> "torch.Tensor":
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
    fixed_attention_factor: float | None = None

    @property
    def attention_factor(self) -> float:
        """Ratio of the two magnitude scales (section 3.4, with DeepSeek's second scale).

        `fixed_attention_factor` takes precedence.
        """
        if self.fixed_attention_factor is not None:
            return self.fixed_attention_factor
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

    def scale(self, frequencies: "torch.Tensor", base: float) -> "torch.Tensor":
        """Blends along a ramp over the correction range."""
        low, high = self.correction_range(2 * len(frequencies), base)
        index = frequencies.new_tensor(range(len(frequencies)))
        slowed = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
        return frequencies * (1 - slowed + slowed / self.factor)

    def _magnitude(self, scale: float) -> float:
        return 0.1 * scale * math.log(max(self.factor, 1.0)) + 1.0


@dataclass(frozen=True)
class NtkScaling:
    """NTK-aware scaling: multiplies the base by `factor^(r / (r - 2))`.

    The lowest frequency is divided by `factor`, the highest is kept.
    """

    factor: float

    @property
    def attention_factor(self) -> float:
        """1: the logits are not scaled."""
        return 1.0

    def scale(self, frequencies: "torch.Tensor", base: float) -> "torch.Tensor":
        """Divides frequency i by `factor^(i / (r/2 - 1))`."""
        index = frequencies.new_tensor(range(len(frequencies)))
        return frequencies * self.factor ** (-index / max(len(frequencies) - 1, 1))


@dataclass(frozen=True)
class DynamicNtkScaling:
    """NTK-aware scaling that begins beyond the original context and grows with the length."""

    factor: float
    original_max_position_embeddings: int

    def at(self, length: int) -> NtkScaling:
        """Returns the rule whose factor is 1 up to the original context, and then linear."""
        beyond = max(length / self.original_max_position_embeddings - 1, 0.0)
        return NtkScaling(1.0 + self.factor * beyond)


@dataclass(frozen=True)
class FactorScaling:
    """Divides each frequency by its own factor."""

    factors: tuple[float, ...]
    attention_factor: float = 1.0

    def scale(self, frequencies: "torch.Tensor", base: float) -> "torch.Tensor":
        """Divides the frequencies by `factors`.

        Raises:
            KernelError: The number of factors is not that of the frequencies.
        """
        if len(self.factors) != len(frequencies):
            raise KernelError(
                f"rotary scaling has {len(self.factors)} factors for {len(frequencies)} "
                "frequencies; give one for each pair of rotated channels"
            )
        return frequencies / frequencies.new_tensor(self.factors)


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (Ding et al., 2024; Phi-3): one factor for each frequency, by the context's length.

    `short_factor` holds the factors within the original context, `long_factor` those beyond it. The
    attention factor follows from `factor`, the ratio of the longest context to the original one.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    factor: float
    original_max_position_embeddings: int
    fixed_attention_factor: float | None = None

    @property
    def attention_factor(self) -> float:
        """Factor of cosines and sines, the same for all lengths (section 4.2)."""
        if self.fixed_attention_factor is not None:
            return self.fixed_attention_factor
        if self.factor <= 1:
            return 1.0
        original = math.log(self.original_max_position_embeddings)
        return math.sqrt(1 + math.log(self.factor) / original)

    def at(self, length: int) -> FactorScaling:
        """Returns the rule with the short or the long factors."""
        short = length <= self.original_max_position_embeddings
        return FactorScaling(
            self.short_factor if short else self.long_factor, self.attention_factor
        )
