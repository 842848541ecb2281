"""Schedules of a run that differ from those that its checkpoint was saved with."""

from collections.abc import Mapping
from dataclasses import asdict

from megatron_train.saved_values import short_repr
from megatron_train.trainer import Trainer


def schedule_changes(position: object, trainer: Trainer) -> str:
    """Returns in words how schedules differ from saved ones; empty if they are equal.

    Settings of a run may be equal although its schedules were those of an earlier run, which
    ``--use-checkpoint-opt-param-scheduler`` continued with.

    Args:
        position: The saved state of a trainer (`Trainer.state`).
        trainer: The trainer that continues.
    """
    saved = position.get("schedules") if isinstance(position, Mapping) else None
    changed = []
    for name, schedule in trainer.schedules.items():
        before = saved.get(name) if isinstance(saved, Mapping) else None
        if not isinstance(before, Mapping):
            continue
        for field, value in asdict(schedule).items():
            scales = field.endswith("samples")  # with the length of the run, which may change
            if not scales and field in before and before[field] != value:
                words = f"{name.replace('_', ' ')}: {field}"
                changed.append(f"{words} {short_repr(before[field])}, now {short_repr(value)}")
    return "; ".join(changed)
