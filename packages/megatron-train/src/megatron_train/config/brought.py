"""Sections and checks that tasks bring to the configuration of a run.

A task that needs settings of its own names them in `TaskKind.sections`; they become flags of
``pretrain KIND`` and sections of files for every kind of model that the task can train. A run has
those of its own task, and the others are refused. Importing this module does not import torch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_models import ModelKind, find_kind, model_kinds
from megatron_parallel import Section

from megatron_train.config.values import Values
from megatron_train.errors import TrainError
from megatron_train.tasks.known import TASKS

Check = Callable[[Any], None]
"""A function of the run that raises a `TrainError` with the flags named."""


def tasks_for(kind: str) -> list[str]:
    """Return the names of the installed tasks that can train a kind of model.

    Raises:
        ConfigError: no such kind is installed.
    """
    found = find_kind(kind)
    return [name for name in TASKS.entries() if _trains(name, found)]


def kinds_for(task: str) -> list[str]:
    """Return the names of the installed kinds of models that a task can train."""
    return [name for name, kind in model_kinds().items() if _trains(task, kind)]


def default_task(kind: str) -> str:
    """Return the name of the task that a kind of model is trained for where none is named."""
    return find_kind(kind).default_task


def task_sections(kind: str, task: str | None = None) -> dict[str, Section]:
    """Return the sections of a task by name.

    Args:
        kind: of the model.
        task: its name. Defaults to all that can train the kind.

    Raises:
        TrainError: two tasks bring different sections of one name.
    """
    found: dict[str, Section] = {}
    for name in tasks_for(kind) if task is None else [task]:
        for section in _sections(name):
            other = found.setdefault(section.name, section)
            if other.config is not section.config:
                raise TrainError(
                    f"two tasks bring the section {section.name!r}: {_path(other.config)} and "
                    f"{_path(section.config)}; uninstall one"
                )
    return found


def task_checks(task: str) -> Sequence[Check]:
    """Return the checks of a task."""
    checks: Sequence[Check] = getattr(TASKS.load(task), "checks", ())
    return checks


def check_task(kind: str, task: str) -> None:
    """Refuse a task that cannot train a kind of model.

    Raises:
        TrainError: with the tasks that can.
    """
    if task not in TASKS:
        raise TrainError(f"--task {task}: {TASKS.unknown(task)}")
    able = tasks_for(kind)
    if task not in able:
        raise TrainError(
            f"--task {task} trains models of kind {' and '.join(kinds_for(task)) or 'none'}, not "
            f"{kind}; give one of {', '.join(able)}"
        )


def refuse_other_sections(values: Values, kind: str, task: str, flags: Mapping[str, str]) -> None:
    """Refuse settings of tasks other than the run's.

    Args:
        values: what was given.
        kind: of the model.
        task: of the run.
        flags: flag of every setting, by its key.

    Raises:
        TrainError: naming a task that has the setting.
    """
    own = task_sections(kind, task)
    for other in tasks_for(kind):
        for name in task_sections(kind, other).keys() - own.keys():
            given = next(iter(values.section(name)), None)
            if given is not None:
                raise TrainError(
                    f"{flags[f'{name}.{given}']} is a setting of the task {other}, and the run "
                    f"has {task}; give --task {other}, or leave it out"
                )


def _trains(task: str, kind: ModelKind) -> bool:
    """Whether a task can train a kind: one that names it, or any unless the task is limited."""
    if kind.default_task == task:
        return True
    kinds = getattr(TASKS.load(task), "kinds", None)
    return kinds is None or kind.name in kinds


def _sections(task: str) -> Sequence[Section]:
    sections: Sequence[Section] = getattr(TASKS.load(task), "sections", ())
    return sections


def _path(cls: type[Any]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
