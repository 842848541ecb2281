"""The section ``checkpoint``: where a run saves its checkpoints and where it starts from."""

from dataclasses import dataclass
from typing import Literal

from megatron_train.config.fields import check_positive, flag_of, setting
from megatron_train.errors import TrainError

ScheduleChoice = Literal["unchanged", "checkpoint", "override", "plateau", "decay"]
"""Which schedules a run continues with: those of its settings, whose lengths must be those of the
checkpoint; those of the checkpoint; those of its settings; or those of the checkpoint, extended."""

_SCHEDULE_CHOICES = (
    "use_checkpoint_opt_param_scheduler",
    "override_opt_param_scheduler",
    "extend_schedule",
)


@dataclass(frozen=True)
class CheckpointConfig:
    """Settings of saving and loading checkpoints."""

    save: str | None = setting(
        None, "folder for checkpoints, metrics and the loss plot of this run", unit="path"
    )
    load: str | None = setting(
        None,
        "folder of checkpoints to continue from; the newest complete one is loaded",
        unit="path",
    )
    save_interval: int | None = setting(
        None, "steps between checkpoints; the end of a run is always saved", unit="steps"
    )
    keep_last: int | None = setting(
        None, "number of complete checkpoints to keep; unset: all (our name)", unit="checkpoints"
    )
    finetune: bool = setting(
        False,
        "begin a new run with the weights in --load, at step 0 with a new optimizer state; if "
        "--save already holds this run, continue it",
    )
    pretrained_checkpoint: str | None = setting(
        None,
        "folder of checkpoints whose weights a new run begins with, as by --finetune; used while "
        "--load has no checkpoint",
        unit="path",
    )
    model_family: str | None = setting(
        None,
        "family of published models to record in checkpoints, for export; a run that begins with a "
        "checkpoint keeps the family of that checkpoint (our name)",
        unit="family",
    )
    no_load_optim: bool = setting(
        False, "load weights and position from --load, but begin with a new optimizer state"
    )
    no_load_rng: bool = setting(
        False,
        "allow --seed to differ from the checkpoint's, which is refused otherwise; the seed is the "
        "only random state",
    )
    allow_changed_run: tuple[Literal["data", "tokenizer", "objective"], ...] | None = setting(
        None,
        "parts of the run that may differ from the checkpoint's (data, tokenizer, objective); "
        "differences are refused otherwise (our name)",
    )
    use_checkpoint_args: bool = setting(
        False, "take settings of the model that are not given from the checkpoint to load"
    )
    use_checkpoint_opt_param_scheduler: bool = setting(
        False,
        "take the schedules of learning rate and weight decay from the checkpoint in --load, "
        "instead of those that flags describe",
    )
    override_opt_param_scheduler: bool = setting(
        False,
        "jump to the schedules of learning rate and weight decay that flags describe, although "
        "those of the checkpoint in --load have other lengths, which is refused otherwise",
    )
    extend_schedule: Literal["plateau", "decay"] | None = setting(
        None,
        "continue without a jump to another length of the run: keep the constant rate and decay "
        "later (plateau), or decay from the present rate (decay) (our name)",
    )
    exit_on_missing_checkpoint: bool = setting(
        False, "fail if --load has no complete checkpoint, instead of starting a new run"
    )

    @property
    def schedule_choice(self) -> ScheduleChoice:
        """Which schedules a run that continues takes."""
        if self.use_checkpoint_opt_param_scheduler:
            return "checkpoint"
        if self.override_opt_param_scheduler:
            return "override"
        return self.extend_schedule or "unchanged"

    def __post_init__(self) -> None:
        check_positive(self, "save_interval", "keep_last")
        if self.save is None:
            for name in ("save_interval", "keep_last"):
                if getattr(self, name) is not None:
                    raise TrainError(f"{flag_of(name)} needs --save, the folder for checkpoints")
        for name in (
            "exit_on_missing_checkpoint",
            "no_load_optim",
            *_SCHEDULE_CHOICES,
        ):
            if getattr(self, name) and self.load is None:
                raise TrainError(
                    f"{flag_of(name)} needs --load, the folder of checkpoints to continue from"
                )
        choices = [flag_of(name) for name in _SCHEDULE_CHOICES if getattr(self, name)]
        if len(choices) > 1:
            raise TrainError(f"{' and '.join(choices)} choose different schedules; give one")
        if self.finetune and choices:
            raise TrainError(
                f"{choices[0]} has no effect with --finetune, which begins a new run; leave out "
                "one of them"
            )
        for name in ("finetune", "use_checkpoint_args", "no_load_rng", "allow_changed_run"):
            if getattr(self, name) and self.load is None and self.pretrained_checkpoint is None:
                raise TrainError(
                    f"{flag_of(name)} needs a checkpoint: give --load or --pretrained-checkpoint"
                )
