"""The fields of a router: scores, selection, weights and losses.

Importing this module does not import torch.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

from megatron_models.components.fields import ComponentConfig, flag

LoadBalancing = Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"]
ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
Normalization = Literal["auto", "yes", "no"]
RouterDtype = Literal["fp32", "fp64"]


@dataclass(frozen=True, kw_only=True)
class RouterFields(ComponentConfig):
    """How a router scores experts, selects those of a token, and weights their outputs.

    With groups, ``moe_router_group_score_topk`` may be left at 0. It is then derived.
    """

    num_experts: int = field(
        default=0,
        metadata=flag(
            "--num-experts",
            "number of experts that replace a feed-forward layer (mixture of experts); 0: none",
            nonnegative=True,
            maximum=100_000,
            small=4,
        ),
    )
    moe_router_topk: int = field(
        default=2,
        metadata=flag(
            "--moe-router-topk",
            "number of experts of each token",
            small=2,
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
            "function from a router's logits to scores; sigmoid and sqrtsoftplus scores are "
            "divided by the sum of the selected ones",
            choices=get_args(ScoreFunction),
        ),
    )
    moe_router_norm_topk_prob: Normalization = field(
        default="auto",
        metadata=flag(
            "--moe-router-norm-topk-prob",
            "divide the scores of a token's experts by their sum (our name); auto: unless the "
            "scores are a softmax over all experts or a token has one expert",
            choices=get_args(Normalization),
        ),
    )
    moe_router_topk_scaling_factor: float = field(
        default=1.0,
        metadata=flag(
            "--moe-router-topk-scaling-factor",
            "factor on the weights of a token's experts",
            positive=True,
        ),
    )
    moe_router_num_groups: int = field(
        default=0,
        metadata=flag(
            "--moe-router-num-groups",
            "groups of experts of which a token uses moe_router_group_topk; 0: no groups",
            nonnegative=True,
            small=2,
        ),
    )
    moe_router_group_topk: int = field(
        default=0,
        metadata=flag(
            "--moe-router-group-topk",
            "groups that contain the experts of a token; 0: no groups",
            nonnegative=True,
            small=1,
        ),
    )
    moe_router_group_score_topk: int = field(
        default=0,
        metadata=flag(
            "--moe-router-group-score-topk",
            "best scores of a group whose sum is the score of the group (our name); 0: "
            "moe_router_topk // moe_router_group_topk; 1: the maximum, as in DeepSeek-V2",
            nonnegative=True,
            derived=True,
        ),
    )
    moe_router_add_bias: bool = field(
        default=False,
        metadata=flag(
            "--moe-router-add-bias",
            "learned bias of the router's logits (our name), as in gpt-oss",
        ),
    )
    moe_router_enable_expert_bias: bool = field(
        default=False,
        metadata=flag(
            "--moe-router-enable-expert-bias",
            "balance experts by a bias that affects the selection only and falls after each step "
            "in which an expert had more tokens than the mean; needs scores of single experts",
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
    moe_router_expert_choice: bool = field(
        default=False,
        metadata=flag(
            "--moe-router-expert-choice",
            "every expert selects the same number of tokens of a micro-batch (our name); a token "
            "then depends on later tokens, so the model cannot generate",
        ),
    )
    moe_router_force_load_balancing: bool = field(
        default=False,
        metadata=flag(
            "--moe-router-force-load-balancing",
            "assign experts to tokens in turn, independent of scores; for benchmarks only",
        ),
    )
    moe_apply_probs_on_input: bool = field(
        default=False,
        metadata=flag(
            "--moe-apply-probs-on-input",
            "multiply the inputs of experts by their weights instead of the outputs, as in Llama 4",
        ),
    )
    moe_router_dtype: RouterDtype = field(
        default="fp32",
        metadata=flag(
            "--moe-router-dtype",
            "precision of logits and scores of routers",
            choices=get_args(RouterDtype),
            no_effect=True,
            objective=True,
        ),
    )
    moe_input_jitter_eps: float = field(
        default=0.0,
        metadata=flag(
            "--moe-input-jitter-eps",
            "in training, multiply inputs of routers by uniform noise between 1 - eps and 1 + eps",
            nonnegative=True,
            no_effect=True,
            objective=True,
        ),
    )
    moe_router_load_balancing_type: LoadBalancing = field(
        default="aux_loss",
        metadata=flag(
            "--moe-router-load-balancing-type",
            "balance the load by a loss over a micro-batch, over each of its sequences or over "
            "the micro-batches of a step; by a selection with Sinkhorn's algorithm; or not at all",
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
    moe_seq_aux_loss_coeff: float = field(
        default=0.0,
        metadata=flag(
            "--moe-seq-aux-loss-coeff",
            "weight of a load-balancing loss over each sequence, in addition to that of "
            "moe_router_load_balancing_type (our name)",
            nonnegative=True,
            no_effect=True,
            objective=True,
        ),
    )
    moe_global_aux_loss_coeff: float = field(
        default=0.0,
        metadata=flag(
            "--moe-global-aux-loss-coeff",
            "weight of a load-balancing loss over the micro-batches of a step, in addition to "
            "that of moe_router_load_balancing_type (our name)",
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
        if self.moe_router_group_topk > 0:
            derived = max(1, self.moe_router_topk // self.moe_router_group_topk)
            self._set("moe_router_group_score_topk", derived)

    @property
    def normalizes_weights(self) -> bool:
        """Whether the scores of a token's experts are divided by their sum.

        A softmax over the selected logits needs no division.
        """
        if self.moe_router_norm_topk_prob != "auto":
            return self.moe_router_norm_topk_prob == "yes"
        several = self.moe_router_topk > 1 and not self.moe_router_expert_choice
        return self.moe_router_score_function != "softmax" and several

    @property
    def softmax_of_selected(self) -> bool:
        """Whether weights are a softmax over the selected logits."""
        return self.moe_router_score_function == "softmax" and not self.moe_router_pre_softmax

    @property
    def balancing_losses(self) -> dict[str, float]:
        """The coefficient of each load-balancing loss that is not 0, by its type."""
        found = {
            "aux_loss": 0.0,
            "seq_aux_loss": self.moe_seq_aux_loss_coeff,
            "global_aux_loss": self.moe_global_aux_loss_coeff,
        }
        if self.moe_aux_loss_coeff:
            found[self.moe_router_load_balancing_type] = self.moe_aux_loss_coeff
        return {name: coefficient for name, coefficient in found.items() if coefficient}
