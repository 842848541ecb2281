"""Which samples a data-parallel rank takes next.

A sampler is a pure function of a few numbers: how many samples there are, how many the whole
run has consumed, the micro-batch size, and which of how many data-parallel ranks this is. To
resume, on any number of ranks and with any micro-batch size, make a new one with the number
consumed.
"""

from collections.abc import Iterator

from megatron_data.errors import DataError
from megatron_data.order.permutation import Permutation, hash_integers


class SequentialSampler:
    """Micro-batches in the order of the dataset, Megatron's `single` loader.

    Every step takes the next `micro_batch_size * data_parallel_size` samples; rank r gets the
    r-th micro-batch of them. A last step that is not full is dropped.

    Args:
        total_samples: Samples in the dataset.
        consumed_samples: Samples that all ranks together have consumed before.
        micro_batch_size: Samples per rank and step.
        data_parallel_rank: This rank.
        data_parallel_size: Number of ranks.

    Raises:
        DataError: A size below 1, or a rank or a count out of range.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
    ) -> None:
        check_sampler(
            total_samples,
            consumed_samples,
            micro_batch_size,
            data_parallel_rank,
            data_parallel_size,
        )
        if consumed_samples > total_samples:
            raise DataError(
                f"{consumed_samples} samples consumed, the dataset has {total_samples}; ask for a "
                "larger dataset to train on"
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size

    @property
    def samples_per_step(self) -> int:
        """Samples that all ranks take together in a step."""
        return self.micro_batch_size * self.data_parallel_size

    def __len__(self) -> int:
        """Micro-batches that are left."""
        return (self.total_samples - self.consumed_samples) // self.samples_per_step

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            first = self.consumed_samples + self.data_parallel_rank * self.micro_batch_size
            self.consumed_samples += self.samples_per_step
            yield list(range(first, first + self.micro_batch_size))

    def state_dict(self) -> dict[str, int]:
        """Returns what to resume from: micro-batches handed out count as consumed.

        A loader that reads ahead takes micro-batches before they are trained on; keep the
        trainer's own count in that case.
        """
        return {"consumed_samples": self.consumed_samples}


class ShuffledSampler(SequentialSampler):
    """Micro-batches of a dataset that is gone through `epochs` times, each time in another order.

    For datasets without an order of their own. The epochs are one row of samples, so a step may
    hold the end of one and the beginning of the next, and nothing is dropped but a last step that
    is not full. Any number of ranks and any micro-batch size see the same row, which Megatron's
    `cyclic` loader (`megatron_data.torch.CyclicSampler`) does not promise: the length of its epochs
    depends on both.

    Args:
        dataset_samples: Samples in the dataset.
        consumed_samples: Samples that all ranks together have consumed before, in all epochs.
        micro_batch_size: Samples per rank and step.
        data_parallel_rank: This rank.
        data_parallel_size: Number of ranks.
        epochs: How often the dataset is gone through; more of them change nothing before.
        seed: Of the orders.

    Raises:
        DataError: A size below 1, or a rank or a count out of range.
    """

    def __init__(
        self,
        dataset_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        *,
        epochs: int = 1,
        seed: int = 1234,
    ) -> None:
        super().__init__(
            dataset_samples * epochs,
            consumed_samples,
            micro_batch_size,
            data_parallel_rank,
            data_parallel_size,
        )
        self.dataset_samples = dataset_samples
        self.seed = seed

    def __iter__(self) -> Iterator[list[int]]:
        drawn: tuple[int, Permutation] | None = None
        for places in super().__iter__():
            samples = []
            for place in places:
                epoch, number = divmod(place, self.dataset_samples)
                if drawn is None or drawn[0] != epoch:
                    drawn = (
                        epoch,
                        Permutation(self.dataset_samples, hash_integers(self.seed, epoch)),
                    )
                samples.append(drawn[1][number])
            yield samples


def check_sampler(
    total_samples: int,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> None:
    """Refuses numbers that no sampler can work with.

    Raises:
        DataError: A size below 1, or a rank or a count out of range.
    """
    if total_samples < 1:
        raise DataError(f"{total_samples} samples to take micro-batches from")
    if consumed_samples < 0:
        raise DataError(f"{consumed_samples} consumed samples; give 0 to start")
    if micro_batch_size < 1:
        raise DataError(f"micro-batch size {micro_batch_size}; give at least 1")
    if not 0 <= data_parallel_rank < data_parallel_size:
        raise DataError(
            f"data-parallel rank {data_parallel_rank} of {data_parallel_size}; ranks count from 0"
        )
