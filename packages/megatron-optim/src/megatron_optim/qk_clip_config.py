"""Settings of QK-Clip, with the names of Megatron-LM. This module does not import torch."""

from dataclasses import dataclass, field

from megatron_optim.errors import OptimError
from megatron_optim.fields import flag


@dataclass(frozen=True)
class QKClipConfig:
    """Bounds of attention scores by scaling weights after the update (Kimi Team 2025, "Kimi K2").

    Raises:
        OptimError: A value is out of range, or has no effect.
    """

    qk_clip: bool = field(
        default=False,
        metadata=flag(
            "--qk-clip", "scale weights of queries and keys of heads with scores above the limit"
        ),
    )
    qk_clip_alpha: float = field(
        default=0.5,
        metadata=flag("--qk-clip-alpha", "share of the queries in the factor of --qk-clip"),
    )
    qk_clip_threshold: float = field(
        default=100.0,
        metadata=flag("--qk-clip-threshold", "largest attention score that --qk-clip allows"),
    )

    def __post_init__(self) -> None:
        if not 0.0 <= self.qk_clip_alpha <= 1.0:
            raise OptimError(
                "{qk_clip_alpha:name} must lie in [0, 1], got {qk_clip_alpha:repr}", vars(self)
            )
        if not self.qk_clip_threshold > 0.0:
            raise OptimError(
                "{qk_clip_threshold:name} must be positive, got {qk_clip_threshold:repr}",
                vars(self),
            )
        if not self.qk_clip and (self.qk_clip_alpha, self.qk_clip_threshold) != (0.5, 100.0):
            name = "qk_clip_alpha" if self.qk_clip_alpha != 0.5 else "qk_clip_threshold"
            raise OptimError(
                f"{{{name}}} has no effect without {{qk_clip:name}}; give both or leave it out",
                vars(self),
            )
