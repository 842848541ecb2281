"""The update rules that this package provides. This module does not import torch."""

from megatron_optim.rule_registry import UpdateRuleKind

ADAM = UpdateRuleKind(
    name="adam",
    summary="Adam with decoupled weight decay",
    rule="megatron_optim.rules:AdamW",
)
SGD = UpdateRuleKind(
    name="sgd",
    summary="stochastic gradient descent with momentum",
    rule="megatron_optim.rules:SGD",
)
