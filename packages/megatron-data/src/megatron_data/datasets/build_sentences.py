"""Training, validation and test datasets of BERT and T5 from what a command line names."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..indexed.reader import IndexedDataset
from ..order.cache import cache_key, load_or_build
from ..order.sentences import sentence_map
from . import bert, t5
from .blended import Dataset
from .build import DataPath, Datasets, build_splits
from .builders import GreedyBuilder, Wanted, named
from .gpt import TokenSource
from .masking import WordPieces
from .split import DEFAULT_SPLIT, sequences_of


@dataclass(frozen=True)
class _MapOptions:
    """What a map of sentences follows from besides the dataset."""

    max_length: int
    short_probability: float
    min_sentences: int


@dataclass(kw_only=True)
class _SentenceBuilder(GreedyBuilder):
    """Makes datasets whose samples are rows of sentences; splits are cut between documents.

    Attributes:
        options: of the map.
        make: a dataset of a source and its map.
    """

    options: _MapOptions
    make: Callable[[IndexedDataset, NDArray[np.unsignedinteger]], Dataset]

    def dataset(self, source: TokenSource, name: str, wanted: Wanted, number: int = 0) -> Dataset:
        """Return one split of one source, the `number`th of a blend.

        Raises:
            EmptySplitError: none of its documents can be used.
        """
        opened = self.source(name)
        first, last = sequences_of(wanted.interval, opened.documents)
        bounds = opened.document_indices[first : last + 1]
        lengths = opened.sequence_lengths
        options = vars(self.options) | {"seed": self.seed, "num_samples": wanted.size}

        def build() -> dict[str, NDArray[np.unsignedinteger]]:
            return {"rows": sentence_map(bounds, lengths, **options)}

        with named(
            f"{wanted.split} split of {name} ({last - first} of {opened.documents} documents)"
        ):
            key = cache_key({"what": "sentences 1"} | options, bounds, lengths)
            rows = load_or_build(self.cache, key, build)["rows"]
        return self.make(opened, rows)


def build_bert_datasets(
    data_path: DataPath,
    split: str | None = DEFAULT_SPLIT,
    sizes: tuple[int | None, int | None, int | None] = (None, None, None),
    *,
    config: bert.BertDatasetConfig,
    pieces: WordPieces,
    seed: int = 1234,
    surplus: float = 0.005,
    cache: str | os.PathLike[str] | None = None,
) -> Datasets:
    """Build the three BERT datasets of a run, in Megatron's order.

    Args:
        data_path: as in `build_gpt_datasets`; datasets whose documents are rows of sentences.
        split: how the documents of a dataset are cut into the three splits.
        sizes: least number of samples for training, validation and test: Megatron lays out whole
            epochs. None takes one epoch; 0 builds nothing.
        config: how sentences become samples.
        pieces: of the vocabulary.
        seed: of the order and of the draws of samples.
        surplus: share of samples that each dataset of a weighted blend holds in reserve.
        cache: folder for built maps, or None to build them each time.

    Raises:
        EmptySplitError: a split of which no document can be used.
        DataError: a dataset that is missing or damaged, or a blend that asks a dataset for more
            than it has.
    """
    options = _MapOptions(
        config.sequence_length - bert.SPECIAL_TOKENS, config.short_probability, config.min_sentences
    )
    builder = _SentenceBuilder(
        seed=seed,
        surplus=surplus,
        cache=cache,
        options=options,
        make=lambda source, rows: bert.BertDataset(source, rows, config, pieces, seed),
    )
    return build_splits(builder, data_path, split, sizes)


def build_t5_datasets(
    data_path: DataPath,
    split: str | None = DEFAULT_SPLIT,
    sizes: tuple[int | None, int | None, int | None] = (None, None, None),
    *,
    config: t5.T5DatasetConfig,
    pieces: WordPieces,
    seed: int = 1234,
    surplus: float = 0.005,
    cache: str | os.PathLike[str] | None = None,
) -> Datasets:
    """Build the three T5 datasets of a run, in Megatron's order.

    The arguments are those of `build_bert_datasets`, but `pieces` needs sentinels.

    Raises:
        EmptySplitError: a split of which no document can be used.
        DataError: what is one in `build_bert_datasets`, or a vocabulary without sentinels.
    """
    options = _MapOptions(config.sequence_length - t5.SPECIAL_TOKENS, config.short_probability, 1)
    builder = _SentenceBuilder(
        seed=seed,
        surplus=surplus,
        cache=cache,
        options=options,
        make=lambda source, rows: t5.T5Dataset(source, rows, config, pieces, seed),
    )
    return build_splits(builder, data_path, split, sizes)
