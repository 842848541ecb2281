"""The entries in the group ``megatron.update_rules``; no torch."""

from dataclasses import dataclass, field

from megatron_optim import OptimError, UpdateRuleKind
from megatron_parallel.extensions import Section


@dataclass(frozen=True)
class RMSPropConfig:
    """Settings of the rule."""

    decay: float = field(
        default=0.99,
        metadata={"flag": "--rmsprop-decay", "help": "decay rate of the mean of squares"},
    )

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise OptimError("{decay:name} must lie in [0, 1), got {decay:repr}", vars(self))


RULE = UpdateRuleKind(
    name="rmsprop",
    summary="steps by the gradient over the root of the mean of its squares",
    rule="bidirectional.rule:RMSProp",
    section=Section("rmsprop", RMSPropConfig, "RMSProp"),
)

NORMALISED = UpdateRuleKind(
    name="normalised",
    summary="steps of one length for every matrix, adam for the rest",
    rule="bidirectional.normalised:Normalised",
)
