"""Labelled texts in tables as samples of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

from megatron_data import DataError, Datasets, Tokenizer
from megatron_data.datasets import Dataset, build_classification_datasets
from megatron_data.torch import read_batch
from torch import Tensor

from megatron_train.config.run import RunConfig
from megatron_train.errors import TrainError
from megatron_train.tasks.classification_settings import (
    ClassificationSettings,
    Rows,
    read_splits,
)
from megatron_train.tasks.task import MicroBatch


class ClassificationData:
    """The source of a run's samples; see `megatron_train.tasks.kinds.TaskData`.

    Args:
        run: Configuration of the run.
        tokenizer: Tokenizer of the texts.

    Raises:
        TrainError: There is no tokenizer.
    """

    def __init__(self, run: RunConfig, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None:
            raise TrainError("the task classification needs a tokenizer; give --tokenizer-model")
        self._run = run
        self._tokenizer = tokenizer
        self._settings = run.section(ClassificationSettings)

    @cached_property
    def _rows(self) -> tuple[Rows | None, Rows | None, Rows | None]:
        """The rows of each split."""
        data = self._run.data
        per_split = (data.train_data_path, data.valid_data_path, data.test_data_path)
        return read_splits(data.data_path, per_split, data.split, self._settings)

    def datasets(self, sizes: Sequence[int]) -> Datasets:
        """Returns datasets with these numbers of samples."""
        train, valid, test = sizes
        return build_classification_datasets(
            self._rows,
            (train, valid, test),
            tokenizer=self._tokenizer,
            classes=self._settings.class_names or (),
            sequence_length=self._run.data.seq_length,
            seed=self._run.training.seed,
        )

    def check(self) -> None:
        """Refuses nothing: texts are not tokenized before the run."""

    def identity(self) -> dict[str, Any]:
        """Returns columns and classes."""
        found = asdict(self._settings)
        del found["epochs"]  # the length of the run may change
        return found

    def read(self, dataset: Dataset, samples: Sequence[int]) -> dict[str, Tensor]:
        """Reads samples by their numbers; returns fields of shape ``[b, s]`` and ``[b]``.

        Raises:
            DataError: A token is not in the model's vocabulary.
        """
        fields = read_batch(dataset, samples)
        size = self._run.model.embedding.vocab_size
        if (largest := int(fields["tokens"].max())) >= size:
            raise DataError(
                f"a text has token {largest}, but the vocabulary of the model has {size}; give the "
                "tokenizer that the model was trained with"
            )
        return fields

    def micro_batch(self, fields: Mapping[str, Tensor]) -> MicroBatch:
        """Returns the micro-batch of these fields."""
        return MicroBatch.from_fields(fields, token_field="tokens")
