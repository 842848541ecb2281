"""The starting point of a run: its checkpoint, the weights of another run, or the seed.

    with lock_save_folder(config.checkpoint, coordinator, command):
        start = StartingPoint.find(config.checkpoint, coordinator)
        start.load(trainer, config, record, console)

Checkpoints record whose weights a run began with (`StartingPoint.origin`). The same command line,
given again after a stop, therefore continues the run instead of beginning a new one.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ckpt import (
    Checkpoint,
    CheckpointStore,
    Coordinator,
    DirectoryInUseError,
    describe_foreign_checkpoint,
    find_family,
    map_reduce,
    run_lock,
)

from megatron_train.checkpointing import is_checkpoint, load_weights, restore
from megatron_train.config.checkpoint import CheckpointConfig
from megatron_train.config.run import RunConfig
from megatron_train.errors import TrainError
from megatron_train.metrics.console import Console
from megatron_train.run_record import RunRecord
from megatron_train.saved_values import read_value
from megatron_train.saving import SavedCheckpoint, Saver
from megatron_train.trainer import Trainer


def check_output_folders(config: RunConfig) -> None:
    """Refuses output folders if their path or one of its parents is a file.

    Raises:
        TrainError: The path is a file; the message names the flag and the file.
    """
    folders = {
        "--save": config.checkpoint.save,
        "--tensorboard-dir": config.logging.tensorboard_dir,
        "--data-cache-path": config.data.data_cache_path,
        "--object-storage-cache-path": config.data.object_storage_cache_path,
    }
    for flag, folder in folders.items():
        if folder is None or "://" in folder:
            continue
        path = Path(folder).absolute()
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        if not existing.is_dir():
            raise TrainError(
                f"{flag} {folder}: {existing} is a file, not a folder; give another name"
            )


@contextmanager
def lock_save_folder(
    config: CheckpointConfig, coordinator: Coordinator, command: str
) -> Iterator[None]:
    """Locks the folder of --save in the `with` block, so that no other run saves into it.

    All ranks enter together. Rank 0 takes the lock, which the kernel releases when its process
    ends.

    Raises:
        TrainError: Another run has the lock; the message names its process and command. Other ranks
            raise a `CheckpointError` with the same message.
        OSError: The folder cannot be created.
    """
    with ExitStack() as stack:

        def take(_: list[None]) -> None:
            if config.save is None:
                return
            try:
                stack.enter_context(run_lock(config.save, command))
            except DirectoryInUseError as error:
                raise TrainError(
                    f"--save {config.save} is in use by another run ({error.holder}); wait until "
                    "it ends, or give another folder"
                ) from None

        map_reduce(coordinator, lambda: None, take)
        yield


@dataclass(frozen=True)
class StartingPoint:
    """Where a run starts from.

    Attributes:
        folder: Folder of the checkpoint. None starts from the seed.
        weights_only: Whether a new run begins with the weights in ``folder``.
        origin: Checkpoint whose weights the run first began with. Empty if they were initialized
            from the seed.
        note: Reason why ``folder`` is not the folder of --load. Empty if it is.
        family: Family of the model in the checkpoint, if it names one.
    """

    folder: Path | None = None
    weights_only: bool = False
    origin: str = ""
    note: str = ""
    family: str | None = None

    @classmethod
    def find(cls, config: CheckpointConfig, coordinator: Coordinator) -> "StartingPoint":
        """Finds the starting point of a run. The result is equal on all ranks.

        Raises:
            TrainError: --save has another run, or the folder to load weights from has none.
            CheckpointError: A given checkpoint is incomplete or damaged.
        """
        plain = map_reduce(
            coordinator, lambda: None, lambda _: _find(config).with_family().to_plain()
        )
        folder = None if plain["folder"] is None else Path(plain["folder"])
        return cls(**{**plain, "folder": folder})

    def to_plain(self) -> dict[str, Any]:
        """Returns plain values to send to other ranks."""
        return {**asdict(self), "folder": None if self.folder is None else str(self.folder)}

    def with_family(self) -> "StartingPoint":
        """Returns a copy with the family that the checkpoint names."""
        if self.folder is None:
            return self
        held = Checkpoint(self.folder) if is_checkpoint(self.folder) else _newest(self.folder)
        model = None if held is None else held.model
        return self if model is None else replace(self, family=model.family)

    def resolve_family(self, config: RunConfig) -> str | None:
        """Returns the family to record in checkpoints: that of ``folder``, or --model-family.

        Raises:
            TrainError: --model-family differs from the checkpoint's family or does not fit the
                model.
            CheckpointError: The family is not installed.
        """
        wanted = config.checkpoint.model_family
        if wanted is None or wanted == self.family:
            return self.family
        if self.family is not None:
            raise TrainError(
                f"--model-family {wanted}: {self.folder} holds a model of family {self.family}, "
                f"which the run keeps; give --model-family {self.family} or leave it out"
            )
        family = find_family(wanted)
        if family.kind != config.model.kind:
            raise TrainError(
                f"--model-family {wanted} describes models of kind {family.kind}, not "
                f"{config.model.kind}; leave it out"
            )
        if differences := family.differences(config.model):
            raise TrainError(
                f"--model-family {wanted}: models of this family have {'; '.join(differences)}; "
                "leave it out or change the model"
            )
        return wanted

    def load(
        self, trainer: Trainer, config: RunConfig, record: RunRecord, console: Console
    ) -> SavedCheckpoint | None:
        """Loads the checkpoint into ``trainer``, if there is one, and prints a line about it.

        Returns:
            The checkpoint that the run continues from; None for a new run.

        Raises:
            TrainError: The checkpoint does not fit the run; the message names the differences.
        """
        if self.note:
            console.print_line(self.note)
        if self.folder is None:
            return None
        if self.weights_only:
            iteration, new = load_weights(trainer, self.folder, record)
            console.print_line(
                f"beginning at step 0 with the weights of {self.folder}, step {iteration}; "
                "optimizer state and order of samples are new"
            )
            if new:
                console.print_line(
                    f"parameters of heads that are new, from --seed: {', '.join(new)}"
                )
            return None
        checkpoint = config.checkpoint
        own = (
            self.note == "" and checkpoint.load is not None
        )  # --no-load-optim applies only to --load
        allowed: set[str] = {*(checkpoint.allow_changed_run or ())}
        if checkpoint.no_load_rng:
            allowed.add("seed")
        found = restore(
            trainer,
            self.folder,
            record,
            console,
            load_optimizer=not (own and checkpoint.no_load_optim),
            schedules=checkpoint.schedule_choice,
            allowed_changes=allowed,
        )
        if not found:
            absent = f"no complete checkpoint in {self.folder}: starting a new run"
            if (
                checkpoint.save is not None
                and Path(checkpoint.save).resolve() == self.folder.resolve()
            ):
                console.print_line(
                    absent
                )  # the first start of a command that is given again after each stop
            else:
                console.warn(f"{absent}; use --exit-on-missing-checkpoint to fail instead")
            return None
        trainer.train_iters = config.train_iters_after(trainer.iteration, trainer.consumed_samples)
        console.print_line(f"continuing from {self.folder} after step {trainer.iteration}")
        if trainer.iteration >= trainer.train_iters:
            console.print_line(f"nothing left to do: the run has {trainer.train_iters} steps")
        return found


def describe_saved_progress(
    trainer: Trainer,
    config: CheckpointConfig,
    start: StartingPoint,
    continued: SavedCheckpoint | None = None,
) -> str:
    """Describes, for a run that ends early, what is saved and which command continues it.

    Args:
        trainer: Trainer of the run.
        config: Settings of checkpoints.
        start: Starting point of the run.
        continued: Checkpoint that the run continued from, if any.
    """
    if config.save is None:
        return "nothing is saved, because --save is not given"
    saver = next(one for one in trainer.callbacks if isinstance(one, Saver))
    checkpoint = saver.newest or continued
    lost = trainer.iteration - (checkpoint.iteration if checkpoint else 0)
    steps = f"{lost} step{'s' * (lost > 1)}"
    if checkpoint is None:
        reason = f"no checkpoint was complete after {steps}" if lost else "no step was completed"
        return f"nothing is saved: {reason}"
    loads_own = (
        config.load is not None and Path(config.load).resolve() == Path(config.save).resolve()
    )
    command = "the same command"
    if saver.newest is not None and not loads_own and not start.origin:
        command += f" with --load {config.save}"
    if lost:
        verb = "are" if lost > 1 else "is"
        return (
            f"{steps} since {checkpoint.path} {verb} not saved; {command} continues from that "
            "checkpoint"
        )
    if saver.newest is None:
        return f"no step was completed since {checkpoint.path}; {command} continues from it"
    return f"saved in {checkpoint.path}; {command} continues it"


def _find(config: CheckpointConfig) -> StartingPoint:
    source = _source_of_weights(config)
    held = None if config.save is None else _newest(Path(config.save))
    if source is None:
        load = None if config.load is None else Path(config.load)
        if held is not None and (load is None or load.resolve() != held.path.parent.resolve()):
            raise TrainError(_held(config, held, f"add --load {config.save} to continue it"))
        if load is not None:
            _refuse_missing(load, config)
        return StartingPoint(load)
    origin = str(source.resolve())
    if held is None:
        return StartingPoint(source, weights_only=True, origin=origin)
    if _origin_of(held) != origin:
        raise TrainError(
            f"--save {config.save} already has a run, at step {held.iteration}, that did not "
            f"begin with the weights of {source}; give another folder"
        )
    note = (
        f"--save {config.save} has this run at step {held.iteration}: continuing it instead of "
        f"beginning again with the weights of {source}"
    )
    return StartingPoint(Path(str(config.save)), origin=origin, note=note)


def _origin_of(held: Checkpoint) -> str | None:
    """Returns the origin of the first weights of a checkpoint's run; None if it has no record.

    Raises:
        TrainError: The saved state is damaged.
    """
    state: Any = held.values()
    try:
        for name in ("trainer", "callbacks", Saver.name):
            if name not in state:
                return None
            state = read_value(state, name, dict)
        return read_value(state, "origin", str) if "origin" in state else None
    except TrainError as error:
        raise TrainError(f"{held.path}: {error}; give another --save folder") from None


def _refuse_missing(load: Path, config: CheckpointConfig) -> None:
    """Refuses a --load folder without a checkpoint, unless a new run may begin there.

    Raises:
        TrainError: The folder has another program's checkpoint, or no checkpoint although
            --exit-on-missing-checkpoint is given.
    """
    if is_checkpoint(load) or _newest(load) is not None:
        return
    if what := describe_foreign_checkpoint(load):
        raise TrainError(f"--load {load} {what}")
    if config.exit_on_missing_checkpoint:
        raise TrainError(f"--load {load} has no complete checkpoint; give a folder that has one")


def _held(config: CheckpointConfig, held: Checkpoint, more: str) -> str:
    return (
        f"--save {config.save} already has a run, at step {held.iteration}; {more}, or give "
        "another folder"
    )


def _source_of_weights(config: CheckpointConfig) -> Path | None:
    """Returns the folder whose weights a new run begins with; None if there is none.

    Raises:
        TrainError: The folder of --finetune or --pretrained-checkpoint has no checkpoint.
    """
    load = None if config.load is None else Path(config.load)
    pretrained = (
        None if config.pretrained_checkpoint is None else Path(config.pretrained_checkpoint)
    )
    flag, source = "--pretrained-checkpoint", pretrained
    if load is not None and _holds_one(load):
        flag, source = "--load", load if config.finetune else None
    elif config.finetune and pretrained is None:
        flag, source = "--load", load
    if source is not None and not _holds_one(source):
        what = (
            describe_foreign_checkpoint(source)
            or "has no complete checkpoint to load weights from; give another folder"
        )
        raise TrainError(f"{flag} {source} {what}")
    return source


def _holds_one(folder: Path) -> bool:
    """Returns whether a folder is a checkpoint, complete or not, or has a complete one."""
    return is_checkpoint(folder) or _newest(folder) is not None


def _newest(folder: Path) -> Checkpoint | None:
    """Returns the newest complete checkpoint in a folder; None if there is none.

    Raises:
        CheckpointError: All checkpoints in the folder are damaged or another program's.
    """
    return CheckpointStore(folder).latest_checkpoint()
