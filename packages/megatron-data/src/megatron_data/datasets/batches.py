"""Several samples as one dictionary of arrays with a leading axis."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError

Sample: TypeAlias = dict[str, NDArray[Any]]


class Dataset(Protocol):
    """Samples by number."""

    def __len__(self) -> int:
        """Returns the number of samples."""

    def __getitem__(self, sample: int, /) -> Sample:
        """Returns the sample of that number, a dictionary of arrays."""


@runtime_checkable
class BatchDataset(Protocol):
    """A dataset that reads several samples faster than one after the other."""

    def batch(self, samples: Sequence[int], /) -> Sample:
        """Returns the samples of those numbers: arrays `[s]` become `[b, s]`, scalars `[b]`."""


def read_batch(dataset: Dataset, samples: Sequence[int]) -> Sample:
    """Samples of any dataset as one batch: arrays `[s]` become `[b, s]`, scalars `[b]`.

    Raises:
        DataError: No sample, or samples of different keys.
    """
    if isinstance(dataset, BatchDataset) and samples:
        return dataset.batch(samples)
    return stack([dataset[sample] for sample in samples])


def stack(samples: Sequence[Mapping[str, NDArray[Any]]]) -> Sample:
    """Puts samples into one batch.

    Raises:
        DataError: No sample, or samples of different keys.
    """
    if not samples:
        raise DataError("a batch of no sample")
    keys = samples[0].keys()
    if any(sample.keys() != keys for sample in samples):
        raise DataError("samples of different kinds in one batch")
    return {key: np.stack([sample[key] for sample in samples]) for key in keys}


def merge_batches(parts: Sequence[tuple[Sequence[int], Sample]]) -> Sample:
    """Puts batches into one.

    Args:
        parts: The rows that each one's samples get, all rows once, and the batch.

    Raises:
        DataError: Batches of different keys.
    """
    if len(parts) == 1:
        return parts[0][1]
    keys = parts[0][1].keys()
    if any(batch.keys() != keys for _, batch in parts):
        raise DataError("samples of different kinds in one batch")
    count = sum(len(places) for places, _ in parts)
    whole: Sample = {}
    for key, first in parts[0][1].items():
        whole[key] = np.empty((count, *first.shape[1:]), first.dtype)
        for places, batch in parts:
            whole[key][places] = batch[key]
    return whole


def unstack(batch: Sample) -> list[Sample]:
    """Returns the samples of a batch, as views of it."""
    count = len(batch["sample_ids"])
    return [{name: array[row, ...] for name, array in batch.items()} for row in range(count)]
