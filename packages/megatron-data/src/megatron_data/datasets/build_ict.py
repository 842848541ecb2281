"""Builds the datasets of the inverse cloze task."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_data.datasets.build import DataPath, Datasets, build_splits
from megatron_data.datasets.build_sentences import MapBuilder
from megatron_data.datasets.ict import ICTDataset, ICTDatasetConfig
from megatron_data.datasets.masking import WordPieces
from megatron_data.datasets.split import DEFAULT_SPLIT
from megatron_data.errors import DataError
from megatron_data.indexed.reader import IndexedDataset
from megatron_data.order.sentences import block_map
from megatron_data.preprocessing.fingerprints import compare_fingerprints, recorded_fingerprints
from megatron_data.sources.block_cache import StorageCache


@dataclass(kw_only=True)
class _BlockBuilder(MapBuilder):
    """Builds datasets whose samples are blocks of sentences with the title of their document.

    Attributes:
        config: Configuration of the samples.
        word_pieces: Properties of the vocabulary.
        titles: Maps prefixes of sentences to prefixes of titles. Defaults to no titles.
    """

    config: ICTDatasetConfig
    word_pieces: WordPieces
    titles: Mapping[str, str] = field(default_factory=dict)

    def _build_along_map(
        self, name: str, source: IndexedDataset, documents: tuple[int, int], options: dict[str, Any]
    ) -> ICTDataset:
        first, last = documents
        titles = self._titles_of(name, source)
        lengths = np.zeros(last - first, np.int32)
        if titles is not None:
            ends = titles.tokens_before(titles.document_indices[first : last + 1])
            lengths = np.minimum(np.diff(ends), self.config.title_length).astype(np.int32)
        bounds = source.document_indices[first : last + 1]
        arrays = (bounds, source.sequence_lengths, lengths)
        rows = self._map("blocks 1", block_map, arrays, options).copy()
        rows[:, 2] += rows.dtype.type(first)  # document indices start at the split
        return ICTDataset(source, titles, rows, self.config, self.word_pieces, self.seed)

    def _titles_of(self, name: str, source: IndexedDataset) -> IndexedDataset | None:
        if not self.titles:
            return None
        if name not in self.titles:
            raise DataError(f"no titles for {name}; give titles for every dataset, or for none")
        compare_fingerprints(recorded_fingerprints([name, self.titles[name]]))
        titles = self.open_source(self.titles[name])
        if titles.num_documents != source.num_documents:
            raise DataError(
                f"{self.titles[name]} has {titles.num_documents:,} titles for "
                f"{source.num_documents:,} documents; preprocess both keys of the same file"
            )
        return titles


def build_ict_datasets(
    data_path: DataPath,
    split: str | None = DEFAULT_SPLIT,
    sizes: tuple[int | None, int | None, int | None] = (None, None, None),
    *,
    config: ICTDatasetConfig,
    word_pieces: WordPieces,
    titles: Mapping[str, str | os.PathLike[str]] | None = None,
    seed: int = 1234,
    surplus: float = 0.005,
    cache_path: str | os.PathLike[str] | None = None,
    storage: StorageCache | None = None,
    mmap: bool = True,
) -> Datasets:
    """Builds the three datasets of the inverse cloze task, in Megatron's order.

    Args:
        data_path: Data path as in `build_gpt_datasets`, to datasets with one sequence per sentence.
        split: Fractions of the documents of a dataset for the three splits. Defaults to "969,30,1".
        sizes: Minimum number of training, validation and test samples, in whole epochs. None takes
            one epoch, for example to index all blocks; 0 builds no dataset.
        config: Configuration of the samples.
        word_pieces: Properties of the vocabulary.
        titles: Maps each prefix of sentences to the prefix of their titles (Megatron:
            `--titles-data-path`), which has as many documents. Defaults to no titles.
        seed: Seed of the order and of the random draws of samples. Defaults to 1234.
        surplus: Fraction of extra samples that each dataset of a weighted blend provides. Defaults
            to 0.005.
        cache_path: Folder that stores built maps. Defaults to None, which builds them each time.
        storage: Cache for prefixes that are URLs.
        mmap: Maps token files into memory; see `IndexedDataset`. Defaults to True.

    Raises:
        EmptySplitError: No document of a split can be used.
        DataError: A dataset is missing or damaged, titles do not match, or a blend draws more
            samples from a dataset than it has.
    """
    builder = _BlockBuilder(
        seed=seed,
        surplus=surplus,
        cache_path=cache_path,
        storage=storage,
        mmap=mmap,
        options={
            "max_length": config.block_length,
            "use_one_sentence_blocks": config.use_one_sentence_documents,
        },
        config=config,
        word_pieces=word_pieces,
        titles={name: os.fspath(path) for name, path in (titles or {}).items()},
    )
    return build_splits(builder, data_path, split, sizes)
