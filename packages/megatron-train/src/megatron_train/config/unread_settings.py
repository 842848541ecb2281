"""Settings that only some tasks or update rules read, in runs with others.

The metadata of such a field has ``read_by``: ``task`` or ``update rule``. `TaskKind` and
`UpdateRuleKind` list in ``supported_settings`` the settings that an extension reads.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from megatron_optim import find_rule
from megatron_optim.rule_registry import RULES

from megatron_train.config.extensions import SelectedExtensions
from megatron_train.config.options import flags_of
from megatron_train.config.recipes import RECIPE_ORIGIN
from megatron_train.config.run_sections import RunSections, sections
from megatron_train.config.values import Values
from megatron_train.errors import TrainError
from megatron_train.tasks.registry import TASKS


def refuse_unread_settings(run: RunSections) -> None:
    """Refuses settings that neither the task nor the update rule of a run reads.

    Raises:
        TrainError: Such a setting does not have its default; the message names its flag.
    """
    selected = run.selected_extensions
    for section, field, reader in _unread(run.model.kind, selected):
        config = run.section_by_name(section)
        if getattr(config, field.name) != field.default:
            name = selected.task if reader == "task" else selected.rule
            raise TrainError(
                f"{flags_of(type(config))[field.name]} has no effect: the {reader} {name} does not "
                "read it; leave it out"
            )


def without_unread_settings_of_recipe(values: Values, kind: str) -> Values:
    """Returns ``values`` without those of a recipe for another task or update rule.

    Args:
        values: The given values.
        kind: Kind of the model.
    """
    unread = {
        f"{section}.{field.name}"
        for section, field, _ in _unread(kind, SelectedExtensions.from_values(values, kind))
    }
    return Values(
        {
            key: given
            for key, given in values.given.items()
            if key not in unread or not given.origin.startswith(RECIPE_ORIGIN)
        }
    )


def _unread(kind: str, selected: SelectedExtensions) -> Iterator[tuple[str, Any, str]]:
    """Yields section, field and ``read_by`` of each setting that the extensions do not read.

    Yields nothing for a task or rule that is not installed, which another check refuses.
    """
    task, rule = selected.task or "", selected.rule or ""
    if task not in TASKS or rule not in RULES:
        return
    supported: dict[str, tuple[str, ...] | None] = {
        "task": getattr(TASKS.load(task), "supported_settings", ()),
        "update rule": find_rule(rule).supported_settings,
    }
    for section, (_, config) in sections(kind, selected).items():
        for field in fields(config):
            reader = field.metadata.get("read_by", "")
            settings = supported.get(reader)
            if settings is not None and f"{section}.{field.name}" not in settings:
                yield section, field, reader
