"""The configuration of multi-token prediction. Importing this module does not import torch."""

from dataclasses import dataclass, field

from megatron_models.components.fields import flag
from megatron_models.components.stream import StreamConfig
from megatron_models.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MultiTokenConfig(StreamConfig):
    """Number of further tokens that a model predicts in training, and the weight of their losses.

    Depth 1 predicts the token after the next one, depth 2 the token after that (DeepSeek-AI 2024,
    DeepSeek-V3, section 2.2).
    """

    mtp_num_layers: int = field(
        default=0,
        metadata=flag(
            "--mtp-num-layers",
            "depths of multi-token prediction, each a layer that predicts one token further ahead; "
            "0: none",
            nonnegative=True,
            maximum=1_000,
        ),
    )
    mtp_loss_scaling_factor: float = field(
        default=0.1,
        metadata=flag(
            "--mtp-loss-scaling-factor",
            "weight of the mean of the losses of multi-token prediction",
            nonnegative=True,
            no_effect=True,
            objective=True,
        ),
    )

    def _check(self) -> None:
        super()._check()
        default = MultiTokenConfig.mtp_loss_scaling_factor
        if not self.mtp_num_layers and self.mtp_loss_scaling_factor != default:
            raise ConfigError(
                "{mtp_loss_scaling_factor} has no effect without {mtp_num_layers:name}; set it to "
                f"1 or more, or leave the factor at {default}",
                vars(self),
            )
