"""The configuration of ``megatron-train finetune TASK``: the model is that of a checkpoint."""

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
"""Settings that the command itself says."""


@cache
def finetune_options(task: str) -> tuple[Option, ...]:
    """Returns the options of ``finetune TASK``: those of all kinds of models that it can train.

    Those of the model are the checkpoint's by default. Of options with one flag, the first kind's
    is returned.
    """
    found: dict[str, Option] = {}
    for kind in kinds_for(task):
        for option in run_options(kind, SelectedExtensions(task)):
            if option.section == "model":
                option = replace(option, required=True, derived_default="the checkpoint's")
            if option.key == _SOURCE:
                text = "folder of the checkpoint to begin with, or one checkpoint"
                option = replace(option, help=text, required=True)
            found.setdefault(option.flag, option)
    return tuple(option for option in found.values() if option.key not in _SET_BY_COMMAND)


def finetune_titles(task: str) -> dict[str, str]:
    """Returns the title of every section of ``finetune TASK``."""
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
    """Returns the configuration of a run of ``finetune TASK`` and the values it was made from.

    Args:
        namespace: the parsed command line.
        world_size: ranks of the run; by default as torchrun says, and 1 without it.
        tokenizers: keeps the tokenizer that is opened for the size of the vocabulary.

    Raises:
        TrainError: a checkpoint or a value that cannot be used.
        CheckpointError: the checkpoint is torn.
        UsageError: a required value that nobody gave.
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
            f"finetune {task} begins with the weights of a checkpoint: give {FLAG}, its folder"
        )
    checkpoint = _checkpoint(Path(folder))
    model = model_of(checkpoint, FLAG)
    if task not in (able := tasks_for(model.kind)):
        raise TrainError(
            f"{FLAG}: {checkpoint.path} holds a model of kind {model.kind}, and {task} trains "
            f"{' and '.join(kinds_for(task))}; give finetune {' or '.join(able) or 'another'}"
        )
    _refuse_settings_of_other_kinds(given, options, model.kind, task)
    values = with_model_of(Values(), checkpoint, model).updated(given)
    values = values.updated(Values({"training.task": GivenValue(task, f"finetune {task}")}))
    values = with_tokenizer_of(values, checkpoint)
    return complete(values, namespace, model.kind, world_size, tokenizers)


def _read(path: Path, task: str) -> Values:
    """Reads a file of settings; those that the command says itself may say the same."""
    every: dict[str, Option] = {}
    for kind in kinds_for(task):
        every |= {option.key: option for option in run_options(kind, SelectedExtensions(task))}
    values = read_file(path, tuple(every.values()))
    for key in _SET_BY_COMMAND:
        if values.get(key) not in (None, False, task):
            raise TrainError(
                f"{values.given[key].origin} is {values.get(key)}, and this is finetune {task}; "
                "leave it out"
            )
    return Values({key: value for key, value in values.given.items() if key not in _SET_BY_COMMAND})


def _checkpoint(folder: Path) -> "Checkpoint":
    """Returns the newest complete checkpoint in a folder, or the one that it is.

    Raises:
        TrainError: there is none.
        CheckpointError: it is torn.
    """
    from megatron_ckpt import CheckpointError, describe_foreign_checkpoint, find_checkpoint

    if what := describe_foreign_checkpoint(folder):
        raise TrainError(f"{FLAG} {folder} {what}")
    try:
        return find_checkpoint(folder)
    except CheckpointError as error:
        raise TrainError(f"{FLAG} {folder}: {error}") from None


def _refuse_settings_of_other_kinds(
    given: Values, options: tuple[Option, ...], kind: str, task: str
) -> None:
    known = {option.key for option in run_options(kind, SelectedExtensions(task))}
    for option in options:
        if option.key in given.given and option.key not in known:
            raise TrainError(
                f"{given.name_in_source(option)} is no setting of models of kind {kind}, which the "
                "checkpoint holds; leave it out"
            )
