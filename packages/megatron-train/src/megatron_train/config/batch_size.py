"""Samples in a step, which may grow while a run is young."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_train.errors import TrainError


@dataclass(frozen=True)
class BatchSizeSchedule:
    """Samples in each step, as a function of the samples consumed before it.

    With a ramp the batch grows from ``start`` by ``increment`` at a time, each time after an equal
    share of ``ramp_samples``, to ``final``. Megatron-LM's calculator
    (``megatron.core.num_microbatches_calculator``) divides in floats and may be one step late where
    a share ends exactly; here are whole numbers.

    Attributes:
        final: samples in a step after the ramp, or from the beginning if there is none.
        ramp: ``(start, increment, ramp_samples)``.

    Raises:
        TrainError: a ramp that is not three numbers, or does not lead from one size to the other.
    """

    final: int
    ramp: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.ramp is None:
            return
        flag = f"--rampup-batch-size {' '.join(map(str, self.ramp))}"
        if len(self.ramp) != 3 or min(self.ramp) < 1:
            raise TrainError(
                f"{flag} is not a first batch size, an increment and a number of samples, "
                "all at least 1"
            )
        start, increment, _ = self.ramp
        if start >= self.final or (self.final - start) % increment:
            raise TrainError(
                f"{flag}: steps of {increment} do not lead from {start} to --global-batch-size "
                f"{self.final}; change one of them"
            )

    @property
    def sizes(self) -> range:
        """Every size of a step, from the first to the last."""
        if self.ramp is None:
            return range(self.final, self.final + 1)
        start, increment, _ = self.ramp
        return range(start, self.final + 1, increment)

    def check(self, micro_batch_size: int, ranks: int) -> None:
        """Refuse a size that is not whole micro-batches of every data-parallel rank.

        Raises:
            TrainError: with the size.
        """
        for size in self.sizes:
            if size % (micro_batch_size * ranks):
                flag = f"--global-batch-size {size}"
                if size != self.final:
                    flag = f"--rampup-batch-size passes through {size}, which"
                times = f" times {ranks} data parallel ranks" if ranks > 1 else ""
                raise TrainError(
                    f"{flag} is not a multiple of --micro-batch-size {micro_batch_size}{times}; "
                    "change one of them"
                )

    def at(self, consumed: int) -> int:
        """Samples in the step that begins after ``consumed`` samples."""
        if self.ramp is None or consumed > self.ramp[2]:
            return self.final
        start, increment, samples = self.ramp
        return start + consumed * (len(self.sizes) - 1) // samples * increment

    def whole_steps(self, samples: int) -> tuple[int, int]:
        """How many whole steps there are in ``samples`` samples, and how many samples they take."""
        steps = consumed = 0
        for size, end in self._plateaus(samples):
            count = min(-(-max(end - consumed, 0) // size), (samples - consumed) // size)
            steps, consumed = steps + count, consumed + count * size
            if consumed < end:
                break
        return steps, consumed

    def _plateaus(self, samples: int) -> Iterator[tuple[int, int]]:
        """Each size, and the number of consumed samples from which the next one holds."""
        for number, size in enumerate(self.sizes, start=1):
            if size == self.final or self.ramp is None:
                yield size, samples
            else:
                yield size, -(-number * self.ramp[2] // (len(self.sizes) - 1))
