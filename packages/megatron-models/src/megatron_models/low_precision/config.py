"""Settings of products in few bits, with Megatron-LM's names. This module does not import torch."""

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from megatron_models.errors import ConfigError

FP8Format = Literal["e4m3", "hybrid"]
FP8Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
FP4Format = Literal["e2m1"]
FP4Recipe = Literal["nvfp4", "nvfp4-nearest"]

AMAX_HISTORY: Final = "amax_history"
"""Suffix of the history of magnitudes of a layer, as state of its weight: `[3, steps]`."""

_DELAYED: Final = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
_ENDS: Final = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


def _flag(flag: str, text: str, **more: Any) -> dict[str, Any]:
    return {"flag": flag, "help": text, **more}


@dataclass(frozen=True)
class LowPrecisionConfig:
    """How linear layers multiply in few bits. By default they multiply in the model's precision.

    Raises:
        ConfigError: Settings contradict one another, or have no effect.
    """

    fp8_format: FP8Format | None = field(
        default=None,
        metadata=_flag(
            "--fp8-format",
            "multiply in FP8 in linear layers: everything in E4M3, or gradients in E5M2 (hybrid)",
        ),
    )
    fp8_recipe: FP8Recipe = field(
        default="delayed",
        metadata=_flag(
            "--fp8-recipe",
            "scales of FP8: one for a tensor, from the largest magnitudes of earlier steps "
            "(delayed) or of the tensor (tensorwise), one for 128 or 128 x 128 elements "
            "(blockwise), one for 32 elements (mxfp8)",
        ),
    )
    fp8_margin: int = field(
        default=0,
        metadata=_flag(
            "--fp8-margin", "delayed: powers of two between the largest magnitude and the limit"
        ),
    )
    fp8_amax_history_len: int = field(
        default=1,
        metadata=_flag(
            "--fp8-amax-history-len",
            "delayed: steps whose largest magnitudes are kept",
            unit="steps",
        ),
    )
    fp8_amax_compute_algo: Literal["most_recent", "max"] = field(
        default="most_recent",
        metadata=_flag(
            "--fp8-amax-compute-algo", "delayed: magnitude of the history that the scale follows"
        ),
    )
    fp8_wgrad: bool = field(
        default=True,
        metadata=_flag("--fp8-wgrad", "compute gradients of weights in FP8 too"),
    )
    first_last_layers_bf16: bool = field(
        default=False,
        metadata=_flag(
            "--first-last-layers-bf16", "multiply in the model's precision in the outermost layers"
        ),
    )
    num_layers_at_start_in_bf16: int = field(
        default=1,
        metadata=_flag(
            "--num-layers-at-start-in-bf16",
            "first layers of --first-last-layers-bf16",
            unit="layers",
        ),
    )
    num_layers_at_end_in_bf16: int = field(
        default=1,
        metadata=_flag(
            "--num-layers-at-end-in-bf16",
            "last layers of --first-last-layers-bf16",
            unit="layers",
        ),
    )
    fp4_format: FP4Format | None = field(
        default=None,
        metadata=_flag("--fp4-format", "multiply in FP4 in linear layers, in E2M1"),
    )
    fp4_recipe: FP4Recipe = field(
        default="nvfp4",
        metadata=_flag(
            "--fp4-recipe",
            "scales of FP4: one for 16 elements of activations and 16 x 16 of weights, gradients "
            "rounded stochastically and transformed (nvfp4) or to the nearest (nvfp4-nearest, our "
            "name)",
        ),
    )

    def __post_init__(self) -> None:
        values = vars(self)
        if self.fp8_format is not None and self.fp4_format is not None:
            raise ConfigError(
                "{fp8_format} and {fp4_format} exclude each other; leave out one of them", values
            )
        if self.fp8_amax_history_len < 1:
            raise ConfigError("{fp8_amax_history_len} must be at least 1", values)
        for name in _ENDS:
            if getattr(self, name) < 0:
                raise ConfigError(f"{{{name}}} must be at least 0", values)
        if self.fp8_format is None:
            self._refuse(("fp8_recipe", *_DELAYED, "fp8_wgrad"), "{fp8_format:name}")
        elif self.fp8_recipe != "delayed":
            self._refuse(_DELAYED, "the recipe delayed, but {fp8_recipe} is given")
        if self.fp4_format is None:
            self._refuse(("fp4_recipe",), "{fp4_format:name}")
        if not self.first_last_layers_bf16:
            self._refuse(_ENDS, "{first_last_layers_bf16:name}")
        if not self.enabled:
            self._refuse(("first_last_layers_bf16",), "{fp8_format:name} or {fp4_format:name}")

    def _refuse(self, names: tuple[str, ...], needed: str) -> None:
        """Refuses settings that have no effect without another one."""
        for name in names:
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                given = f"{name}:name" if isinstance(getattr(self, name), bool) else name
                raise ConfigError(
                    f"{{{given}}} has no effect without {needed}; leave it out", vars(self)
                )

    @property
    def enabled(self) -> bool:
        """Whether linear layers multiply in few bits."""
        return self.fp8_format is not None or self.fp4_format is not None

    @property
    def name(self) -> str:
        """The recipe in words; empty without one."""
        if self.fp4_format is not None:
            return f"{self.fp4_recipe} ({self.fp4_format})"
        return "" if self.fp8_format is None else f"fp8 {self.fp8_recipe} ({self.fp8_format})"
