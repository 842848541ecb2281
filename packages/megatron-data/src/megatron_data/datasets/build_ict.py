"""Training, validation and test datasets of the inverse cloze task."""

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
    """Makes datasets whose samples are blocks of sentences with the title of their document.

    Attributes:
        config: How blocks become samples.
        word_pieces: Of the vocabulary.
        titles: Prefix of the titles by prefix of the sentences; empty for none.
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
        rows[:, 2] += rows.dtype.type(first)  # from numbers within the split
        return ICTDataset(source, titles, rows, self.config, self.word_pieces, self.seed)

    def _titles_of(self, name: str, source: IndexedDataset) -> IndexedDataset | None:
        if not self.titles:
            return None
        if name not in self.titles:
            raise DataError(f"no titles for {name}; name those of every dataset, or none")
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
        data_path: As in `build_gpt_datasets`; datasets whose documents are rows of sentences.
        split: How the documents of a dataset are cut into the three splits.
        sizes: Least number of samples for training, validation and test, of whole epochs. None
            takes one epoch, for an index of all blocks, say; 0 builds nothing.
        config: How blocks become samples.
        word_pieces: Of the vocabulary.
        titles: For every prefix of sentences that of their titles (Megatron:
            `--titles-data-path`), which has as many documents; None for blocks without titles.
        seed: Of the order and of the draws of samples.
        surplus: Share of samples that each dataset of a weighted blend holds in reserve.
        cache_path: Folder for built maps, or None to build them each time.
        storage: Cache for what is read of prefixes that are URLs.
        mmap: Map token files into memory; see `IndexedDataset`.

    Raises:
        EmptySplitError: A split of which no document can be used.
        DataError: A dataset that is missing or damaged, titles that do not belong to it, or a
            blend that asks a dataset for more than it has.
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
