"""Sections and checks that extensions bring to the configuration of a run.

A run chooses a task (--task), an update rule (--optimizer) and what linear layers multiply by
(--linear-product), by name. Such an extension may bring sections of settings, which become flags of
``pretrain KIND`` and sections of files, and checks of the whole run. A run has those of what it has
chosen, and refuses the others. Importing this module does not import torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from megatron_models import ModelKind, find_kind, model_kinds
from megatron_optim import OptimizerConfig, update_rules
from megatron_parallel.extensions import Section
from megatron_parallel.tensor_parallel.product_kinds import PRODUCTS, find_product

from megatron_train.config.fields import flag_of
from megatron_train.config.products import PLAIN
from megatron_train.config.values import Values
from megatron_train.errors import TrainError
from megatron_train.tasks.registry import TASKS

Check = Callable[[Any], None]
"""A function of the run that raises a `TrainError` with the flags named."""


@dataclass(frozen=True)
class SelectedExtensions:
    """What a run has chosen by name; of what is None, everything that is installed counts.

    Attributes:
        task: what the model is trained to do.
        rule: how parameters follow from gradients.
        product: what linear layers multiply by.
    """

    task: str | None = None
    rule: str | None = None
    product: str | None = None

    @classmethod
    def from_values(cls, values: Values, kind: str) -> "SelectedExtensions":
        """Returns what given values choose, and the defaults of a kind of model."""
        rule: str = values.get("optimizer.optimizer") or OptimizerConfig.optimizer
        product: str = values.get("placement.linear_product") or PLAIN
        return cls(values.get("training.task") or default_task(kind), rule, product)


class _Kind(Protocol):
    """An extension that brings one section at most."""

    @property
    def name(self) -> str: ...

    @property
    def section(self) -> Section | None: ...


@dataclass(frozen=True)
class _Extension:
    """One of the extensions that runs choose from: the flag that names it, and what it brings."""

    flag: str
    what: str
    name: str
    sections: Sequence[Section]
    checks: Sequence[Check] = ()

    @classmethod
    def of(cls, flag: str, what: str, kind: _Kind) -> "_Extension":
        sections = () if kind.section is None else (kind.section,)
        return cls(flag, what, kind.name, sections, getattr(kind, "checks", ()))


def tasks_for(kind: str) -> list[str]:
    """Returns the names of the installed tasks that can train a kind of model.

    Raises:
        ConfigError: no such kind is installed.
    """
    found = find_kind(kind)
    return [name for name in TASKS.entries() if _trains(name, found)]


def kinds_for(task: str) -> list[str]:
    """Returns the names of the installed kinds of models that a task can train."""
    return [name for name, kind in model_kinds().items() if _trains(task, kind)]


def default_task(kind: str) -> str:
    """Returns the name of the task that a kind of model is trained for where none is named."""
    return find_kind(kind).default_task


def extension_sections(kind: str, selected: SelectedExtensions) -> dict[str, Section]:
    """Returns the sections of what is chosen by name.

    Raises:
        TrainError: two extensions bring different sections of one name.
    """
    found: dict[str, Section] = {}
    for extension in _extensions(kind, selected):
        for section in extension.sections:
            other = found.setdefault(section.name, section)
            if other.config is not section.config:
                raise TrainError(
                    f"the section {section.name!r} is brought twice: {_path(other.config)} and "
                    f"{_path(section.config)}; uninstall one"
                )
    return found


def extension_checks(kind: str, selected: SelectedExtensions) -> list[Check]:
    """Returns the checks of what is chosen."""
    return [check for extension in _extensions(kind, selected) for check in extension.checks]


def check_task(kind: str, task: str) -> None:
    """Refuses a task that cannot train a kind of model.

    Raises:
        TrainError: with the tasks that can.
    """
    if task not in TASKS:
        raise TrainError(f"--task {task}: {TASKS.unknown_name_message(task)}")
    able = tasks_for(kind)
    if task not in able:
        raise TrainError(
            f"--task {task} trains models of kind {' and '.join(kinds_for(task)) or 'none'}, not "
            f"{kind}; give one of {', '.join(able)}"
        )


def refuse_unread_settings(run_task: str, section: str, config: Any) -> None:
    """Refuses settings that not every task reads, and the run's does not.

    The metadata of such a field has ``by_task``. `TaskKind.supported_settings` lists the settings
    that a task reads.

    Args:
        run_task: of the run.
        section: name of a section.
        config: the section.

    Raises:
        TrainError: with the flag.
    """
    read: Sequence[str] = getattr(TASKS.load(run_task), "supported_settings", ())
    for field in fields(config):
        given = field.metadata.get("by_task") and getattr(config, field.name) != field.default
        if given and f"{section}.{field.name}" not in read:
            raise TrainError(
                f"{flag_of(field.name)} has no effect in the task {run_task}, which does not read "
                "it; leave it out"
            )


def refuse_unselected_settings(
    values: Values, kind: str, selected: SelectedExtensions, flags: Mapping[str, str]
) -> None:
    """Refuses settings of extensions that the run has not chosen.

    Args:
        values: what was given.
        kind: of the model.
        selected: What the run selects.
        flags: flag of every setting, by its key.

    Raises:
        TrainError: naming an extension that has the setting.
    """
    own = extension_sections(kind, selected)
    names = {
        "--task": selected.task,
        "--optimizer": selected.rule,
        "--linear-product": selected.product,
    }
    for other in _extensions(kind, SelectedExtensions()):
        for name in {section.name for section in other.sections} - own.keys():
            given = next(iter(values.section(name)), None)
            if given is not None:
                raise TrainError(
                    f"{flags[f'{name}.{given}']} is a setting of the {other.what} {other.name}, "
                    f"and the run has {names[other.flag]}; give {other.flag} {other.name}, or "
                    "leave it out"
                )


def _extensions(kind: str, selected: SelectedExtensions) -> Iterator[_Extension]:
    """Yields what is chosen, or all there is to choose from.

    A rule or product that is not installed is left out: it is refused where it is named.
    """
    for name in tasks_for(kind) if selected.task is None else [selected.task]:
        task = TASKS.load(name)
        sections, checks = (getattr(task, part, ()) for part in ("sections", "checks"))
        yield _Extension("--task", "task", name, sections, checks)
    for name, rule in update_rules().items():
        if selected.rule in (None, name):
            yield _Extension.of("--optimizer", "update rule", rule)
    for name in PRODUCTS.entries():
        if selected.product in (None, name):
            yield _Extension.of("--linear-product", "product", find_product(name))


def _trains(task: str, kind: ModelKind) -> bool:
    """Whether a task can train a kind: one that names it, or any unless the task is limited."""
    if kind.default_task == task:
        return True
    names = getattr(TASKS.load(task), "model_kinds", None)
    return names is None or kind.name in names


def _path(cls: type[Any]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
