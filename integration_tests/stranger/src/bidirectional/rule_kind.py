"""The entries in the group ``megatron.update_rules``. Does not import torch."""

from dataclasses import dataclass, field

from megatron_optim import OptimError, UpdateRuleKind
from megatron_parallel.extensions import Section


@dataclass(frozen=True)
class RMSPropConfig:
    """Settings of RMSProp."""

    decay: float = field(
        default=0.99,
        metadata={"flag": "--rmsprop-decay", "help": "decay rate of the mean of squares"},
    )

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise OptimError("{decay:name} must be in [0, 1), got {decay:repr}", vars(self))


RULE = UpdateRuleKind(
    name="rmsprop",
    summary="divides the gradient by the root of its mean square",
    rule="bidirectional.rule:RMSProp",
    section=Section("rmsprop", RMSPropConfig, "RMSProp"),
)

NORMALISED = UpdateRuleKind(
    name="normalised",
    summary="steps of equal norm for matrices, AdamW for other parameters",
    rule="bidirectional.normalised:Normalised",
)
