"""The only module that imports torch: batches of tensors, and a loader."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Sampler

from megatron_data.datasets.batches import Dataset, Sample, stack
from megatron_data.datasets.batches import read_batch as read_arrays
from megatron_data.errors import DataError
from megatron_data.samplers import SequentialSampler, check_sampler

Batch = dict[str, torch.Tensor]


def to_batch(samples: Sequence[Mapping[str, NDArray[Any]]]) -> Batch:
    """Stacks samples into tensors: arrays `[s]` become `[b, s]`, scalars `[b]`.

    Raises:
        DataError: No sample, or samples of different keys.
    """
    return _tensors(stack(samples))


def read_batch(dataset: Dataset, samples: Sequence[int]) -> Batch:
    """Reads samples as tensors, `[b, s]` and `[b]`: as `to_batch` of them, but faster.

    Raises:
        DataError: No sample, or samples of different keys.
    """
    return _tensors(read_arrays(dataset, samples))


def _tensors(batch: Sample) -> Batch:
    return {key: torch.from_numpy(array) for key, array in batch.items()}


class _BatchReader:
    """A dataset for torch's `DataLoader`, which gives it the numbers of a whole batch."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, samples: Sequence[int]) -> Sample:
        return read_arrays(self.dataset, samples)


def data_loader(
    dataset: Dataset,
    sampler: "SequentialSampler | CyclicSampler",
    *,
    workers: int = 0,
    prefetch: int = 2,
    pin_memory: bool = False,
) -> "DataLoader[Batch]":
    """Returns a torch `DataLoader` that yields one batch per micro-batch of the sampler.

    Args:
        dataset: Samples by number.
        sampler: Which samples come next.
        workers: Processes that read ahead; with 0 samples are read when asked for.
        prefetch: Batches each process reads ahead.
        pin_memory: Put batches into page-locked memory, for copies to a GPU.
    """
    return DataLoader(
        _BatchReader(dataset),  # type: ignore[arg-type]  # what the loader asks of a dataset
        batch_sampler=sampler,
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        persistent_workers=workers > 0,
        pin_memory=pin_memory,
        collate_fn=_tensors,  # type: ignore[arg-type]  # its batches are not lists of samples
    )


class CyclicSampler(Sampler[list[int]]):
    """Micro-batches in an order drawn anew each epoch, Megatron's `cyclic` loader.

    One iteration ends with the epoch; iterate again for the next one. The permutation of epoch e
    is `torch.randperm` with seed e. The length of an epoch depends on ranks and micro-batch size;
    resumed in the middle of one with others of them, a run repeats some samples and misses as many.
    `ShuffledSampler` does not.

    Args:
        total_samples: Samples in the dataset; those beyond whole steps are left out.
        consumed_samples: Samples that all ranks together have consumed before.
        micro_batch_size: Samples per rank and step.
        data_parallel_rank: This rank.
        data_parallel_size: Number of ranks.
        data_sharding: Every rank permutes its own contiguous part of the dataset; otherwise all
            ranks share one permutation, and then any number of ranks sees the same order.

    Raises:
        DataError: A size below 1, fewer samples than one step takes, or, with `data_sharding` or
            not, a count consumed that is not whole steps of this epoch.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        *,
        data_sharding: bool = True,
    ) -> None:
        check_sampler(
            total_samples,
            consumed_samples,
            micro_batch_size,
            data_parallel_rank,
            data_parallel_size,
        )
        self.samples_per_step = micro_batch_size * data_parallel_size
        self.epoch_samples = total_samples - total_samples % self.samples_per_step
        if not self.epoch_samples:
            raise DataError(f"{total_samples} samples, one step takes {self.samples_per_step}")
        if consumed_samples % self.epoch_samples % self.samples_per_step:
            raise DataError(
                f"{consumed_samples} consumed samples are not whole steps of "
                f"{self.samples_per_step}"
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.data_sharding = data_sharding

    def __len__(self) -> int:
        """Micro-batches that are left in this epoch."""
        return (
            self.epoch_samples - self.consumed_samples % self.epoch_samples
        ) // self.samples_per_step

    def __iter__(self) -> Iterator[list[int]]:
        epoch, done = divmod(self.consumed_samples, self.epoch_samples)
        order = self._order(epoch, done)
        for start in range(0, len(self) * self.micro_batch_size, self.micro_batch_size):
            self.consumed_samples += self.samples_per_step
            yield order[start : start + self.micro_batch_size]

    def _order(self, epoch: int, done: int) -> list[int]:
        """Returns what is left of this rank's epoch."""
        rank, ranks = self.data_parallel_rank, self.data_parallel_size
        generator = torch.Generator().manual_seed(epoch)
        if self.data_sharding:
            own = self.epoch_samples // ranks
            order = torch.randperm(own, generator=generator)[done // ranks :] + rank * own
        else:
            whole = self.total_samples - self.total_samples % self.micro_batch_size
            order = torch.randperm(whole, generator=generator)[done:][rank::ranks]
        indices: list[int] = order.tolist()
        return indices

    def state_dict(self) -> dict[str, int]:
        """Returns what to resume from: micro-batches handed out count as consumed."""
        return {"consumed_samples": self.consumed_samples}
