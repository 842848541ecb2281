"""Kinds of update rules, found by the entry-point group ``megatron.update_rules``.

Nothing here imports torch.
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
        "sgd": "megatron_optim.builtin_rule_kinds:SGD",
    },
)
"""Kinds of update rules by the name that ``OptimizerConfig.optimizer`` gives."""


@dataclass(frozen=True)
class UpdateRuleKind:
    """A kind of update rules: its class, and settings of its own.

    Attributes:
        name: under which configurations know it; that of its entry point.
        summary: one line for lists.
        rule: ``package.module:Class`` of a `megatron_optim.UpdateRule`. It is imported when an
            optimizer is built, and torch with it.
        section: settings of its own, if it has some. The rule finds them in
            ``config.settings``.
        checks: functions of the run that refuse settings which do not go together, see
            `megatron_train.TaskKind`.
    """

    name: str
    summary: str
    rule: str
    section: Section | None = None
    checks: tuple[Callable[[Any], None], ...] = ()


def update_rules() -> dict[str, UpdateRuleKind]:
    """Returns every installed kind of update rules by name, other distributions' too."""
    return {name: find_rule(name) for name in RULES.entries()}


def find_rule(name: str) -> UpdateRuleKind:
    """Returns an installed kind of update rules.

    Raises:
        OptimError: there is none of that name.
    """
    return RULES.load_instance(name, UpdateRuleKind)
