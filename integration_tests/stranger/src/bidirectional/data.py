"""Samples with hidden tokens, of megatron-data's BERT datasets."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from megatron_data import BertDatasetConfig, DataError, Datasets, Tokenizer, build_bert_datasets
from megatron_data.datasets import Dataset, MaskingConfig, WordPieces, check_tokenizer
from megatron_data.torch import read_batch
from megatron_train import MicroBatch, RunConfig
from torch import Tensor

from bidirectional.settings import MaskedLMConfig


class MaskedText:
    """What a run reads its samples from.

    Args:
        run: the run; its corpora are rows of sentences.
        tokenizer: one of word pieces.

    Raises:
        DataError: there is no tokenizer.
    """

    def __init__(self, run: RunConfig, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None:
            raise DataError("tokens are hidden by word pieces; give --tokenizer-type, --vocab-file")
        self._run = run
        self._tokenizer = tokenizer
        self._path = run.data.corpora

    def datasets(self, sizes: Sequence[int]) -> Datasets:
        """Return the datasets of at least these numbers of samples."""
        train, valid, test = sizes
        given = self._run.section(MaskedLMConfig)
        return build_bert_datasets(
            self._path,
            self._run.data.split,
            (train, valid, test),
            config=BertDatasetConfig(
                sequence_length=self._run.data.seq_length,
                masking=MaskingConfig(probability=given.probability),
                short_probability=given.short_samples,
                binary_head=False,
            ),
            word_pieces=WordPieces.from_tokenizer(self._tokenizer),
            seed=self._run.training.seed,
        )

    def check(self) -> None:
        """Refuse corpora that another tokenizer made."""
        check_tokenizer(self._path, self._tokenizer)

    def identity(self) -> Mapping[str, float]:
        """Return which tokens are hidden; a run that continues hides the same."""
        return asdict(self._run.section(MaskedLMConfig))

    def read(self, dataset: Dataset, samples: Sequence[int]) -> Mapping[str, Tensor]:
        """Read samples by their numbers."""
        return read_batch(dataset, samples)

    def micro_batch(self, fields: Mapping[str, Tensor]) -> MicroBatch:
        """Return the micro-batch of these fields, counted by its tokens."""
        return MicroBatch.from_fields(fields, token_field="tokens")
