"""The fields of the capacity of experts. Importing this module does not import torch."""

from dataclasses import dataclass, field
from math import ceil
from typing import Literal, get_args

from megatron_models.components.fields import ComponentConfig, flag
from megatron_models.errors import ConfigError

DropPolicy = Literal["probs", "position"]


@dataclass(frozen=True, kw_only=True)
class CapacityFields(ComponentConfig):
    """How many tokens of a micro-batch an expert accepts, and which it drops."""

    moe_expert_capacity_factor: float = field(
        default=0.0,
        metadata=flag(
            "--moe-expert-capacity-factor",
            "tokens of a micro-batch that an expert accepts, as a multiple of its even share; "
            "others are dropped; 0: no limit",
            nonnegative=True,
        ),
    )
    moe_token_drop_policy: DropPolicy = field(
        default="probs",
        metadata=flag(
            "--moe-token-drop-policy",
            "which tokens an expert with more than its capacity keeps: those with the largest "
            "weights, or the earliest",
            choices=get_args(DropPolicy),
        ),
    )
    moe_pad_expert_input_to_capacity: bool = field(
        default=False,
        metadata=flag(
            "--moe-pad-expert-input-to-capacity",
            "pad the rows of each expert to its capacity, so that their number never changes and "
            "the host never waits for it",
            no_effect=True,
        ),
    )
    moe_expert_rank_capacity_factor: float = field(
        default=0.0,
        metadata=flag(
            "--moe-expert-rank-capacity-factor",
            "rows of experts that a rank has room for, as a multiple of the mean over expert-"
            "parallel ranks, so that the host never waits for their number; more are an error; 0: "
            "as many as there are",
            nonnegative=True,
            no_effect=True,
        ),
    )

    def _check(self) -> None:
        super()._check()
        if self.moe_expert_capacity_factor:
            return
        for name in ("moe_token_drop_policy", "moe_pad_expert_input_to_capacity"):
            if getattr(self, name) != getattr(CapacityFields, name):
                raise ConfigError(
                    f"{{{name}}} has no effect without {{moe_expert_capacity_factor:name}}; give "
                    "a factor such as 1.0 or leave it out",
                    vars(self),
                )

    def expert_capacity(self, tokens: int, choices: int, experts: int) -> int:
        """Returns the tokens that each expert accepts.

        Args:
            tokens: Tokens of the micro-batch, with padding: those of all its tensor- and
                context-parallel ranks.
            choices: Experts of each token.
            experts: Number of experts.
        """
        return ceil(tokens * choices * self.moe_expert_capacity_factor / experts)
