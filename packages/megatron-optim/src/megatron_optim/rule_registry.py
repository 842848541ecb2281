"""Lookup of update rules that distributions register in the group ``megatron.update_rules``.

This module does not import torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_parallel.extensions import Extensions, Section

from megatron_optim.errors import OptimError

RULES = Extensions(
    "megatron.update_rules",
    "update rule",
    OptimError,
    builtin={
        "adam": "megatron_optim.builtin_rule_kinds:ADAM",
        "adafactor": "megatron_optim.builtin_rule_kinds:ADAFACTOR",
        "lion": "megatron_optim.builtin_rule_kinds:LION",
        "muon": "megatron_optim.builtin_rule_kinds:MUON",
        "sgd": "megatron_optim.builtin_rule_kinds:SGD",
    },
)
"""The kinds of update rules by the name in ``OptimizerConfig.optimizer``."""


@dataclass(frozen=True)
class UpdateRuleKind:
    """The description of an update rule: its class and its own settings.

    Attributes:
        name: The name in configurations, equal to the name of the entry point.
        summary: One line for lists.
        rule: ``package.module:Class`` of a `megatron_optim.UpdateRule`. It is imported, together
            with torch, when an optimizer is built.
        section: The settings that only this rule has, if any. The rule reads them from
            ``config.settings``.
        checks: Functions of the run that refuse invalid combinations of settings; see
            `megatron_train.TaskKind`.
        supported_settings: The settings that the rule reads of those that only some rules read,
            such as ``optimizer.adam_beta1`` (``read_by`` in the metadata of a field of
            `OptimizerConfig`). A run refuses the others. None means all.
    """

    name: str
    summary: str
    rule: str
    section: Section | None = None
    checks: tuple[Callable[[Any], None], ...] = ()
    supported_settings: tuple[str, ...] | None = None


def update_rules() -> dict[str, UpdateRuleKind]:
    """Returns all installed update rules by name, including those of other distributions."""
    return RULES.load_instances(UpdateRuleKind)


def find_rule(name: str) -> UpdateRuleKind:
    """Returns an installed update rule.

    Raises:
        OptimError: No rule of this name is installed.
    """
    return RULES.load_instance(name, UpdateRuleKind)
