"""Training, validation and test datasets of BERT and T5 from what a command line names."""

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
    """Makes datasets along a map of sentences; splits are cut between documents.

    Attributes:
        options: What the map follows from besides the dataset and the seed.
    """

    options: dict[str, Any]

    def build_source(
        self, source: TokenSource, name: str, request: SplitRequest, source_index: int = 0
    ) -> Dataset:
        """Returns one split of one source, the `source_index`-th of a blend.

        Raises:
            EmptySplitError: None of its documents can be used.
        """
        opened = self.open_source(name)
        documents = sequence_range(request.interval, opened.num_documents)
        options = self.options | {"seed": self.seed, "num_samples": request.num_samples}
        count = documents[1] - documents[0]
        with dataset_named_in_errors(
            f"{request.split} split of {name} ({count} of {opened.num_documents} documents)"
        ):
            return self._build_along_map(name, opened, documents, options)

    @abstractmethod
    def _build_along_map(
        self, name: str, source: IndexedDataset, documents: tuple[int, int], options: dict[str, Any]
    ) -> Dataset:
        """Returns the dataset of some documents, the first and the one after the last."""

    def _map(
        self,
        what: str,
        build: Callable[..., NDArray[np.unsignedinteger]],
        arrays: Sequence[NDArray[np.integer]],
        options: dict[str, Any],
    ) -> NDArray[np.unsignedinteger]:
        """Returns a map that is built, or read from the cache."""
        key = cache_key({"what": what} | options, *arrays)
        return load_or_build(self.cache_path, key, lambda: {"rows": build(*arrays, **options)})[
            "rows"
        ]


@dataclass(kw_only=True)
class _SentenceBuilder(MapBuilder):
    """Makes datasets of BERT and T5.

    Attributes:
        make: A dataset of a source and its map.
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
        data_path: As in `build_gpt_datasets`; datasets whose documents are rows of sentences.
        split: How the documents of a dataset are cut into the three splits.
        sizes: Least number of samples for training, validation and test: Megatron lays out whole
            epochs. None takes one epoch; 0 builds nothing.
        config: How sentences become samples.
        word_pieces: Of the vocabulary.
        seed: Of the order and of the draws of samples.
        surplus: Share of samples that each dataset of a weighted blend holds in reserve.
        cache_path: Folder for built maps, or None to build them each time.
        storage: Cache for what is read of prefixes that are URLs.
        mmap: Map token files into memory; see `IndexedDataset`.

    Raises:
        EmptySplitError: A split of which no document can be used.
        DataError: A dataset that is missing or damaged, or a blend that asks a dataset for more
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

    The arguments are those of `build_bert_datasets`, but `pieces` needs sentinels.

    Raises:
        EmptySplitError: A split of which no document can be used.
        DataError: What is one in `build_bert_datasets`, or a vocabulary without sentinels.
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
