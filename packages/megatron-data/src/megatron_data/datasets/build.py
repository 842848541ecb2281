"""Training, validation and test datasets from what a command line names."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, EmptySplitError
from ..indexed.reader import IndexedDataset
from ..order.blend import normalize
from ..order.cache import cache_key, load_or_build
from ..order.compat import CompatOrder, GPTIndices, build_gpt_indices
from .blended import BlendedDataset
from .gpt import GPTDataset, GPTDatasetConfig, TokenSource
from .paths import Blend, parse_data_path, parse_per_split
from .split import DEFAULT_SPLIT, SPLITS, Interval, SplitName, parse_split, sequences_of

Built: TypeAlias = GPTDataset | BlendedDataset
DataPath: TypeAlias = (
    "str | os.PathLike[str] | Sequence[str] | Mapping[str, str | Sequence[str] | None]"
)

_WHOLE: Interval = (0.0, 1.0)


class Datasets(NamedTuple):
    """One dataset per split, None where nothing was asked for or the split is empty."""

    train: Built | None
    valid: Built | None
    test: Built | None


@dataclass
class _Builder:
    """What every dataset of one call shares; each prefix is opened once."""

    config: GPTDatasetConfig
    seed: int
    drop_last_partial_validation: bool
    surplus: float
    cache: str | os.PathLike[str] | None
    opened: dict[str, IndexedDataset] = field(default_factory=dict)

    def source(self, prefix: str) -> IndexedDataset:
        """The dataset at a prefix."""
        if prefix not in self.opened:
            self.opened[prefix] = IndexedDataset(prefix)
        return self.opened[prefix]

    def dataset(
        self, source: TokenSource, name: str, split: SplitName, interval: Interval, size: int | None
    ) -> GPTDataset:
        """One split of one source."""
        sequences = sequences_of(interval, len(source.sequence_lengths))
        drop = split != "valid" or self.drop_last_partial_validation
        try:
            order = self._order(source.sequence_lengths, sequences, size, drop)
        except DataError as error:
            which = (
                f"{split} split of {name} ({len(sequences)} of "
                f"{len(source.sequence_lengths)} sequences)"
            )
            if isinstance(error, EmptySplitError):
                raise EmptySplitError(f"{which}: {error.what}") from None
            raise DataError(f"{which}: {error}") from None
        return GPTDataset(source, order, self.config)

    def _order(
        self,
        lengths: NDArray[np.int32],
        sequences: NDArray[np.int32],
        size: int | None,
        drop_last_partial: bool,
    ) -> CompatOrder:
        length, extra = self.config.sequence_length, self.config.extra
        options = {
            "sequence_length": length,
            "seed": self.seed,
            "num_samples": size,
            "extra": extra,
            "drop_last_partial": drop_last_partial,
        }

        def build() -> dict[str, NDArray[np.integer]]:
            return build_gpt_indices(
                lengths,
                sequences,
                sequence_length=length,
                seed=self.seed,
                num_samples=size,
                extra=extra,
                drop_last_partial=drop_last_partial,
            )._asdict()

        key = (
            "" if self.cache is None else cache_key({"what": "gpt 1"} | options, lengths, sequences)
        )
        return CompatOrder(GPTIndices(**load_or_build(self.cache, key, build)), length, extra)

    def blend(
        self, blend: Blend, split: SplitName, interval: Interval, size: int | None
    ) -> GPTDataset | BlendedDataset:
        """One split of one or more sources, mixed."""
        sources = [self.source(prefix) for prefix in blend.prefixes]
        if len(sources) == 1 and blend.weights is None:
            return self.dataset(sources[0], blend.prefixes[0], split, interval, size)
        weights: Sequence[float]
        requests: list[int | None]
        if blend.weights is None:
            weights, requests = [], [None] * len(sources)
        elif size is None:
            raise DataError(
                f"the {split} blend has weights but no size; give the number of samples"
            )
        else:
            weights = normalize(blend.weights)
            shares = [ceil(size * weight) for weight in weights]
            requests = [ceil(share * (1 + self.surplus)) for share in shares]
            size = sum(shares)
        datasets = [
            self.dataset(source, prefix, split, interval, request)
            for source, prefix, request in zip(sources, blend.prefixes, requests, strict=True)
        ]
        if not weights:
            weights = [len(dataset) for dataset in datasets]
            size = None if size is None else min(size, int(sum(weights)))
        return BlendedDataset(datasets, weights, size, self.cache)


def build_gpt_datasets(
    data_path: DataPath,
    split: str | None = DEFAULT_SPLIT,
    sizes: tuple[int | None, int | None, int | None] = (None, None, None),
    sequence_length: int = 1024,
    seed: int = 1234,
    *,
    eod_id: int | None = None,
    pad_id: int | None = None,
    add_extra_token: bool = True,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
    drop_last_partial_validation: bool = True,
    surplus: float = 0.005,
    cache: str | os.PathLike[str] | None = None,
) -> Datasets:
    """Build the three datasets of a run, in Megatron's order.

    Args:
        data_path: a prefix; a `--data-path` list of prefixes, or of weights and prefixes in turn;
            or a mapping from "train", "valid" and "test" to such a list each.
        split: how a dataset is cut into the three splits; not used with a mapping.
        sizes: samples wanted for training, validation and test. None takes one epoch; 0 builds
            nothing.
        sequence_length: tokens in a sample.
        seed: of the order.
        eod_id: token that ends a document.
        pad_id: token that is padding wherever it occurs.
        add_extra_token: read one token beyond the sequence length, for the last label.
        reset_position_ids: restart positions after a document.
        reset_attention_mask: number documents, so that attention stays within one.
        eod_mask_loss: no loss where the input is the end-of-document token.
        drop_last_partial_validation: leave out a last validation sample that is not full.
        surplus: share of samples that each dataset of a weighted blend holds in reserve.
        cache: folder for built indices, or None to build them each time.

    Raises:
        EmptySplitError: a split without tokens.
        DataError: a dataset that is missing or damaged, or a blend that asks a dataset for more
            than it has.
    """
    config = GPTDatasetConfig(
        sequence_length=sequence_length,
        eod_id=eod_id,
        pad_id=pad_id,
        add_extra_token=add_extra_token,
        reset_position_ids=reset_position_ids,
        reset_attention_mask=reset_attention_mask,
        eod_mask_loss=eod_mask_loss,
    )
    builder = _Builder(config, seed, drop_last_partial_validation, surplus, cache)
    parts = _parts(data_path, split)
    built = [
        None if part is None or size == 0 else builder.blend(part[0], name, part[1], size)
        for name, part, size in zip(SPLITS, parts, sizes, strict=True)
    ]
    return Datasets(*built)


def build_mock_gpt_datasets(
    source: TokenSource,
    sizes: tuple[int | None, int | None, int | None],
    config: GPTDatasetConfig,
    seed: int = 1234,
    split: str = "1,1,1",
) -> Datasets:
    """The three datasets of a source in memory, such as `MockTokens`.

    Raises:
        DataError: a split without tokens.
    """
    builder = _Builder(config, seed, True, 0.0, None)
    built = [
        None
        if interval is None or size == 0
        else builder.dataset(source, "mock", name, interval, size)
        for name, interval, size in zip(SPLITS, parse_split(split), sizes, strict=True)
    ]
    return Datasets(*built)


def _parts(data_path: DataPath, split: str | None) -> list[tuple[Blend, Interval] | None]:
    """Blend and interval of each split."""
    if isinstance(data_path, Mapping):
        blends = parse_per_split(data_path)
        return [None if (blend := blends[name]) is None else (blend, _WHOLE) for name in SPLITS]
    if split is None:
        raise DataError(
            f"--split is needed where all splits come from the same data: {DEFAULT_SPLIT}"
        )
    blend = parse_data_path(data_path)
    return [None if interval is None else (blend, interval) for interval in parse_split(split)]
