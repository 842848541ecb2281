"""Samples, and batches of samples with a leading dim."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError

Sample: TypeAlias = dict[str, NDArray[Any]]


class Dataset(Protocol):
    """A sequence of samples."""

    def __len__(self) -> int:
        """Returns the number of samples."""

    def __getitem__(self, sample: int, /) -> Sample:
        """Returns one sample, a dictionary of arrays."""


@runtime_checkable
class BatchDataset(Protocol):
    """A dataset that reads several samples at once faster than one by one."""

    def batch(self, samples: Sequence[int], /) -> Sample:
        """Returns a batch of samples: arrays `[s]` become `[b, s]`, scalars `[b]`."""


def read_batch(dataset: Dataset, samples: Sequence[int]) -> Sample:
    """Reads samples of any dataset as one batch: arrays `[s]` become `[b, s]`, scalars `[b]`.

    Args:
        dataset: Dataset to read from. Its method `batch` is used if it has one.
        samples: Indices of the samples.

    Raises:
        DataError: `samples` is empty, or the samples have different keys.
    """
    if isinstance(dataset, BatchDataset) and samples:
        return dataset.batch(samples)
    return stack([dataset[sample] for sample in samples])


def stack(samples: Sequence[Mapping[str, NDArray[Any]]]) -> Sample:
    """Stacks samples into one batch.

    Raises:
        DataError: `samples` is empty, or the samples have different keys.
    """
    if not samples:
        raise DataError("a batch needs at least one sample")
    keys = samples[0].keys()
    if any(sample.keys() != keys for sample in samples):
        raise DataError("the samples of a batch have different keys")
    return {key: np.stack([sample[key] for sample in samples]) for key in keys}


def merge_batches(parts: Sequence[tuple[Sequence[int], Sample]]) -> Sample:
    """Merges batches into one.

    Args:
        parts: Pairs of row indices in the result and a batch. Together they cover all rows once.

    Raises:
        DataError: The batches have different keys.
    """
    if len(parts) == 1:
        return parts[0][1]
    keys = parts[0][1].keys()
    if any(batch.keys() != keys for _, batch in parts):
        raise DataError("the samples of a batch have different keys")
    count = sum(len(row_indices) for row_indices, _ in parts)
    merged: Sample = {}
    for key, first in parts[0][1].items():
        merged[key] = np.empty((count, *first.shape[1:]), first.dtype)
        for row_indices, batch in parts:
            merged[key][row_indices] = batch[key]
    return merged


def unstack(batch: Sample) -> list[Sample]:
    """Returns the samples of a batch as views."""
    count = len(batch["sample_ids"])
    return [{name: array[row, ...] for name, array in batch.items()} for row in range(count)]
