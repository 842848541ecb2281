"""The configuration of a mixture of experts. Importing this module does not import torch."""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from megatron_models.components.fields import flag
from megatron_models.components.mlp.spec import MLPConfig
from megatron_models.errors import ConfigError
from megatron_models.layer_pattern import PatternError, layer_pattern

LoadBalancing = Literal["none", "aux_loss", "seq_aux_loss"]
ScoreFunction = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class MoEConfig(MLPConfig):
    """Experts, the layers that have them, and the routing of tokens.

    ``moe_ffn_hidden_size`` may be left at 0. With experts it is then derived when the configuration
    is created.
    """

    num_experts: int = field(
        default=0,
        metadata=flag(
            "--num-experts",
            "number of experts that replace a feed-forward layer (mixture of experts); 0: none",
            nonnegative=True,
            maximum=100_000,
        ),
    )
    moe_router_topk: int = field(
        default=2, metadata=flag("--moe-router-topk", "number of experts of each token")
    )
    moe_ffn_hidden_size: int = field(
        default=0,
        metadata=flag(
            "--moe-ffn-hidden-size",
            "width of one expert; 0: ffn_hidden_size",
            nonnegative=True,
            unit="channels",
        ),
    )
    moe_shared_expert_intermediate_size: int = field(
        default=0,
        metadata=flag(
            "--moe-shared-expert-intermediate-size",
            "width of a shared expert, which every token uses too; 0: none",
            nonnegative=True,
            unit="channels",
        ),
    )
    moe_layer_freq: str = field(
        default="1",
        metadata=flag(
            "--moe-layer-freq",
            "which layers have experts: every N-th from the first, or a pattern of ones and zeros "
            "such as [0]+[1]*3",
        ),
    )
    moe_router_pre_softmax: bool = field(
        default=False,
        metadata=flag(
            "--moe-router-pre-softmax",
            "softmax over all experts before the top-k instead of over the selected ones after it",
        ),
    )
    moe_router_score_function: ScoreFunction = field(
        default="softmax",
        metadata=flag(
            "--moe-router-score-function",
            "function from a router's logits to scores; sigmoid scores are divided by the sum of "
            "the selected ones",
            choices=get_args(ScoreFunction),
        ),
    )
    moe_router_enable_expert_bias: bool = field(
        default=False,
        metadata=flag(
            "--moe-router-enable-expert-bias",
            "balance experts by a bias that affects the selection only and falls after each step "
            "in which an expert had more tokens than the mean; needs sigmoid scores",
        ),
    )
    moe_router_bias_update_rate: float = field(
        default=1e-3,
        metadata=flag(
            "--moe-router-bias-update-rate",
            "change of an expert's bias in one step",
            nonnegative=True,
            no_effect=True,
            objective=True,
        ),
    )
    moe_router_load_balancing_type: LoadBalancing = field(
        default="aux_loss",
        metadata=flag(
            "--moe-router-load-balancing-type",
            "balance the load over a micro-batch, over each of its sequences, or not at all",
            choices=get_args(LoadBalancing),
            no_effect=True,
            objective=True,
        ),
    )
    moe_aux_loss_coeff: float = field(
        default=0.0,
        metadata=flag(
            "--moe-aux-loss-coeff",
            "weight of the load-balancing loss",
            nonnegative=True,
            no_effect=True,
            objective=True,
        ),
    )
    moe_z_loss_coeff: float = field(
        default=0.0,
        metadata=flag(
            "--moe-z-loss-coeff",
            "weight of the z-loss, which keeps router logits small",
            nonnegative=True,
            no_effect=True,
            objective=True,
        ),
    )

    def _fill(self) -> None:
        super()._fill()
        if self.num_experts:
            self._set("moe_ffn_hidden_size", self.ffn_hidden_size)

    def _check(self) -> None:
        super()._check()
        if not self.num_experts:
            for entry in dataclasses.fields(MoEConfig):
                if entry.name.startswith("moe_") and getattr(self, entry.name) != entry.default:
                    raise ConfigError(
                        f"{{{entry.name}}} has no effect without experts; set {{num_experts:name}}",
                        vars(self),
                    )
            return
        if not 1 <= self.moe_router_topk <= self.num_experts:
            raise ConfigError("{moe_router_topk} must lie between 1 and {num_experts}", vars(self))
        if self.moe_aux_loss_coeff and self.moe_router_load_balancing_type == "none":
            raise ConfigError(
                "{moe_aux_loss_coeff} has no effect with {moe_router_load_balancing_type}; change "
                "one of them",
                vars(self),
            )
        self._check_scores()
        self._check_pattern()

    def _check_scores(self) -> None:
        sigmoid = self.moe_router_score_function == "sigmoid"
        if sigmoid and self.moe_router_pre_softmax:
            raise ConfigError(
                "{moe_router_pre_softmax:name} has no effect with {moe_router_score_function}; "
                "leave it out",
                vars(self),
            )
        if self.moe_router_enable_expert_bias and not sigmoid:
            raise ConfigError(
                "{moe_router_enable_expert_bias:name} needs {moe_router_score_function:name} "
                "sigmoid: a bias moves scores that do not depend on one another",
                vars(self),
            )

    def _check_pattern(self) -> None:
        try:
            pattern = layer_pattern(self.moe_layer_freq, self.num_layers)
        except PatternError as error:
            reason = str(error).replace("{", "{{").replace("}", "}}")
            raise ConfigError(f"{{moe_layer_freq:name}}: {reason}", vars(self)) from None
        if not any(pattern):
            raise ConfigError("{moe_layer_freq} selects no layer for experts", vars(self))

    @cached_property
    def moe_layers(self) -> tuple[bool, ...]:
        """For each layer, whether experts replace its feed-forward layer."""
        if not self.num_experts:
            return (False,) * self.num_layers
        return layer_pattern(self.moe_layer_freq, self.num_layers)
