"""Kinds of tasks, found by the entry-point group ``megatron.tasks``.

A model kind names the task that it is pretrained for, and a distribution may bring tasks of its
own. Importing this module does not import torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron_data import Datasets, Tokenizer
from megatron_data.datasets import Dataset
from megatron_models.lookup import look_up
from megatron_parallel import Section

from megatron_train.config.run import RunConfig
from megatron_train.tasks.known import TASKS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from megatron_train.tasks.task import MicroBatch, Task


class TaskData(Protocol):
    """What a run reads its samples from."""

    def datasets(self, sizes: Sequence[int]) -> Datasets:
        """Returns the datasets for training, validation and test.

        Args:
            sizes: samples of each; 0 where that dataset is not asked for.

        Raises:
            EmptySplitError: a share of the corpora has no sample.
        """

    def check(self) -> None:
        """Refuses corpora that do not fit together, or do not fit the run.

        Raises:
            TrainError: in one line.
        """

    def identity(self) -> Mapping[str, Any]:
        """Returns how samples are made of the corpora, as plain values that JSON can hold.

        They are kept in checkpoints beside what the corpora are known by; a run that continues with
        others is refused.
        """

    def read(self, dataset: Dataset, samples: Sequence[int]) -> "Mapping[str, Tensor]":
        """Reads samples by their numbers: fields whose first dim is the sample."""

    def micro_batch(self, fields: "Mapping[str, Tensor]") -> "MicroBatch":
        """Returns the micro-batch of what `read` returned."""


@dataclass(frozen=True)
class TaskKind:
    """A kind of tasks: how a run's task and its samples are made.

    Attributes:
        name: under which commands know it; that of its entry point.
        summary: one line for lists and ``--help``.
        task: ``package.module:function`` that returns a `megatron_train.Task`. It is called with
            the run, this rank's stages of the model, and the name of the model's family or None.
        data: ``package.module:function`` that returns a `TaskData`. It is called with the run and
            its tokenizer or None.
        kinds: names of the kinds of models that it can train, beside those that name it as their
            default. Defaults to None, which is every kind.
        sections: settings of its own. They are flags of ``pretrain KIND`` and sections of files;
            the task finds its own by ``run.section(Config)``.
        reads: keys of the settings that it reads of those that not every task does, such as
            ``data.reset_position_ids``. The others are refused.
        checks: functions of the run that raise a `TrainError` in one line, with the flags named,
            where settings do not go together. They are called before any rank meets another.
    """

    name: str
    summary: str
    task: str
    data: str
    kinds: tuple[str, ...] | None = None
    sections: tuple[Section, ...] = ()
    reads: tuple[str, ...] = ()
    checks: tuple[Callable[[RunConfig], None], ...] = ()

    def build(self, run: RunConfig, stages: "Sequence[nn.Module]", family: str | None) -> "Task":
        """Returns the task of a run, as this rank sees it."""
        make: Callable[..., Task] = look_up(self.task, f"the task {self.name!r}")
        return make(run, stages, family)

    def open(self, run: RunConfig, tokenizer: Tokenizer | None) -> TaskData:
        """Returns what the run reads its samples from."""
        make: Callable[..., TaskData] = look_up(self.data, f"the data of the task {self.name!r}")
        return make(run, tokenizer)


def task_kinds() -> dict[str, TaskKind]:
    """Returns every installed kind by name, other distributions' too."""
    return {name: find_task(name) for name in TASKS.entries()}


def find_task(name: str) -> TaskKind:
    """Returns an installed kind of tasks.

    Raises:
        TrainError: there is none of that name.
    """
    return TASKS.described(name, TaskKind)
