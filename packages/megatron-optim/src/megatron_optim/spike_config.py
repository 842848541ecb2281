"""Settings of steps that are skipped because of a spike. This module does not import torch."""

from dataclasses import dataclass, field

from megatron_optim.errors import OptimError
from megatron_optim.fields import flag


@dataclass(frozen=True)
class SpikeConfig:
    """Which finite steps are skipped (`megatron_optim.SpikeDetector`).

    Raises:
        OptimError: A value is out of range, or has no effect.
    """

    skip_grad_norm: float | None = field(
        default=None,
        metadata=flag(
            "--skip-grad-norm",
            "skip steps whose gradient norm exceeds this before clipping; unset: none",
        ),
    )
    skip_grad_norm_spike: float | None = field(
        default=None,
        metadata=flag(
            "--skip-grad-norm-spike",
            "skip steps whose gradient norm exceeds this multiple of its running mean; unset: none",
        ),
    )
    skip_loss_spike: float | None = field(
        default=None,
        metadata=flag(
            "--skip-loss-spike",
            "skip steps of which a loss exceeds this multiple of its running mean; unset: none",
        ),
    )
    spike_window: int = field(
        default=100,
        metadata=flag(
            "--spike-window",
            "updates that running means cover; before as many, they skip no step",
            unit="steps",
        ),
    )

    def __post_init__(self) -> None:
        if self.skip_grad_norm is not None and not self.skip_grad_norm > 0.0:
            raise OptimError(
                "{skip_grad_norm:name} must be above 0, got {skip_grad_norm:repr}", vars(self)
            )
        for name in ("skip_grad_norm_spike", "skip_loss_spike"):
            factor = getattr(self, name)
            if factor is not None and not factor > 1.0:
                raise OptimError(
                    f"{{{name}:name}} must be above 1, the mean itself, got {{{name}:repr}}",
                    vars(self),
                )
        if self.spike_window < 1:
            raise OptimError(
                "{spike_window:name} must be at least 1 step, got {spike_window:repr}", vars(self)
            )
        means = self.skip_grad_norm_spike, self.skip_loss_spike
        if means == (None, None) and self.spike_window != type(self).spike_window:
            raise OptimError(
                "{spike_window} has no effect without {skip_grad_norm_spike:name} or "
                "{skip_loss_spike:name}; leave it out",
                vars(self),
            )

    @property
    def skips(self) -> bool:
        """Whether any step can be skipped."""
        limits = self.skip_grad_norm, self.skip_grad_norm_spike, self.skip_loss_spike
        return limits != (None, None, None)
