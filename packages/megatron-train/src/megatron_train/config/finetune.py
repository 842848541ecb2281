"""The configuration of ``megatron-train finetune TASK``, which takes the model of a checkpoint."""

import argparse
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from megatron_train.config.extensions import SelectedExtensions, kinds_for, tasks_for
from megatron_train.config.files import read_file
from megatron_train.config.flags import given_flags
from megatron_train.config.from_checkpoint import model_of, with_model_of, with_tokenizer_of
from megatron_train.config.options import Option
from megatron_train.config.resolve import complete
from megatron_train.config.run import RunConfig
from megatron_train.config.run_sections import run_options, sections
from megatron_train.config.values import GivenValue, Values
from megatron_train.errors import TrainError, UsageError
from megatron_train.tokenizer import TokenizerCache

if TYPE_CHECKING:
    from megatron_ckpt import Checkpoint

FLAG: Final = "--pretrained-checkpoint"

_SOURCE = "checkpoint.pretrained_checkpoint"
_SET_BY_COMMAND = ("training.task", "checkpoint.finetune", "checkpoint.use_checkpoint_args")
"""Settings that the command itself sets."""


@cache
def finetune_options(task: str) -> tuple[Option, ...]:
    """Returns the options of ``finetune TASK``: those of all kinds of models that TASK can train.

    Options of the model default to the values in the checkpoint. If several kinds have the same
    flag, the option of the first kind is returned.
    """
    found: dict[str, Option] = {}
    taken: set[str | None] = set()
    for kind in kinds_for(task):
        for option in run_options(kind, SelectedExtensions(task)):
            if option.section == "model":
                option = replace(option, required=True, derived_default="the checkpoint's")
            if option.key == _SOURCE:
                text = "folder of checkpoints whose newest one to begin with, or one checkpoint"
                option = replace(option, help=text, required=True)
            flags = {option.flag, option.opposite} - {None}
            if not flags & taken:
                found[option.flag] = option
                taken |= flags
    return tuple(option for option in found.values() if option.key not in _SET_BY_COMMAND)


def finetune_titles(task: str) -> dict[str, str]:
    """Returns the title of each section of ``finetune TASK`` by name."""
    return {
        name: title
        for kind in kinds_for(task)
        for name, (title, _) in sections(kind, SelectedExtensions(task)).items()
    }


def resolve_finetuning(
    namespace: argparse.Namespace,
    world_size: int | None = None,
    tokenizers: TokenizerCache | None = None,
) -> tuple[RunConfig, Values]:
    """Returns the configuration of a run of ``finetune TASK`` and the values it is built from.

    Args:
        namespace: The parsed command line.
        world_size: Number of ranks. Defaults to ``WORLD_SIZE`` of the environment, or 1.
        tokenizers: Keeps the tokenizer that is opened for the size of the vocabulary.

    Raises:
        TrainError: A checkpoint or value cannot be used.
        CheckpointError: The checkpoint is incomplete or damaged.
        UsageError: A required value is missing.
    """
    task: str = namespace.task
    options = finetune_options(task)
    given = Values()
    if namespace.config is not None:
        given = _read(Path(namespace.config), task)
    given = given.updated(given_flags(namespace, options))
    folder = given.get(_SOURCE)
    if folder is None:
        raise UsageError(
            f"finetune {task} needs {FLAG}, the folder of the checkpoint to begin with"
        )
    checkpoint = _checkpoint(Path(folder))
    model = model_of(checkpoint, FLAG)
    if task not in (able := tasks_for(model.kind)):
        raise TrainError(
            f"{FLAG}: {checkpoint.path} holds a model of kind {model.kind}, but {task} trains "
            f"{' and '.join(kinds_for(task))}; use finetune {' or '.join(able) or 'another'}"
        )
    _refuse_settings_of_other_kinds(given, options, model.kind, task)
    values = with_model_of(Values(), checkpoint, model).updated(given)
    values = values.updated(Values({"training.task": GivenValue(task, f"finetune {task}")}))
    values = with_tokenizer_of(values, checkpoint)
    return complete(values, namespace, model.kind, world_size, tokenizers)


def _read(path: Path, task: str) -> Values:
    """Reads a configuration file; it may repeat the values that the command itself sets."""
    every: dict[str, Option] = {}
    for kind in kinds_for(task):
        every |= {option.key: option for option in run_options(kind, SelectedExtensions(task))}
    values = read_file(path, tuple(every.values()))
    for key in _SET_BY_COMMAND:
        if values.get(key) not in (None, False, task):
            raise TrainError(
                f"{values.given[key].origin} is {values.get(key)}, but the command is finetune "
                f"{task}; leave it out"
            )
    return Values({key: value for key, value in values.given.items() if key not in _SET_BY_COMMAND})


def _checkpoint(folder: Path) -> "Checkpoint":
    """Returns the newest complete checkpoint in a folder, or the folder as one checkpoint.

    Raises:
        TrainError: There is no checkpoint.
        CheckpointError: The checkpoint is incomplete or damaged.
    """
    from megatron_ckpt import CheckpointError, describe_foreign_checkpoint, find_checkpoint

    if what := describe_foreign_checkpoint(folder):
        raise TrainError(f"{FLAG} {folder} {what}")
    try:
        return find_checkpoint(folder)
    except CheckpointError as error:
        raise TrainError(f"{FLAG}: {error}") from None


def _refuse_settings_of_other_kinds(
    given: Values, options: tuple[Option, ...], kind: str, task: str
) -> None:
    known = {option.key for option in run_options(kind, SelectedExtensions(task))}
    for option in options:
        if option.key in given.given and option.key not in known:
            raise TrainError(
                f"{given.name_in_source(option)} is not a setting of models of kind {kind}, the "
                "kind in the checkpoint; leave it out"
            )
