"""Settings of Adafactor, with the defaults of torch. This module does not import torch."""

from dataclasses import dataclass, field

from megatron_optim.errors import OptimError


@dataclass(frozen=True)
class AdafactorSettings:
    """Settings of `megatron_optim.adafactor.Adafactor`. Megatron-LM has no Adafactor."""

    beta2_decay: float = field(
        default=-0.8,
        metadata={
            "flag": "--adafactor-beta2-decay",
            "help": "power of the step that is the weight of a new squared gradient (our name)",
        },
    )
    eps1: float | None = field(
        default=None,
        metadata={
            "flag": "--adafactor-eps1",
            "help": "least root of a mean of squares; unset: epsilon of the dtype (our name)",
        },
    )
    eps2: float = field(
        default=1e-3,
        metadata={
            "flag": "--adafactor-eps2",
            "help": "least root mean square of a parameter in its step size (our name)",
        },
    )
    clip_threshold: float = field(
        default=1.0,
        metadata={
            "flag": "--adafactor-clip-threshold",
            "help": "root mean square that the update of a parameter is clipped to (our name)",
        },
    )

    def __post_init__(self) -> None:
        if not self.beta2_decay <= 0.0:
            raise OptimError(
                "{beta2_decay:name} must be 0 or negative, got {beta2_decay:repr}", vars(self)
            )
        for name in ("eps1", "eps2"):
            value = getattr(self, name)
            if value is not None and not value >= 0.0:
                raise OptimError(
                    f"{{{name}:name}} must not be negative, got {{{name}:repr}}", vars(self)
                )
        if not self.clip_threshold >= 1.0:
            raise OptimError(
                "{clip_threshold:name} must be at least 1, got {clip_threshold:repr}", vars(self)
            )
