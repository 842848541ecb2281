"""Builds the datasets of BERT and T5."""

import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_data.datasets import bert, t5
from megatron_data.datasets.batches import Dataset
from megatron_data.datasets.build import DataPath, Datasets, build_splits
from megatron_data.datasets.builders import GreedyBuilder, SplitRequest, dataset_named_in_errors
from megatron_data.datasets.gpt import TokenSource
from megatron_data.datasets.masking import WordPieces
from megatron_data.datasets.split import DEFAULT_SPLIT, sequence_range
from megatron_data.indexed.reader import IndexedDataset
from megatron_data.order.cache import cache_key, load_or_build
from megatron_data.order.sentences import sentence_map
from megatron_data.sources.block_cache import StorageCache


@dataclass(kw_only=True)
class MapBuilder(GreedyBuilder):
    """Builds datasets from a sample map. Splits contain whole documents.

    Attributes:
        options: Options of the map except seed and number of samples.
    """

    options: dict[str, Any]

    def build_source(
        self, source: TokenSource, name: str, request: SplitRequest, source_index: int = 0
    ) -> Dataset:
        """Builds one split of one source of a blend.

        Raises:
            EmptySplitError: No document of the split can be used.
        """
        dataset = self.open_source(name)
        documents = sequence_range(request.interval, dataset.num_documents)
        options = self.options | {"seed": self.seed, "num_samples": request.num_samples}
        count = documents[1] - documents[0]
        with dataset_named_in_errors(
            f"{request.split} split of {name} ({count} of {dataset.num_documents} documents)"
        ):
            return self._build_along_map(name, dataset, documents, options)

    @abstractmethod
    def _build_along_map(
        self, name: str, source: IndexedDataset, documents: tuple[int, int], options: dict[str, Any]
    ) -> Dataset:
        """Builds the dataset of the documents `[documents[0], documents[1])`."""

    def _map(
        self,
        what: str,
        build: Callable[..., NDArray[np.unsignedinteger]],
        arrays: Sequence[NDArray[np.integer]],
        options: dict[str, Any],
    ) -> NDArray[np.unsignedinteger]:
        """Builds a map or reads it from the cache."""
        key = cache_key({"what": what} | options, *arrays)
        return load_or_build(self.cache_path, key, lambda: {"rows": build(*arrays, **options)})[
            "rows"
        ]


@dataclass(kw_only=True)
class _SentenceBuilder(MapBuilder):
    """Builds datasets of BERT and T5.

    Attributes:
        make: Constructs a dataset from a source and its map.
    """

    make: Callable[[IndexedDataset, NDArray[np.unsignedinteger]], Dataset]

    def _build_along_map(
        self, name: str, source: IndexedDataset, documents: tuple[int, int], options: dict[str, Any]
    ) -> Dataset:
        bounds = source.document_indices[documents[0] : documents[1] + 1]
        arrays = (bounds, source.sequence_lengths)
        return self.make(source, self._map("sentences 1", sentence_map, arrays, options))


def _map_options(
    config: bert.BertDatasetConfig | t5.T5DatasetConfig, special_tokens: int, min_sentences: int
) -> dict[str, Any]:
    return {
        "max_length": config.sequence_length - special_tokens,
        "short_probability": config.short_probability,
        "min_sentences": min_sentences,
    }


def build_bert_datasets(
    data_path: DataPath,
    split: str | None = DEFAULT_SPLIT,
    sizes: tuple[int | None, int | None, int | None] = (None, None, None),
    *,
    config: bert.BertDatasetConfig,
    word_pieces: WordPieces,
    seed: int = 1234,
    surplus: float = 0.005,
    cache_path: str | os.PathLike[str] | None = None,
    storage: StorageCache | None = None,
    mmap: bool = True,
) -> Datasets:
    """Builds the three BERT datasets of a run, in Megatron's order.

    Args:
        data_path: Data path as in `build_gpt_datasets`, to datasets with one sequence per sentence.
        split: Fractions of the documents of a dataset for the three splits. Defaults to "969,30,1".
        sizes: Minimum number of training, validation and test samples, in whole epochs as in
            Megatron. None takes one epoch, 0 builds no dataset.
        config: Configuration of the samples.
        word_pieces: Properties of the vocabulary.
        seed: Seed of the order and of the random draws of samples. Defaults to 1234.
        surplus: Fraction of extra samples that each dataset of a weighted blend provides. Defaults
            to 0.005.
        cache_path: Folder that stores built maps. Defaults to None, which builds them each time.
        storage: Cache for prefixes that are URLs.
        mmap: Maps token files into memory; see `IndexedDataset`. Defaults to True.

    Raises:
        EmptySplitError: No document of a split can be used.
        DataError: A dataset is missing or damaged, or a blend draws more samples from a dataset
            than it has.
    """
    options = _map_options(config, bert.SPECIAL_TOKENS, config.min_sentences)
    builder = _SentenceBuilder(
        seed=seed,
        surplus=surplus,
        cache_path=cache_path,
        storage=storage,
        mmap=mmap,
        options=options,
        make=lambda source, rows: bert.BertDataset(source, rows, config, word_pieces, seed),
    )
    return build_splits(builder, data_path, split, sizes)


def build_t5_datasets(
    data_path: DataPath,
    split: str | None = DEFAULT_SPLIT,
    sizes: tuple[int | None, int | None, int | None] = (None, None, None),
    *,
    config: t5.T5DatasetConfig,
    word_pieces: WordPieces,
    seed: int = 1234,
    surplus: float = 0.005,
    cache_path: str | os.PathLike[str] | None = None,
    storage: StorageCache | None = None,
    mmap: bool = True,
) -> Datasets:
    """Builds the three T5 datasets of a run, in Megatron's order.

    The arguments are those of `build_bert_datasets`. `word_pieces` needs sentinels.

    Raises:
        EmptySplitError: No document of a split can be used.
        DataError: As in `build_bert_datasets`, or the vocabulary has no sentinels.
    """
    options = _map_options(config, t5.SPECIAL_TOKENS, 1)
    builder = _SentenceBuilder(
        seed=seed,
        surplus=surplus,
        cache_path=cache_path,
        storage=storage,
        mmap=mmap,
        options=options,
        make=lambda source, rows: t5.T5Dataset(source, rows, config, word_pieces, seed),
    )
    return build_splits(builder, data_path, split, sizes)
