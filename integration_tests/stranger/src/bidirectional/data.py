"""Samples with masked tokens from megatron-data's BERT datasets."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from megatron_data import BertDatasetConfig, DataError, Datasets, Tokenizer, build_bert_datasets
from megatron_data.datasets import Dataset, MaskingConfig, WordPieces, check_tokenizer
from megatron_data.torch import read_batch
from megatron_train import MicroBatch, RunConfig
from torch import Tensor

from bidirectional.settings import MaskedLMConfig


class MaskedText:
    """The source of a run's samples.

    Args:
        run: Configuration of the run; its corpora contain sentences.
        tokenizer: A WordPiece tokenizer.

    Raises:
        DataError: There is no tokenizer.
    """

    def __init__(self, run: RunConfig, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None:
            raise DataError("masking needs a tokenizer; give --tokenizer-type and --vocab-file")
        self._run = run
        self._tokenizer = tokenizer
        self._path = run.data.corpora

    def datasets(self, sizes: Sequence[int]) -> Datasets:
        """Returns datasets with at least these numbers of samples."""
        train, valid, test = sizes
        settings = self._run.section(MaskedLMConfig)
        return build_bert_datasets(
            self._path,
            self._run.data.split,
            (train, valid, test),
            config=BertDatasetConfig(
                sequence_length=self._run.data.seq_length,
                masking=MaskingConfig(probability=settings.probability),
                short_probability=settings.short_samples,
                binary_head=False,
            ),
            word_pieces=WordPieces.from_tokenizer(self._tokenizer),
            seed=self._run.training.seed,
        )

    def check(self) -> None:
        """Refuses corpora that were made with another tokenizer."""
        check_tokenizer(self._path, self._tokenizer)

    def identity(self) -> Mapping[str, float]:
        """Returns the masking settings; a continued run must have the same."""
        return asdict(self._run.section(MaskedLMConfig))

    def read(self, dataset: Dataset, samples: Sequence[int]) -> Mapping[str, Tensor]:
        """Reads samples by their numbers."""
        return read_batch(dataset, samples)

    def micro_batch(self, fields: Mapping[str, Tensor]) -> MicroBatch:
        """Returns the micro-batch of these fields."""
        return MicroBatch.from_fields(fields, token_field="tokens")
