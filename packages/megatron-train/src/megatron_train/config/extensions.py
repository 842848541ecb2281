"""Sections of settings and checks that extensions add to the configuration of a run.

A run selects three extensions by name: a task (--task), an update rule (--optimizer) and a product
of linear layers (--linear-product). An extension may add sections of settings, which become flags
of ``pretrain KIND`` and sections of configuration files, and checks of the whole run. A run has the
sections of the extensions that it selects and refuses settings of the others. Importing this module
does not import torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_models import ModelKind, find_kind, model_kinds
from megatron_optim import OptimizerConfig, update_rules
from megatron_parallel.extensions import Section
from megatron_parallel.tensor_parallel.product_kinds import PRODUCTS, ProductKind

from megatron_train.config.products import PLAIN
from megatron_train.config.values import Values
from megatron_train.errors import TrainError
from megatron_train.tasks.registry import TASKS

Check = Callable[[Any], None]
"""Takes the run and raises a `TrainError` that names the flags."""


@dataclass(frozen=True)
class SelectedExtensions:
    """The names of the extensions that a run selects. None stands for all that are installed.

    Attributes:
        task: Name of the task.
        rule: Name of the update rule.
        product: Name of the product that linear layers compute.
    """

    task: str | None = None
    rule: str | None = None
    product: str | None = None

    @classmethod
    def from_values(cls, values: Values, kind: str) -> "SelectedExtensions":
        """Returns the extensions that ``values`` name, and defaults for a kind of model."""
        rule: str = values.get("optimizer.optimizer") or OptimizerConfig.optimizer
        product: str = values.get("placement.linear_product") or PLAIN
        return cls(values.get("training.task") or default_task(kind), rule, product)

    def __str__(self) -> str:
        return f"task {self.task}, update rule {self.rule}, product {self.product}"


class _Kind(Protocol):
    """An extension that adds at most one section."""

    @property
    def name(self) -> str: ...

    @property
    def section(self) -> Section | None: ...


@dataclass(frozen=True)
class _Extension:
    """An installed extension: the flag that selects it, and its sections and checks."""

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
    """Returns the names of the installed tasks that can train models of ``kind``.

    Raises:
        ConfigError: The kind is not installed.
    """
    found = find_kind(kind)
    return [name for name in TASKS.entries() if _trains(name, found)]


def kinds_for(task: str) -> list[str]:
    """Returns the names of the installed kinds of models that ``task`` can train."""
    return [name for name, kind in model_kinds().items() if _trains(task, kind)]


def default_task(kind: str) -> str:
    """Returns the name of the task that models of ``kind`` are trained for by default."""
    return find_kind(kind).default_task


def extension_sections(kind: str, selected: SelectedExtensions) -> dict[str, Section]:
    """Returns the sections of the selected extensions by name.

    Raises:
        TrainError: Two extensions add different sections with the same name.
    """
    found: dict[str, Section] = {}
    for extension in _extensions(kind, selected):
        for section in extension.sections:
            other = found.setdefault(section.name, section)
            if other.config is not section.config:
                raise TrainError(
                    f"two extensions add a section {section.name!r}: {_path(other.config)} and "
                    f"{_path(section.config)}; uninstall one of them"
                )
    return found


def extension_checks(kind: str, selected: SelectedExtensions) -> list[Check]:
    """Returns the checks of the selected extensions."""
    return [check for extension in _extensions(kind, selected) for check in extension.checks]


def derived_by_task(values: Values, kind: str) -> Values:
    """Returns the given values with those that the task of the run derives from them.

    A task that is not installed derives nothing; `check_task` refuses it.
    """
    name: str = values.get("training.task") or default_task(kind)
    derive = getattr(TASKS.load(name), "derive", None) if name in TASKS else None
    found: Values = values if derive is None else derive(values)
    return found


def check_task(kind: str, task: str) -> None:
    """Refuses a task that cannot train models of ``kind``.

    Raises:
        TrainError: The task is not installed or trains other kinds; the message names the tasks
            that can train the kind.
    """
    if task not in TASKS:
        raise TrainError(f"--task {task}: {TASKS.unknown_name_message(task)}")
    able = tasks_for(kind)
    if task not in able:
        raise TrainError(
            f"--task {task} trains models of kind {' and '.join(kinds_for(task)) or 'none'}, not "
            f"{kind}; give one of {', '.join(able)}"
        )


def refuse_unselected_settings(
    values: Values, kind: str, selected: SelectedExtensions, flags: Mapping[str, str]
) -> None:
    """Refuses settings of extensions that the run does not select.

    Args:
        values: The given values.
        kind: Kind of the model.
        selected: Extensions that the run selects.
        flags: Flag of each setting by key.

    Raises:
        TrainError: A setting of another extension is given; the message names the extension.
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
                    f"but the run uses {names[other.flag]}; give {other.flag} {other.name} or "
                    "leave the setting out"
                )


def _extensions(kind: str, selected: SelectedExtensions) -> Iterator[_Extension]:
    """Yields the selected extensions; all installed ones where nothing is selected.

    An update rule or product that is not installed is skipped here and refused by its own check.
    """
    for name in tasks_for(kind) if selected.task is None else [selected.task]:
        task = TASKS.load(name)
        sections, checks = (getattr(task, part, ()) for part in ("sections", "checks"))
        yield _Extension("--task", "task", name, sections, checks)
    for name, rule in update_rules().items():
        if selected.rule in (None, name):
            yield _Extension.of("--optimizer", "update rule", rule)
    for name, product in PRODUCTS.load_instances(ProductKind).items():
        if selected.product in (None, name):
            yield _Extension.of("--linear-product", "product", product)


def _trains(task: str, kind: ModelKind) -> bool:
    """Returns whether a task can train a kind: it is the default task, or not limited to others."""
    if kind.default_task == task:
        return True
    names = getattr(TASKS.load(task), "model_kinds", None)
    return names is None or kind.name in names


def _path(cls: type[Any]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
