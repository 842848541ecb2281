"""Settings of the loss scale, with Megatron-LM's names. This module does not import torch."""

from dataclasses import dataclass, field

from megatron_optim.errors import OptimError
from megatron_optim.fields import flag


@dataclass(frozen=True)
class LossScaleConfig:
    """How the loss is scaled, so that small gradients are not rounded to 0 in fp16.

    Without ``loss_scale``, the scale is dynamic (`megatron_optim.scaler`).

    Raises:
        OptimError: A value is out of range.
    """

    loss_scale: float | None = field(
        default=None,
        metadata=flag(
            "--loss-scale", "constant loss scale of fp16, a power of two; unset: dynamic"
        ),
    )
    initial_loss_scale: float = field(
        default=2.0**32,
        metadata=flag("--initial-loss-scale", "dynamic loss scale of the first step"),
    )
    min_loss_scale: float = field(
        default=1.0,
        metadata=flag("--min-loss-scale", "lowest dynamic loss scale"),
    )
    loss_scale_window: int = field(
        default=1000,
        metadata=flag(
            "--loss-scale-window",
            "steps without overflow after which the dynamic loss scale doubles",
            unit="steps",
        ),
    )
    hysteresis: int = field(
        default=2,
        metadata=flag(
            "--hysteresis",
            "overflows since the last doubling from which on each overflow halves the loss scale",
            unit="steps",
        ),
    )

    def __post_init__(self) -> None:
        for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < 2.0**127:
                raise OptimError(
                    f"{{{name}:name}} must be above 0 and below 2**127, got {{{name}:repr}}",
                    vars(self),
                )
        for name in ("loss_scale_window", "hysteresis"):
            if getattr(self, name) < 1:
                raise OptimError(
                    f"{{{name}:name}} must be at least 1 step, got {{{name}:repr}}", vars(self)
                )
        if self.min_loss_scale > self.initial_loss_scale:
            raise OptimError(
                "{min_loss_scale} exceeds {initial_loss_scale}; lower the first or raise the "
                "second",
                vars(self),
            )
        if self.loss_scale is None:
            return
        plain = type(self)
        for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
            if getattr(self, name) != getattr(plain, name):
                raise OptimError(
                    f"{{{name}:name}} has no effect on a constant {{loss_scale:name}}; leave out "
                    "one of them",
                    vars(self),
                )
