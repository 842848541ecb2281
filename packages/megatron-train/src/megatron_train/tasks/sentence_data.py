"""Samples of tasks on corpora of sentences (`megatron-data preprocess --split-sentences`)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from megatron_data import DataError, Datasets, Tokenizer, TokenizerMismatchError
from megatron_data.datasets import Dataset, WordPieces, check_tokenizer
from megatron_data.sources import StorageCache
from megatron_data.torch import read_batch
from torch import Tensor

from megatron_train.config.run import RunConfig
from megatron_train.errors import TrainError
from megatron_train.tasks.masking import MaskingSettings
from megatron_train.tasks.task import MicroBatch


class SentenceData(ABC):
    """The source of a run's samples; see `megatron_train.tasks.kinds.TaskData`.

    Args:
        run: Configuration of the run; its corpora have one sequence for each sentence.
        tokenizer: A WordPiece tokenizer.

    Raises:
        TrainError: There is no tokenizer.
        DataError: The tokenizer has no word pieces.
    """

    token_field: ClassVar[str] = "tokens"
    """Field ``[b, s]`` whose elements are counted as tokens."""

    vocabulary_fields: ClassVar[tuple[str, ...]] = ("tokens", "labels")
    """Fields of tokens, which must be in the model's vocabulary."""

    def __init__(self, run: RunConfig, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None:
            raise TrainError(f"the task {run.task} needs a tokenizer; give --vocab-file")
        self.run = run
        self.tokenizer = tokenizer
        self.settings = self.masking_settings()
        self.word_pieces = WordPieces.from_tokenizer(tokenizer)
        self._path = run.data.corpora

    def masking_settings(self) -> MaskingSettings:
        """Returns the task's settings of masking."""
        return self.run.section(MaskingSettings)

    @abstractmethod
    def build(self, sizes: tuple[int, int, int], **options: Any) -> Datasets:
        """Builds the datasets.

        Args:
            sizes: Minimum number of samples of each dataset.
            **options: Further arguments of megatron-data's builders: corpora, split, seed, caches.
        """

    def datasets(self, sizes: Sequence[int]) -> Datasets:
        """Returns datasets with at least these numbers of samples."""
        train, valid, test = sizes
        data = self.run.data
        return self.build(
            (train, valid, test),
            data_path=self._path,
            split=data.split,
            word_pieces=self.word_pieces,
            seed=self.run.training.seed,
            cache_path=data.data_cache_path,
            mmap=data.mmap_bin_files,
            storage=StorageCache(folder) if (folder := data.object_storage_cache_path) else None,
        )

    def check(self) -> None:
        """Refuses corpora that were made with another tokenizer.

        Raises:
            TrainError: The tokenizers differ; the message names both.
        """
        if self.run.data.allow_tokenizer_mismatch:
            return None
        mismatch = None
        for tokenizer in self.corpus_tokenizers():
            try:
                return check_tokenizer(self._path, tokenizer)
            except TokenizerMismatchError as error:
                mismatch = mismatch or error
        raise TrainError(
            f"{mismatch}, or give --allow-tokenizer-mismatch if both have the same tokens"
        )

    def corpus_tokenizers(self) -> Iterator[Tokenizer]:
        """Yields the tokenizers that corpora may have been made with. Defaults to the run's."""
        yield self.tokenizer

    def identity(self) -> dict[str, Any]:
        """Returns the settings of masking and the order of samples."""
        return {"order": self.run.data.sample_order, **asdict(self.settings)}

    def read(self, dataset: Dataset, samples: Sequence[int]) -> dict[str, Tensor]:
        """Reads samples by their numbers; returns fields of shape ``[b, s]`` and ``[b]``.

        Raises:
            DataError: A token is not in the model's vocabulary.
        """
        fields = read_batch(dataset, samples)
        size = self.run.model.embedding.vocab_size
        largest = max(int(fields[name].max()) for name in self.vocabulary_fields)
        if largest >= size:
            raise DataError(
                f"the corpus holds token {largest}, but the vocabulary has {size}; "
                "train with the tokenizer that the corpus was made with"
            )
        return fields

    def micro_batch(self, fields: Mapping[str, Tensor]) -> MicroBatch:
        """Returns the micro-batch of these fields."""
        return MicroBatch.from_fields(fields, token_field=self.token_field)
