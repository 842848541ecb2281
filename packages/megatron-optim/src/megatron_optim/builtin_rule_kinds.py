"""The kinds of update rules of this package. Nothing here imports torch."""

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
