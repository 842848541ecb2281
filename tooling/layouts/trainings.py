"""How each kind of model is trained in the proof: its task, and the samples of the task."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

from megatron_train import GPTTask
from megatron_train.prove.samples import (
    documents,
    padded,
    segments,
    source_and_target,
    with_axes,
)
from megatron_train.tasks.bert import BertTask
from megatron_train.tasks.classification import ClassificationTask
from megatron_train.tasks.t5 import T5Task
from megatron_train.tasks.task import Task
from torch import Tensor

from layouts.case import Case
from layouts.models import SEQUENCE

DROPOUT: Final = {"hidden_dropout": 0.1, "attention_dropout": 0.2}
SEED: Final = 7


class Training(ABC):
    """The training of a kind of model."""

    @abstractmethod
    def task(self, case: Case, stages: Sequence[Any]) -> Task:
        """Returns the task of this rank's stages."""

    @abstractmethod
    def sample(self, case: Case, index: int) -> dict[str, Tensor]:
        """Returns the fields of a sample."""


class Causal(Training):
    """Predicts each next token of packed documents."""

    def task(self, case: Case, stages: Sequence[Any]) -> Task:
        """Returns the task, with positions and attention of single documents."""
        return GPTTask(
            stages,
            None,
            seed=SEED,
            reset_position_ids=True,
            reset_attention_mask=True,
            split_per_document=case.per_document,
            sequence_length=SEQUENCE,
            label_smoothing=0.1 if case.smooth else 0.0,
            **(DROPOUT if case.dropout else {}),
        )

    def sample(self, case: Case, index: int) -> dict[str, Tensor]:
        """Returns several documents, which end in padding if mixers read it."""
        row = documents(index, SEQUENCE)
        if case.config.has_position_axes:
            row = with_axes(row)
        recurrent = any(mixer.recurrent for mixer in case.config.mixers)
        return padded(row) if case.config.expert_parallel or recurrent else row


class Bidirectional(Training):
    """Predicts masked tokens and the order of two segments, or with a task head classes."""

    def task(self, case: Case, stages: Sequence[Any]) -> Task:
        """Returns the task of the heads of the model."""
        dropout, config = DROPOUT if case.dropout else {}, stages[0].config
        if config.predicts_tokens:
            return BertTask(stages, None, seed=SEED, **dropout)
        return ClassificationTask(stages, None, config.num_labels, seed=SEED, **dropout)

    def sample(self, case: Case, index: int) -> dict[str, Tensor]:
        """Returns two segments and padding; a sample of `documents` gives tokens and masks."""
        return segments(padded(documents(index, SEQUENCE)))


class SpanCorruption(Training):
    """Predicts each next token of a target from a source that ends in padding."""

    TARGET: Final = SEQUENCE - 4

    def task(self, case: Case, stages: Sequence[Any]) -> Task:
        """Returns the task."""
        return T5Task(stages, None, seed=SEED, **(DROPOUT if case.dropout else {}))

    def sample(self, case: Case, index: int) -> dict[str, Tensor]:
        """Returns two texts of different lengths."""
        source, target = padded(documents(index, SEQUENCE)), documents(index + 500, SEQUENCE)
        return source_and_target(source, target, self.TARGET)


TRAININGS: Final[Mapping[str, Training]] = {"bert": Bidirectional(), "t5": SpanCorruption()}
"""Trainings by kind of model; others are trained as `Causal`."""


def training_of(case: Case) -> Training:
    """Returns the training of a case's kind of model."""
    return TRAININGS.get(case.config.kind, Causal())
