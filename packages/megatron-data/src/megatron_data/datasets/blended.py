"""Blends of datasets."""

from collections.abc import Sequence

import numpy as np

from megatron_data.datasets.batches import Dataset, Sample, merge_batches, read_batch, unstack
from megatron_data.errors import DataError
from megatron_data.order.protocol import BlendOrder


class BlendedDataset:
    """A blend of datasets.

    Samples are those of the datasets. `sample_ids` are indices in the blend, and `dataset_ids`, an
    int64 scalar, is the index of the dataset.

    Args:
        datasets: Datasets to draw from.
        order: The dataset and the sample for each sample of the blend.

    Raises:
        DataError: The order has another number of datasets, or draws more samples from a dataset
            than it has.
    """

    def __init__(self, datasets: Sequence[Dataset], order: BlendOrder) -> None:
        self.datasets = tuple(datasets)
        self.order = order
        drawn = order.counts()
        if len(drawn) != len(datasets):
            raise DataError(
                f"the blend order has {len(drawn)} sources, but there are {len(datasets)} datasets"
            )
        for number, (dataset, count) in enumerate(zip(datasets, drawn, strict=True)):
            if count > len(dataset):
                raise DataError(
                    f"the blend draws {count} samples from dataset {number}, which has "
                    f"{len(dataset)}; raise the surplus or lower its weight"
                )

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self.order)

    def __getitem__(self, sample: int) -> Sample:
        dataset, number = self.order[sample]
        return {
            **self.datasets[dataset][number],
            "sample_ids": np.array(sample, np.int64),
            "dataset_ids": np.array(dataset, np.int64),
        }

    def batch(self, samples: Sequence[int]) -> Sample:
        """Reads several samples at once. Arrays have a leading dim: `[b, s]` and `[b]`."""
        entries = [self.order[sample] for sample in samples]
        rows_by_source: dict[int, list[int]] = {}
        for row, (source, _) in enumerate(entries):
            rows_by_source.setdefault(source, []).append(row)
        parts = [
            (rows, read_batch(self.datasets[source], [entries[row].sample_index for row in rows]))
            for source, rows in rows_by_source.items()
        ]
        return merge_batches(parts) | {
            "sample_ids": np.array(samples, np.int64),
            "dataset_ids": np.array([source for source, _ in entries], np.int64),
        }

    def __getitems__(self, samples: Sequence[int]) -> list[Sample]:
        """Returns several samples for torch's `DataLoader`, as views of one batch."""
        return unstack(self.batch(samples))
