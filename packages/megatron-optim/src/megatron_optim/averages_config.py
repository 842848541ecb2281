"""Settings of averages of parameters. This module does not import torch."""

from dataclasses import dataclass, field
from typing import Literal

from megatron_optim.errors import OptimError
from megatron_optim.fields import flag

EvaluatedWeights = Literal["average", "trained"]
EVALUATED_WEIGHTS: tuple[EvaluatedWeights, ...] = ("average", "trained")


@dataclass(frozen=True)
class AveragesConfig:
    """An exponential moving average of the parameters (`megatron_optim.ParameterAverages`).

    Raises:
        OptimError: A value is out of range, or has no effect.
    """

    ema_decay: float | None = field(
        default=None,
        metadata=flag(
            "--ema-decay",
            "keep an exponential moving average of the weights with this decay; unset: none",
        ),
    )
    ema_evaluate: EvaluatedWeights = field(
        default="average",
        metadata=flag(
            "--ema-evaluate",
            "weights that evaluations use, with --ema-decay",
            choices=EVALUATED_WEIGHTS,
        ),
    )

    @property
    def average_bytes(self) -> int:
        """The bytes that the averages take for each parameter of fewer than 64 bits."""
        return 0 if self.ema_decay is None else 4

    def __post_init__(self) -> None:
        if self.ema_decay is not None and not 0.0 < self.ema_decay < 1.0:
            raise OptimError(
                "{ema_decay:name} must lie between 0 and 1, got {ema_decay:repr}", vars(self)
            )
        if self.ema_evaluate not in EVALUATED_WEIGHTS:
            raise OptimError(
                f"{{ema_evaluate}} is not known; use {' or '.join(EVALUATED_WEIGHTS)}", vars(self)
            )
        if self.ema_decay is None and self.ema_evaluate != "average":
            raise OptimError(
                "{ema_evaluate} has no effect without {ema_decay:name}; give both or leave it out",
                vars(self),
            )
