"""The section ``checkpoint``: where a run is kept, and where it starts from."""

from dataclasses import dataclass
from typing import Literal

from megatron_train.config.fields import check_positive, flag_of, setting
from megatron_train.errors import TrainError


@dataclass(frozen=True)
class CheckpointConfig:
    """Where checkpoints are written and read."""

    save: str | None = setting(
        None, "folder for checkpoints, metrics and the loss plot of this run", unit="path"
    )
    load: str | None = setting(
        None, "folder to continue from; takes its newest complete checkpoint", unit="path"
    )
    save_interval: int | None = setting(
        None, "steps between checkpoints; one is written at the end in any case", unit="steps"
    )
    keep_last: int | None = setting(
        None, "complete checkpoints to keep; unset: all (our name)", unit="checkpoints"
    )
    finetune: bool = setting(
        False,
        "begin a new run with the weights in --load: step 0, fresh optimizer; where --save already "
        "holds this very run, it is continued",
    )
    pretrained_checkpoint: str | None = setting(
        None,
        "folder whose weights a new run begins with, as by --finetune, where --load has no "
        "checkpoint yet",
        unit="path",
    )
    model_family: str | None = setting(
        None,
        "family of published models that a new run's checkpoints name, for an export; a run that "
        "begins with a checkpoint keeps its family (our name)",
        unit="family",
    )
    no_load_optim: bool = setting(
        False, "continue from --load with a fresh optimizer, its weights and position kept"
    )
    no_load_rng: bool = setting(
        False,
        "continue a run with another --seed, which is all the random state there is; "
        "refused without this flag",
    )
    allow_changed_run: tuple[Literal["data", "tokenizer", "objective"], ...] | None = setting(
        None,
        "continue a run although it has other data, another tokenizer or another "
        "objective than the checkpoint's, which is refused otherwise (our name)",
    )
    use_checkpoint_args: bool = setting(
        False, "take what is not given of the model's configuration from the checkpoint to load"
    )
    exit_on_missing_checkpoint: bool = setting(
        False, "refuse to start fresh where --load has no complete checkpoint"
    )

    def __post_init__(self) -> None:
        check_positive(self, "save_interval", "keep_last")
        if self.save is None:
            for name in ("save_interval", "keep_last"):
                if getattr(self, name) is not None:
                    raise TrainError(
                        f"{flag_of(name)} needs --save, the folder to write checkpoints to"
                    )
        for name in ("exit_on_missing_checkpoint", "no_load_optim"):
            if getattr(self, name) and self.load is None:
                raise TrainError(f"{flag_of(name)} needs --load")
        for name in ("finetune", "use_checkpoint_args", "no_load_rng", "allow_changed_run"):
            if getattr(self, name) and self.load is None and self.pretrained_checkpoint is None:
                raise TrainError(
                    f"{flag_of(name)} needs --load, or --pretrained-checkpoint, to take it from"
                )
