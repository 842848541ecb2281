"""The configuration of rotary positions. Importing this module does not import torch."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, get_args

from megatron_kernels import (
    DynamicNtkScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NtkScaling,
    YarnScaling,
)
from megatron_parallel.nearest import nearest_multiples

from megatron_models.components.embedding.spec import PositionConfig
from megatron_models.components.fields import flag, literal
from megatron_models.components.rotary.spec import RotaryScaling, RotarySpec
from megatron_models.errors import ConfigError
from megatron_models.layer_pattern import PatternError, layer_pattern, pattern_text

RopeScalingType = Literal["none", "linear", "ntk", "dynamic", "llama3", "yarn", "longrope"]

_LENGTH: Final = ("rope_scaling_factor", "rope_scaling_original_length")
_SCALINGS: Final[Mapping[RopeScalingType, tuple[str, ...]]] = {
    "none": (),
    "linear": ("rope_scaling_factor",),
    "ntk": ("rope_scaling_factor",),
    "dynamic": _LENGTH,
    "llama3": (*_LENGTH, "rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor"),
    "yarn": (
        *(*_LENGTH, "rope_scaling_attention_factor", "yarn_beta_fast", "yarn_beta_slow"),
        *("yarn_correction_range_round_to_int", "mscale", "mscale_all_dim"),
    ),
    "longrope": (
        *(*_LENGTH, "rope_scaling_attention_factor"),
        *("rope_scaling_short_factors", "rope_scaling_long_factors"),
    ),
}
"""The fields that each scaling reads."""
_UNSCALED: Final = frozenset(
    {"rotary_base", "rotary_percent", "rotary_interleaved", "rope_scaling_type"}
)
_OWN: Final = _UNSCALED.union(*_SCALINGS.values())
"""All fields of a rotation, apart from those that select layers."""


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(PositionConfig):
    """Frequencies of rotary positions, and their scaling for longer sequences."""

    rotary_base: float = field(
        default=10000.0,
        metadata=flag("--rotary-base", "base of the rotary frequencies (theta)", positive=True),
    )
    rotary_base_local: float = field(
        default=0.0,
        metadata=flag(
            "--rotary-base-local",
            "base of layers with a window or chunks, whose frequencies are then not scaled "
            "(Gemma 3, OLMo-3); 0: the base and the scaling of the other layers (our name)",
            nonnegative=True,
        ),
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
            "dynamic, llama3, yarn and longrope: sequence length of the original training",
            positive=True,
            unit="tokens",
            small=8,
        ),
    )

    rope_scaling_attention_factor: float = field(
        default=0.0,
        metadata=flag(
            "--rope-scaling-attention-factor",
            "yarn and longrope: factor of cosines and sines; 0: derived from the other settings "
            "(our name)",
            nonnegative=True,
        ),
    )
    rope_scaling_short_factors: str = field(
        default="",
        metadata=flag(
            "--rope-scaling-short-factors",
            "longrope: divisors of the frequencies up to the original length, separated by commas "
            "(our name)",
        ),
    )
    rope_scaling_long_factors: str = field(
        default="",
        metadata=flag(
            "--rope-scaling-long-factors",
            "longrope: divisors of the frequencies beyond the original length, separated by commas "
            "(our name)",
        ),
    )
    yarn_beta_fast: float = field(
        default=32.0,
        metadata=flag(
            "--yarn-beta-fast",
            "yarn: frequencies with more periods within the original length are not scaled",
            positive=True,
        ),
    )
    yarn_beta_slow: float = field(
        default=1.0,
        metadata=flag(
            "--yarn-beta-slow",
            "yarn: frequencies with fewer periods within the original length are scaled in full",
            positive=True,
        ),
    )
    yarn_correction_range_round_to_int: bool = field(
        default=True,
        metadata=flag(
            "--yarn-correction-range-round-to-int",
            "yarn: round the range of frequencies that are scaled in part to whole numbers",
        ),
    )
    mscale: float = field(
        default=1.0,
        metadata=flag("--mscale", "yarn: weight of the attention factor", nonnegative=True),
    )
    mscale_all_dim: float = field(
        default=0.0,
        metadata=flag(
            "--mscale-all-dim",
            "yarn: weight of the divisor of the attention factor; 0: no divisor",
            nonnegative=True,
        ),
    )
    mrope_section: tuple[int, ...] = field(
        default=(),
        metadata=flag(
            "--mrope-section",
            "mrope: pairs of rotated channels that turn by the time, the height and the width of a "
            "token (Qwen2-VL); they sum to half of the rotated channels",
        ),
    )
    mrope_interleaved: bool = field(
        default=False,
        metadata=flag(
            "--mrope-interleaved",
            "mrope: time, height and width alternate from pair to pair (Qwen3-VL) instead of "
            "dividing the pairs into three ranges (our name)",
        ),
    )
    no_rope_freq: str = field(
        default="0",
        metadata=flag(
            "--no-rope-freq",
            "which layers have no rotary positions: every N-th, counted from 1, or a pattern with "
            "1 for such layers; 0: none",
        ),
    )

    def _fill(self) -> None:
        super()._fill()
        if not 0 < self.rotary_percent <= 1:
            raise ConfigError(
                "{rotary_percent:name} must lie in (0, 1], not {rotary_percent:repr}; use 1.0 to "
                "rotate all channels",
                vars(self),
            )

    def _check(self) -> None:
        super()._check()
        try:
            unrotated = self.unrotated_layers
        except PatternError as error:
            raise ConfigError(f"{{no_rope_freq:name}}: {literal(error)}", vars(self)) from None
        self._check_axes()
        if self.has_rotation:
            self._check_scaling()
        elif any(unrotated):
            raise ConfigError(
                "{no_rope_freq} needs rotary positions, not {position_embedding_type}; leave it at "
                "0",
                vars(self),
            )
        elif self.rotary_base_local:
            raise ConfigError(
                "{rotary_base_local} needs rotary positions, not {position_embedding_type}; leave "
                "it at 0",
                vars(self),
            )

    def _check_axes(self) -> None:
        """Refuses options of three axes that the rotation does not have."""
        for name in ("mrope_section", "mrope_interleaved"):
            if getattr(self, name) and self.position_embedding_type != "mrope":
                raise ConfigError(
                    f"{{{name}}} has no effect with {{position_embedding_type}}; use "
                    "{position_embedding_type:name} 'mrope' or leave it out",
                    vars(self),
                )

    def _check_scaling(self) -> None:
        """Refuses values of the rotary scaling that do not fit together."""
        for kind, below, above in (
            ("llama3", "rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor"),
            ("yarn", "yarn_beta_slow", "yarn_beta_fast"),
        ):
            if self.rope_scaling_type == kind and getattr(self, below) >= getattr(self, above):
                raise ConfigError(
                    f"{{{below}}} must be below {{{above}}}; use a smaller one, such as "
                    f"{getattr(self, above) / 4:g}",
                    vars(self),
                )

    def unused_fields(self) -> dict[str, str]:
        """Returns settings of a rotation or of a scaling that the model does not have."""
        used, why = frozenset[str](), "with {position_embedding_type}"
        if self.has_rotation:
            why = "with {rope_scaling_type}"
            used = _UNSCALED | frozenset(_SCALINGS[self.rope_scaling_type])
        found = super().unused_fields()
        for entry in dataclasses.fields(RotaryConfig):
            if entry.name in _OWN - used and getattr(self, entry.name) != entry.default:
                found[entry.name] = why
        return found

    def fields_for_layers(self, layers: Sequence[int]) -> dict[str, Any]:
        """Returns the fields that differ in a model with only some of the layers."""
        changes = super().fields_for_layers(layers)
        if any(self.unrotated_layers):
            unrotated = (self.unrotated_layers[layer] for layer in layers)
            changes["no_rope_freq"] = pattern_text(unrotated)
        return changes

    @cached_property
    def unrotated_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it has no rotary positions although the model has."""
        text = self.no_rope_freq.strip()
        if text.isdecimal():
            every = int(text)
            return tuple(
                every > 0 and number % every == 0 for number in range(1, self.num_layers + 1)
            )
        return layer_pattern(text, self.num_layers)

    def rotary_spec(self, head_size: int) -> RotarySpec | None:
        """Returns the rotation of heads of ``head_size`` channels; None without rotary positions.

        Raises:
            ConfigError: The rotated channels are no positive even number, or three axes cannot
                divide them.
        """
        if not self.has_rotation:
            return None
        channels = int(head_size * self.rotary_percent)
        if channels < 2 or channels % 2:
            raise ConfigError(
                "rotary positions rotate pairs of channels, but {kv_channels} x {rotary_percent} "
                f"gives {channels}; make it even and positive, such as "
                f"{nearest_multiples(channels, 2)}",
                {**vars(self), "kv_channels": head_size},
            )
        return RotarySpec(
            channels,
            self.rotary_base,
            self.rotary_interleaved,
            self._scaling(channels),
            self._axes(channels // 2),
        )

    def _axes(self, pairs: int) -> tuple[int, ...]:
        """Returns the axis of each pair of channels; empty if positions have one axis."""
        sections = self.mrope_section
        if self.position_embedding_type != "mrope":
            return ()
        if len(sections) != 3 or min(sections) < 0 or sum(sections) != pairs:
            raise ConfigError(
                "{mrope_section:name} must be 3 numbers of at least 0 that sum to "
                f"{pairs}, half of the rotated channels, not {{mrope_section:repr}}; use "
                f"{_nearest_sections(sections, pairs)}",
                vars(self),
            )
        if not self.mrope_interleaved:
            return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
        # Every third pair, from pair 1 or pair 2; the time gets the rest.
        most = (pairs, (pairs + 1) // 3, pairs // 3)
        if any(count > bound for count, bound in zip(sections, most, strict=True)):
            height, width = map(min, sections[1:], most[1:])
            raise ConfigError(
                f"{{mrope_interleaved:name}} allows at most {most[1]} for the height and {most[2]} "
                f"for the width, not {{mrope_section}}; use "
                f"{_spoken((pairs - height - width, height, width))}",
                vars(self),
            )
        return tuple(pair % 3 if pair // 3 < sections[pair % 3] else 0 for pair in range(pairs))

    def _scaling(self, channels: int) -> RotaryScaling | None:
        """Returns the rule that scales the frequencies, or None."""
        kind, factor = self.rope_scaling_type, self.rope_scaling_factor
        original = self.rope_scaling_original_length
        fixed = self.rope_scaling_attention_factor or None
        if kind == "linear":
            return LinearScaling(factor)
        if kind == "ntk":
            return NtkScaling(factor)
        if kind == "dynamic":
            return DynamicNtkScaling(factor, original)
        if kind == "llama3":
            return Llama3Scaling(
                factor=factor,
                low_freq_factor=self.rope_scaling_low_freq_factor,
                high_freq_factor=self.rope_scaling_high_freq_factor,
                original_max_position_embeddings=original,
            )
        if kind == "yarn":
            return YarnScaling(
                factor=factor,
                original_max_position_embeddings=original,
                beta_fast=self.yarn_beta_fast,
                beta_slow=self.yarn_beta_slow,
                mscale=self.mscale,
                mscale_all_dim=self.mscale_all_dim,
                truncate=self.yarn_correction_range_round_to_int,
                fixed_attention_factor=fixed,
            )
        if kind == "longrope":
            short = self._factors("rope_scaling_short_factors", channels)
            long = self._factors("rope_scaling_long_factors", channels)
            return LongRopeScaling(short, long, factor, original, fixed)
        return None

    def _factors(self, name: str, channels: int) -> tuple[float, ...]:
        """Returns the factors of a field, one for each pair of channels."""
        try:
            factors = tuple(float(each) for each in getattr(self, name).split(","))
        except ValueError:
            factors = ()
        if len(factors) != channels // 2 or not all(0 < each < math.inf for each in factors):
            raise ConfigError(
                f"{{{name}:name}} must be {channels // 2} positive numbers separated by commas, "
                f"one for each pair of rotated channels, not {{{name}:repr}}; 1 does not change a "
                "pair",
                vars(self),
            )
        return factors


def _nearest_sections(sections: tuple[int, ...], pairs: int) -> str:
    """Returns text of sections that sum to ``pairs``, in about the proportions of those given."""
    given = [max(each, 0) for each in sections] if len(sections) == 3 else []
    weights = given if any(given) else [2, 3, 3]  # Qwen2-VL: 16, 24 and 24
    height, width = (pairs * each // sum(weights) for each in weights[1:])
    return _spoken((pairs - height - width, height, width))


def _spoken(sections: tuple[int, int, int]) -> str:
    """Returns the text of three sections."""
    return "{}, {} and {}".format(*sections)
