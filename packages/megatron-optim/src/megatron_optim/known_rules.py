"""The names of update rules. Nothing here imports torch."""

from megatron_parallel import Extensions

from megatron_optim.errors import OptimError

RULES = Extensions(
    "megatron.update_rules",
    "update rule",
    OptimError,
    own={"adam": "megatron_optim.rules:AdamW", "sgd": "megatron_optim.rules:SGD"},
)
"""Classes of update rules by the name that ``OptimizerConfig.optimizer`` gives."""
