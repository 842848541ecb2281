"""The micro-batches of a run: which samples each step has, and on which rank.

The order of samples depends on the seed, and in Megatron's order also on the length of the run. It
does not depend on the layout or on restarts: an iterator that starts at ``consumed_samples``
continues exactly where another stopped. The micro-batches of a step are assigned to the
data-parallel ranks in turn. All ranks of one model replica read the same samples. A thread reads
the next steps while one is computed (--num-workers).
"""

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

from megatron_data import EmptySplitError, SequentialSampler
from megatron_data.datasets import Dataset
from megatron_parallel import Axis

from megatron_train.config.batch_size import BatchSizeSchedule
from megatron_train.config.run import RunConfig
from megatron_train.document_pool import DocumentPool
from megatron_train.errors import TrainError
from megatron_train.read_ahead import read_ahead
from megatron_train.tasks.kinds import TaskData
from megatron_train.tasks.task import MicroBatch


class RunBatches:
    """Training, validation and test micro-batches of one rank of a run.

    The test set is the third split of --split, or --test-data-path. The test split of a small
    corpus may be empty, which is not an error.

    Args:
        config: The run.
        data: Source of the samples.
        data_axis: Axis whose ranks divide the samples of a step.
        pool: Assigns the documents of a step to ranks instead, if given.

    Attributes:
        no_test_reason: Reason why the test split of --split is empty; empty if it is not.

    Raises:
        DataError: A corpus is missing, damaged or too small for one sample.
        TrainError: The training or validation split is empty, or another tokenizer made a corpus.
    """

    def __init__(
        self,
        config: RunConfig,
        data: TaskData,
        data_axis: Axis,
        pool: DocumentPool | None = None,
    ) -> None:
        self._data = data
        self._data_axis = data_axis
        self._pool = pool
        # A pool exchanges lengths of documents among ranks, which a thread must not do.
        self._steps_ahead = 0 if pool is not None else config.data.num_workers
        self._reading = threading.Lock()
        self._micro_batch_size = config.training.micro_batch_size
        self._sizes = config.batch_sizes
        self._evaluated = BatchSizeSchedule.constant(config.batch_sizes.last)
        self._samples_at_once = config.micro_batch_times_data_parallel_size
        self._train_samples = config.train_samples
        self._valid_samples = config.evaluation.eval_iters * config.batch_sizes.last
        self._train = _require(data.datasets((self._train_samples, 0, 0)).train, "train")
        self._valid: Dataset | None = None
        self._test: Dataset | None = None
        self.no_test_reason = ""
        try:
            self._valid = data.datasets((0, self._valid_samples, 0)).valid
            if self._valid_samples:
                _require(self._valid, "validate")
        except EmptySplitError as error:
            raise TrainError(
                f"{error.what}; enlarge it, as with --split 8,2,0, or skip evaluation with "
                "--eval-iters 0"
            ) from None
        try:
            self._test = data.datasets((0, 0, self._valid_samples)).test
        except EmptySplitError as error:
            if config.data.test_data_path:
                raise
            self.no_test_reason = error.what
        data.check()

    @property
    def has_test(self) -> bool:
        """Whether there are test samples."""
        return self._test is not None

    def training(self, consumed_samples: int) -> Iterator[Sequence[MicroBatch]]:
        """Yields the micro-batches of each step after ``consumed_samples`` samples."""
        steps = self._steps(self._train, self._train_samples, consumed_samples, self._sizes)
        return read_ahead(steps, self._steps_ahead)

    def validation(self) -> Iterator[Sequence[MicroBatch]]:
        """Yields the micro-batches of each global batch of an evaluation, always the same ones."""
        if self._valid is None:
            return iter(())
        steps = self._steps(self._valid, self._valid_samples, 0, self._evaluated)
        return read_ahead(steps, self._steps_ahead)

    def testing(self) -> Iterator[Sequence[MicroBatch]]:
        """Yields the micro-batches of each global batch of the test; none without `has_test`."""
        if self._test is None:
            return iter(())
        steps = self._steps(self._test, self._valid_samples, 0, self._evaluated)
        return read_ahead(steps, self._steps_ahead)

    def _steps(
        self, dataset: Dataset, samples: int, consumed: int, sizes: BatchSizeSchedule
    ) -> Iterator[Sequence[MicroBatch]]:
        if self._pool is not None:
            read = partial(self._data.read, dataset)
            while (end := consumed + sizes.at(consumed)) <= samples:
                yield self._pool.rows(read, range(consumed, end))
                consumed = end
            return
        micro_batches = self._read(dataset, samples, consumed)
        while step := list(islice(micro_batches, sizes.at(consumed) // self._samples_at_once)):
            yield step
            consumed += len(step) * self._samples_at_once

    def _read(self, dataset: Dataset, samples: int, consumed: int) -> Iterator[MicroBatch]:
        axis = self._data_axis
        sampler = SequentialSampler(
            samples, consumed, self._micro_batch_size, axis.index, axis.size
        )
        for indices in sampler:
            with self._reading:  # sources of samples need not be safe for several threads
                batch = self._data.micro_batch(self._data.read(dataset, indices))
            yield batch


def _require(dataset: Dataset | None, purpose: str) -> Dataset:
    if dataset is None:
        without = ", or skip evaluation with --eval-iters 0" if purpose == "validate" else ""
        raise TrainError(f"--split leaves nothing to {purpose} on; give it a weight{without}")
    return dataset
