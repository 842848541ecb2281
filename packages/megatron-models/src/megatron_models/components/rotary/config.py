"""The configuration of rotary positions. Importing this module does not import torch."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from megatron_kernels import LinearScaling, Llama3Scaling, RopeScaling

from megatron_models.components.embedding.spec import PositionConfig
from megatron_models.components.fields import flag
from megatron_models.components.rotary.spec import RotarySpec
from megatron_models.errors import ConfigError

RopeScalingType = Literal["none", "linear", "llama3"]


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(PositionConfig):
    """Frequencies of rotary positions, and their scaling for longer sequences."""

    rotary_base: float = field(
        default=10000.0,
        metadata=flag("--rotary-base", "base of the rotary frequencies (theta)", positive=True),
    )
    rotary_percent: float = field(
        default=1.0,
        metadata=flag(
            "--rotary-percent", "fraction of each head's channels that is rotated, in (0, 1]"
        ),
    )
    rotary_interleaved: bool = field(
        default=False,
        metadata=flag(
            "--rotary-interleaved",
            "rotate neighbouring channels instead of the two halves of a head",
        ),
    )
    rope_scaling_type: RopeScalingType = field(
        default="none",
        metadata=flag(
            "--rope-scaling-type",
            "scaling of rotary frequencies for sequences longer than in the original training",
            choices=get_args(RopeScalingType),
        ),
    )
    rope_scaling_factor: float = field(
        default=8.0,
        metadata=flag("--rope-scaling-factor", "factor of the rotary scaling", positive=True),
    )
    rope_scaling_low_freq_factor: float = field(
        default=1.0,
        metadata=flag(
            "--rope-scaling-low-freq-factor",
            "llama3: wavelengths above original length / this value are scaled in full",
            positive=True,
        ),
    )
    rope_scaling_high_freq_factor: float = field(
        default=4.0,
        metadata=flag(
            "--rope-scaling-high-freq-factor",
            "llama3: wavelengths below original length / this value are not scaled",
            positive=True,
        ),
    )
    rope_scaling_original_length: int = field(
        default=8192,
        metadata=flag(
            "--rope-scaling-original-length",
            "llama3: sequence length of the original training",
            positive=True,
            unit="tokens",
        ),
    )

    def _fill(self) -> None:
        super()._fill()
        if not 0 < self.rotary_percent <= 1:
            raise ConfigError(
                "{rotary_percent:name} must lie in (0, 1], not {rotary_percent:repr}", vars(self)
            )

    def _check(self) -> None:
        super()._check()
        low, high = self.rope_scaling_low_freq_factor, self.rope_scaling_high_freq_factor
        rope = self.position_embedding_type == "rope"
        if rope and self.rope_scaling_type == "llama3" and low >= high:
            raise ConfigError(
                "{rope_scaling_low_freq_factor} must be below {rope_scaling_high_freq_factor}",
                vars(self),
            )

    def rotary_spec(self, head_size: int) -> RotarySpec | None:
        """Returns the rotation of heads of ``head_size`` channels; None without rotary positions.

        Raises:
            ConfigError: The rotated channels are no positive even number.
        """
        if self.position_embedding_type != "rope":
            return None
        channels = int(head_size * self.rotary_percent)
        if channels < 2 or channels % 2:
            raise ConfigError(
                "rotary positions rotate pairs of channels, but {kv_channels} x {rotary_percent} "
                f"gives {channels}; make it even",
                {**vars(self), "kv_channels": head_size},
            )
        return RotarySpec(channels, self.rotary_base, self.rotary_interleaved, self._scaling())

    def _scaling(self) -> RopeScaling | None:
        """Returns the rule that scales the frequencies, or None."""
        if self.rope_scaling_type == "linear":
            return LinearScaling(self.rope_scaling_factor)
        if self.rope_scaling_type == "llama3":
            return Llama3Scaling(
                factor=self.rope_scaling_factor,
                low_freq_factor=self.rope_scaling_low_freq_factor,
                high_freq_factor=self.rope_scaling_high_freq_factor,
                original_max_position_embeddings=self.rope_scaling_original_length,
            )
        return None
