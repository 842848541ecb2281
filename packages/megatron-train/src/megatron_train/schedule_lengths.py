"""Schedules of a run that continues with another length than that of its checkpoint.

Rates are functions of consumed samples whose lengths follow from the length of the run, so a run
that continues with more steps would jump to another rate. Megatron-Core refuses such a run unless
``--override-opt-param-scheduler`` or ``--use-checkpoint-opt-param-scheduler`` chooses a schedule.
``--extend-schedule`` names two more intents, neither of which changes the rate of the next step.
"""

from collections.abc import Mapping
from dataclasses import replace

from megatron_optim import LearningRateSchedule, OptimError, WeightDecaySchedule

from megatron_train.config.checkpoint import ScheduleChoice
from megatron_train.errors import TrainError
from megatron_train.trainer import Schedule, Trainer, saved_schedules

_LENGTHS = ("warmup_samples", "decay_samples", "wsd_decay_samples", "samples")
_POINTS = 64


def settle_schedules(
    trainer: Trainer, state: Mapping[str, object], choice: ScheduleChoice
) -> list[str]:
    """Chooses the schedules of a run that continues; changes those of the trainer.

    Args:
        trainer: The trainer, at its position.
        state: The saved state of a trainer (`Trainer.state`).
        choice: The schedules that the run continues with, other than those of the checkpoint.

    Returns:
        A line for each rate that jumps, with ``override``.

    Raises:
        TrainError: A schedule has another length, and nothing says what is meant; or it cannot be
            extended.
    """
    lines = []
    for name, before in saved_schedules(state).items():
        now, consumed = trainer.schedules[name], trainer.consumed_samples
        if not _length_changes(before, now, consumed):
            continue
        rates = f"{before.at(consumed):.4g} before, {now.at(consumed):.4g} after"
        what = name.replace("_", " ")
        if choice == "override":
            lines.append(f"{what} jumps at step {trainer.iteration}: {rates}")
        elif choice != "unchanged":
            setattr(trainer, name, _extended(before, now, consumed, choice))
        else:
            raise TrainError(
                f"the schedule of the {what} has another length than before step "
                f"{trainer.iteration} ({_lengths(before, now)}), so it changes ({rates}); give the "
                "length of the run before, --use-checkpoint-opt-param-scheduler to continue with "
                "the old schedule, --extend-schedule decay or plateau to extend it, or "
                "--override-opt-param-scheduler to jump to the new one"
            )
    return lines


def _length_changes(before: Schedule, now: Schedule, consumed: int) -> bool:
    """Returns whether lengths differ that change rates from here on."""
    lengths = {name: value for name, value in vars(now).items() if name in _LENGTHS}
    if all(vars(before)[name] == value for name, value in lengths.items()):
        return False
    try:
        longer = replace(before, **lengths)
    except OptimError:  # such lengths do not fit the other settings
        return True
    ends = [
        value for each in (before, now) for name, value in vars(each).items() if name in lengths
    ]
    last = max(consumed, *(end for end in ends if end is not None)) + 1
    grid = {consumed + (last - consumed) * point // _POINTS for point in range(_POINTS + 1)}
    if any(before.at(samples) != longer.at(samples) for samples in grid):
        return True
    # A schedule that was extended has a highest rate of its own.
    decays = isinstance(before, LearningRateSchedule) and before.decay_style != "constant"
    return decays and any(before.at(samples) != now.at(samples) for samples in grid)


def _lengths(before: Schedule, now: Schedule) -> str:
    return ", ".join(
        f"{name} {vars(before)[name]}, now {value}"
        for name, value in vars(now).items()
        if name in _LENGTHS and vars(before)[name] != value
    )


def _extended(before: Schedule, now: Schedule, consumed: int, choice: str) -> Schedule:
    """Returns the schedule of the checkpoint, extended to the length of the run.

    Weight decay stays as it was. A schedule that was extended to this length already stays, too.
    """
    if isinstance(before, WeightDecaySchedule) or isinstance(now, WeightDecaySchedule):
        return before
    if before.decay_samples == now.decay_samples:
        return before
    flag, rate = f"--extend-schedule {choice}", before.at(consumed)
    if consumed < before.warmup_samples:
        raise TrainError(
            f"{flag}: the warm-up ends after {before.warmup_samples} samples, of which {consumed} "
            "are consumed; extend the run later, or use --override-opt-param-scheduler"
        )
    try:
        if choice == "decay":
            return replace(now, init_lr=rate, max_lr=rate, warmup_samples=consumed)
        if before.decay_style not in ("WSD", "constant"):
            raise TrainError(
                f"{flag}: the style {before.decay_style} has no plateau; use --extend-schedule "
                "decay, which decays from the present rate to the end of the run"
            )
        begins = before.decay_samples - (before.wsd_decay_samples or 0)
        if before.decay_style == "WSD" and consumed > begins:
            raise TrainError(
                f"{flag}: the decay began after {begins} samples, and {consumed} are consumed; "
                "continue from an earlier checkpoint, or use --extend-schedule decay"
            )
        lengths = {name: vars(now)[name] for name in ("decay_samples", "wsd_decay_samples")}
        return replace(before, **lengths)
    except OptimError as error:
        raise TrainError(f"{flag}: {error}; change the length of the run or of its decay") from None
