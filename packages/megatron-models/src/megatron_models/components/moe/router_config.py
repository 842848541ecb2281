"""The configuration of a router: its fields, and the checks that they fit together.

Importing this module does not import torch.
"""

from dataclasses import dataclass

from megatron_parallel.nearest import nearest_divisors

from megatron_models.components.moe.router_fields import RouterFields
from megatron_models.errors import ConfigError

_SELECTIONS = {
    "moe_router_expert_choice": True,
    "moe_router_force_load_balancing": True,
    "moe_router_load_balancing_type": "sinkhorn",
}
"""Selections other than the best experts of each token, by field and value."""


@dataclass(frozen=True, kw_only=True)
class RouterConfig(RouterFields):
    """How a router scores experts, selects those of a token, and weights their outputs."""

    def _check(self) -> None:
        super()._check()
        if not self.num_experts:
            return
        if not 1 <= self.moe_router_topk <= self.num_experts:
            nearest = min(max(self.moe_router_topk, 1), self.num_experts)
            raise self._error(
                f"{{moe_router_topk}} must lie between 1 and {{num_experts}}; use {nearest}"
            )
        self._check_scores()
        self._check_bias()
        self._check_groups()
        self._check_selection()
        self._check_losses()
        if self.moe_input_jitter_eps >= 1:
            raise self._error(
                "{moe_input_jitter_eps} must be below 1, so that no input is 0; 0.01 is usual"
            )

    def _check_scores(self) -> None:
        if self.moe_router_score_function != "softmax" and self.moe_router_pre_softmax:
            raise self._error(
                "{moe_router_pre_softmax:name} has no effect with {moe_router_score_function}; "
                "leave it out"
            )
        if self.moe_router_norm_topk_prob == "auto":
            return
        if self.softmax_of_selected:
            raise self._error(
                "{moe_router_norm_topk_prob} has no effect on a softmax over the selected experts, "
                "whose sum is 1; leave it out or add {moe_router_pre_softmax:name}"
            )
        if self.moe_router_expert_choice:
            raise self._error(
                "{moe_router_norm_topk_prob} does not work with {moe_router_expert_choice:name}, "
                "since any number of experts selects a token; leave it out"
            )
        default = self.moe_router_score_function != "softmax" and self.moe_router_topk > 1
        if default == (self.moe_router_norm_topk_prob == "yes"):
            raise self._error(
                "{moe_router_norm_topk_prob} is the default with {moe_router_score_function} "
                "scores and {moe_router_topk}; leave it out"
            )

    def _check_bias(self) -> None:
        if not self.moe_router_enable_expert_bias:
            if self.moe_router_bias_update_rate != type(self).moe_router_bias_update_rate:
                raise self._error(
                    "{moe_router_bias_update_rate} has no effect without a bias; add "
                    "{moe_router_enable_expert_bias:name}"
                )
        elif self.softmax_of_selected:
            raise self._error(
                "{moe_router_enable_expert_bias:name} needs {moe_router_score_function:name} "
                "sigmoid or {moe_router_pre_softmax:name}: a bias moves scores of all experts, "
                "not logits"
            )

    def _check_groups(self) -> None:
        groups, chosen = self.moe_router_num_groups, self.moe_router_group_topk
        if not groups and not chosen:
            if self.moe_router_group_score_topk:
                raise self._error(
                    "{moe_router_group_score_topk} has no effect without groups; set "
                    "{moe_router_num_groups:name}"
                )
            return
        if not (groups and chosen):
            raise self._error(
                "{moe_router_num_groups} and {moe_router_group_topk} need each other; set both or "
                "none"
            )
        if self.num_experts % groups:
            raise self._error(
                "{moe_router_num_groups} does not divide {num_experts}; use "
                f"{nearest_divisors(self.num_experts, groups)}"
            )
        if chosen >= groups:
            fewer = f"{groups - 1} or no groups" if groups > 1 else "no groups"
            raise self._error(
                "{moe_router_group_topk} must be less than {moe_router_num_groups}, or groups have "
                f"no effect; use {fewer}"
            )
        size = self.num_experts // groups
        if chosen * size < self.moe_router_topk:
            enough = -(-self.moe_router_topk // size)
            use = f"{enough} groups" if enough < groups else "no groups"
            raise self._error(
                f"{{moe_router_group_topk}} groups of {size} experts have fewer experts than "
                f"{{moe_router_topk}}; use {use}, or {{moe_router_topk:name}} {chosen * size}"
            )
        if self.moe_router_group_score_topk > size:
            raise self._error(
                f"{{moe_router_group_score_topk}} exceeds the {size} experts of a group; use {size}"
            )

    def _check_selection(self) -> None:
        used = [name for name, value in _SELECTIONS.items() if getattr(self, name) == value]
        if len(used) > 1:
            raise self._error(f"{{{used[0]}}} and {{{used[1]}}} exclude each other; leave one out")
        if not used:
            return
        for name in ("moe_router_num_groups", "moe_router_enable_expert_bias"):
            if getattr(self, name):
                raise self._error(
                    f"{{{name}}} has no effect with {{{used[0]}}}, which selects experts in "
                    "another way; leave one out"
                )
        if used[0] == "moe_router_expert_choice":
            self._check_expert_choice()
        elif used[0] == "moe_router_load_balancing_type":
            self._check_sinkhorn()

    def _check_expert_choice(self) -> None:
        if self.softmax_of_selected:
            raise self._error(
                "{moe_router_expert_choice:name} needs scores of all experts; add "
                "{moe_router_pre_softmax:name}"
            )
        if given := self._loss_coefficients:
            raise self._error(
                f"{given[0]} has no effect with {{moe_router_expert_choice:name}}, whose load is "
                "even; set it to 0"
            )
        if self.moe_apply_probs_on_input:
            raise self._error(
                "{moe_apply_probs_on_input:name} does not work with "
                "{moe_router_expert_choice:name}; leave one out"
            )

    def _check_sinkhorn(self) -> None:
        """Refuses other weights than Megatron-LM's, so that they need no field of their own."""
        if given := self._loss_coefficients:
            raise self._error(
                f"{given[0]} does not work with {{moe_router_load_balancing_type}}; set it to 0"
            )
        softmax = self.moe_router_pre_softmax
        sigmoid = self.moe_router_score_function == "sigmoid"
        if self.moe_router_topk > 1 and not softmax:
            raise self._error(
                "{moe_router_load_balancing_type} with {moe_router_topk} has weights by a softmax "
                "over all experts; add {moe_router_pre_softmax:name}"
            )
        if self.moe_router_topk == 1 and not sigmoid:
            raise self._error(
                "{moe_router_load_balancing_type} with {moe_router_topk} has sigmoids as weights; "
                "set {moe_router_score_function:name} sigmoid"
            )

    def _check_losses(self) -> None:
        kind = self.moe_router_load_balancing_type
        if self.moe_aux_loss_coeff and kind == "none":
            raise self._error(
                "{moe_aux_loss_coeff} has no effect with {moe_router_load_balancing_type}; set it "
                "to 0, or {moe_router_load_balancing_type:name} to aux_loss"
            )
        for own in ("seq_aux_loss", "global_aux_loss"):
            if kind == own and getattr(self, f"moe_{own}_coeff"):
                raise self._error(
                    f"{{moe_{own}_coeff}} is the weight of the loss that "
                    "{moe_router_load_balancing_type} already selects; use "
                    "{moe_aux_loss_coeff:name}"
                )

    @property
    def _loss_coefficients(self) -> list[str]:
        """The fields of load-balancing losses that are not 0, in braces."""
        names = (f"moe_{kind}aux_loss_coeff" for kind in ("", "seq_", "global_"))
        return [f"{{{name}}}" for name in names if getattr(self, name)]

    def _error(self, message: str) -> ConfigError:
        return ConfigError(message, vars(self))
