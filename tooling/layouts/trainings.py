"""How each kind of model is trained in the proof: its task, and the samples of the task."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from megatron_train import GPTTask
from megatron_train.tasks.bert import BertTask
from megatron_train.tasks.classification import ClassificationTask
from megatron_train.tasks.t5 import T5Task
from megatron_train.tasks.task import Task
from torch import Tensor

from layouts.cases import Case
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
        row = sample(index)
        if case.config.has_position_axes:
            generator = torch.Generator().manual_seed(2000 + index)
            row["positions"] = torch.randint(SEQUENCE, (SEQUENCE, 3), generator=generator).int()
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
        """Returns two segments and padding; a sample of `sample` gives tokens and masks."""
        row = padded(sample(index))
        indices = torch.arange(SEQUENCE)
        return {
            "tokens": row["tokens"],
            "labels": row["labels"],
            "loss_mask": row["loss_mask"],
            "document_ids": -(row["document_ids"] < 0).int(),
            "token_types": (indices > 4 + index % 7).long(),
            "is_random": torch.tensor(index % 2),
            "classes": torch.tensor(index % 2),
            "weights": torch.tensor(float(index % 5 != 2)),
            "sample_ids": row["sample_ids"],
        }


class SpanCorruption(Training):
    """Predicts each next token of a target from a source that ends in padding."""

    TARGET: Final = SEQUENCE - 4

    def task(self, case: Case, stages: Sequence[Any]) -> Task:
        """Returns the task."""
        return T5Task(stages, None, seed=SEED, **(DROPOUT if case.dropout else {}))

    def sample(self, case: Case, index: int) -> dict[str, Tensor]:
        """Returns two texts of different lengths."""
        source, target = padded(sample(index)), sample(index + 500)
        ends = {name: target[name][: self.TARGET] for name in ("tokens", "labels", "loss_mask")}
        return {
            "tokens": source["tokens"],  # counted
            "encoder_tokens": source["tokens"],
            "encoder_document_ids": -(source["document_ids"] < 0).int(),
            "decoder_tokens": ends["tokens"],
            "labels": ends["labels"],
            "loss_mask": ends["loss_mask"],
            "sample_ids": source["sample_ids"],
        }


TRAININGS: Final[Mapping[str, Training]] = {"bert": Bidirectional(), "t5": SpanCorruption()}
"""Trainings by kind of model; others are trained as `Causal`."""


def training_of(case: Case) -> Training:
    """Returns the training of a case's kind of model."""
    return TRAININGS.get(case.config.kind, Causal())


def padded(row: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a sample that ends in padding of its own length; every fourth sample has none."""
    true = SEQUENCE - 3 * int(row["sample_ids"] % 4)
    indices = torch.arange(SEQUENCE)
    return {
        **row,
        "loss_mask": row["loss_mask"] * (indices < true),
        "document_ids": torch.where(indices < true, row["document_ids"], -1),
    }


def sample(index: int) -> dict[str, Tensor]:
    """Returns a sample of several documents with its own loss mask.

    Every seventh sample has no loss. Text is half random, half predictable. Documents are so short
    that every cut of the sequence crosses one somewhere.
    """
    generator = torch.Generator().manual_seed(1000 + index)
    text = torch.randint(150, (SEQUENCE + 1,), generator=generator)
    text[torch.rand(SEQUENCE + 1, generator=generator) < 0.5] = 117
    kept = 0.0 if index % 7 == 3 else 0.2 + 0.1 * (index % 8)
    starts = torch.rand(SEQUENCE, generator=generator) < 0.2
    starts[0] = True
    places = torch.arange(SEQUENCE)
    first = torch.cummax(torch.where(starts, places, 0), 0).values
    return {
        "tokens": text[:-1],
        "labels": text[1:],
        "loss_mask": (torch.rand(SEQUENCE, generator=generator) < kept).float(),
        "positions": (places - first).int(),
        "document_ids": (starts.cumsum(0) - 1).int(),
        "sample_ids": torch.tensor(index),
    }
