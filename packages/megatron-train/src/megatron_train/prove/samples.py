"""Synthetic samples for proofs: documents that cross every cut, with unequal loss masks.

A task names its source of them in `megatron_train.tasks.kinds.TaskKind.proof_data`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron_data import Datasets
from megatron_data.datasets import Dataset
from torch import Tensor

from megatron_train.config.run import RunConfig
from megatron_train.tasks.task import MicroBatch

COMMON, OUT_OF = 117, 150
"""The token that half of a text consists of, and the size of a vocabulary in which it is that."""


class ProofData(ABC):
    """A `megatron_train.tasks.kinds.TaskData` of samples that depend on their number alone.

    Args:
        run: The run.
    """

    def __init__(self, run: RunConfig) -> None:
        self.length = run.data.seq_length
        self.vocabulary = run.model.embedding.vocab_size

    @abstractmethod
    def sample(self, index: int) -> dict[str, Tensor]:
        """Returns the fields of a sample."""

    def datasets(self, sizes: Sequence[int]) -> Datasets:
        """Returns datasets of numbers of samples."""
        return Datasets(*(range(size) if size else None for size in sizes))  # type: ignore[arg-type]

    def check(self) -> None:  # noqa: B027 - nothing to check
        """Accepts every run."""

    def identity(self) -> Mapping[str, Any]:
        """Returns no settings."""
        return {}

    def read(self, dataset: Dataset, samples: Sequence[int]) -> dict[str, Tensor]:
        """Returns the fields of samples by their numbers."""
        return stacked([self.sample(int(index)) for index in samples])

    def micro_batch(self, fields: Mapping[str, Tensor]) -> MicroBatch:
        """Returns the micro-batch of these fields."""
        return MicroBatch.from_fields(fields, token_field="tokens")


class CausalProof(ProofData):
    """Packed documents of which each next token is predicted.

    Samples end in padding if experts or recurrent mixers could read it, unless their documents
    count as one.
    """

    def __init__(self, run: RunConfig) -> None:
        super().__init__(run)
        recurrent = any(mixer.recurrent for mixer in run.model.mixers)
        self._pads = run.model.expert_parallel or recurrent

    def sample(self, index: int) -> dict[str, Tensor]:
        """Returns several documents."""
        row = documents(index, self.length, self.vocabulary)
        return padded(row) if self._pads else row


class BidirectionalProof(ProofData):
    """Pairs of segments with masked tokens, an order to predict and a class."""

    def sample(self, index: int) -> dict[str, Tensor]:
        """Returns two segments and padding."""
        return segments(padded(documents(index, self.length, self.vocabulary)))


class SpanProof(ProofData):
    """Sources with padding, from which a target is predicted.

    Args:
        run: The run, with the settings of spans.
    """

    def __init__(self, run: RunConfig) -> None:
        from megatron_train.tasks.t5_kind import SpanSettings

        super().__init__(run)
        self._target = run.section(SpanSettings).decoder_seq_length

    def sample(self, index: int) -> dict[str, Tensor]:
        """Returns two texts of different lengths."""
        source = padded(documents(index, self.length, self.vocabulary))
        target = documents(index + 500, self._target, self.vocabulary)
        return source_and_target(source, target, self._target)


def stacked(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the fields of samples with the sample as first dim."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def documents(index: int, length: int, vocabulary: int = OUT_OF) -> dict[str, Tensor]:
    """Returns a sample of several documents with its own loss mask.

    Every seventh sample has no loss. Text is half random, half predictable. Documents are so short
    that every cut of the sequence crosses one somewhere.

    Args:
        index: Number of the sample.
        length: Its tokens.
        vocabulary: Number of different tokens.
    """
    generator = torch.Generator().manual_seed(1000 + index)
    text = torch.randint(vocabulary, (length + 1,), generator=generator)
    text[torch.rand(length + 1, generator=generator) < 0.5] = COMMON * vocabulary // OUT_OF
    kept = 0.0 if index % 7 == 3 else 0.2 + 0.1 * (index % 8)
    starts = torch.rand(length, generator=generator) < 0.2
    starts[0] = True
    places = torch.arange(length)
    first = torch.cummax(torch.where(starts, places, 0), 0).values
    return {
        "tokens": text[:-1],
        "labels": text[1:],
        "loss_mask": (torch.rand(length, generator=generator) < kept).float(),
        "positions": (places - first).int(),
        "document_ids": (starts.cumsum(0) - 1).int(),
        "sample_ids": torch.tensor(index),
    }


def padded(row: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a sample that ends in padding of its own length; every fourth sample has none."""
    length = len(row["tokens"])
    true = max(1, length - 3 * int(row["sample_ids"] % 4))
    indices = torch.arange(length)
    return {
        **row,
        "loss_mask": row["loss_mask"] * (indices < true),
        "document_ids": torch.where(indices < true, row["document_ids"], -1),
    }


def with_axes(row: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a sample whose positions have a time, a height and a width, all of them random."""
    length = len(row["tokens"])
    generator = torch.Generator().manual_seed(2000 + int(row["sample_ids"]))
    return {**row, "positions": torch.randint(length, (length, 3), generator=generator).int()}


def segments(row: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a sample of `padded` as two segments, with an order and a class."""
    index, indices = int(row["sample_ids"]), torch.arange(len(row["tokens"]))
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


def source_and_target(
    source: Mapping[str, Tensor], target: Mapping[str, Tensor], length: int
) -> dict[str, Tensor]:
    """Returns the fields of an encoder-decoder.

    Args:
        source: A sample of `padded`.
        target: A sample of `documents`.
        length: Tokens of the target that are used.
    """
    ends = {name: target[name][:length] for name in ("tokens", "labels", "loss_mask")}
    return {
        "tokens": source["tokens"],  # counted
        "encoder_tokens": source["tokens"],
        "encoder_document_ids": -(source["document_ids"] < 0).int(),
        "decoder_tokens": ends["tokens"],
        "labels": ends["labels"],
        "loss_mask": ends["loss_mask"],
        "sample_ids": source["sample_ids"],
    }
