"""Kinds of tasks, which are found through the entry-point group ``megatron.tasks``.

A model kind names its default task. Any distribution can register tasks. Importing this module
does not import torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron_models.lookup import import_object
from megatron_parallel.extensions import Section

from megatron_train.config.run import RunConfig
from megatron_train.config.values import Values
from megatron_train.errors import TrainError
from megatron_train.tasks.registry import TASKS

if TYPE_CHECKING:  # datasets import numpy, which --help does not need
    from megatron_data import Datasets, Tokenizer
    from megatron_data.datasets import Dataset
    from torch import Tensor, nn

    from megatron_train.tasks.task import MicroBatch, Task


class TaskData(Protocol):
    """The source of a run's samples."""

    def datasets(self, sizes: Sequence[int]) -> "Datasets":
        """Returns the datasets for training, validation and test.

        Args:
            sizes: Number of samples of each dataset; 0 if that dataset is not needed.

        Raises:
            EmptySplitError: A split of the corpora has no sample.
        """

    def check(self) -> None:
        """Refuses corpora that are incompatible with one another or with the run.

        Raises:
            TrainError: The corpora are incompatible; the message is one line.
        """

    def identity(self) -> Mapping[str, Any]:
        """Returns the settings that determine how samples are made, as values that JSON can hold.

        Checkpoints store them beside the identity of the corpora. A run that continues from a
        checkpoint with different values is refused.
        """

    def read(self, dataset: "Dataset", samples: Sequence[int]) -> "Mapping[str, Tensor]":
        """Reads samples by their numbers; the first dim of each field is the sample."""

    def micro_batch(self, fields: "Mapping[str, Tensor]") -> "MicroBatch":
        """Returns a micro-batch of the fields that `read` returned."""


@dataclass(frozen=True)
class TaskKind:
    """A kind of task: where its task and its data are implemented, and its settings.

    Attributes:
        name: Name of the task in commands; the name of its entry point.
        summary: One line for lists and ``--help``.
        task: ``package.module:function`` that returns a `megatron_train.Task`. It is called with
            the run, this rank's stages of the model, and the name of the model's family or None.
        data: ``package.module:function`` that returns a `TaskData`. It is called with the run and
            its tokenizer or None.
        proof_data: ``package.module:function`` that returns a `TaskData` of synthetic samples for
            ``megatron-train prove``, called with the run. Defaults to none, with which that
            command refuses the task.
        model_kinds: Names of the kinds of models that the task can train, in addition to those
            whose default task it is. Defaults to None, which means every kind.
        sections: Settings that the task defines. They become flags of ``pretrain KIND`` and
            sections of configuration files; ``run.section(Config)`` returns their values.
        supported_settings: Keys of the optional settings that the task reads, such as
            ``data.reset_position_ids``. Optional settings that are not listed are refused.
        derive: Returns the given values with others that follow from them, such as a default
            tokenizer or a number of classes, by `Values.with_derived`. It is called after all
            flags and files are read, and before the vocabulary is. Defaults to None.
        checks: Functions of the run that raise a `TrainError` if settings contradict each other.
            The message is one line and names the flags. They run before any communication.
    """

    name: str
    summary: str
    task: str
    data: str
    model_kinds: tuple[str, ...] | None = None
    sections: tuple[Section, ...] = ()
    supported_settings: tuple[str, ...] = ()
    checks: tuple[Callable[[RunConfig], None], ...] = ()
    derive: Callable[[Values], Values] | None = None
    proof_data: str = ""

    def build(self, run: RunConfig, stages: "Sequence[nn.Module]", family: str | None) -> "Task":
        """Returns the task of a run on this rank."""
        make: Callable[..., Task] = import_object(self.task, f"the task {self.name!r}")
        return make(run, stages, family)

    def open_proof_data(self, run: RunConfig) -> TaskData:
        """Returns a source of synthetic samples.

        Raises:
            TrainError: The task has none.
        """
        if not self.proof_data:
            raise TrainError(
                f"the task {self.name} has no samples for a proof; name them in its "
                "TaskKind.proof_data"
            )
        make: Callable[..., TaskData] = import_object(
            self.proof_data, f"the samples of the task {self.name!r} for proofs"
        )
        return make(run)

    def open_data(self, run: RunConfig, tokenizer: "Tokenizer | None") -> TaskData:
        """Returns the source of the run's samples."""
        make: Callable[..., TaskData] = import_object(
            self.data, f"the data of the task {self.name!r}"
        )
        return make(run, tokenizer)


def task_kinds() -> dict[str, TaskKind]:
    """Returns every installed kind of task by name, including those of other distributions."""
    return TASKS.load_instances(TaskKind)


def find_task_kind(name: str) -> TaskKind:
    """Returns an installed kind of task by name.

    Raises:
        TrainError: No task of that name is installed.
    """
    return TASKS.load_instance(name, TaskKind)
