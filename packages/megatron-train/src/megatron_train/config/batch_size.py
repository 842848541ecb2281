"""The global batch size as a function of consumed samples."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Final

from megatron_parallel.nearest import nearest_multiples

from megatron_train.errors import TrainError
from megatron_train.saved_values import MAX_INTEGER, short_repr

GLOBAL: Final = "--global-batch-size"
RAMP: Final = "--rampup-batch-size"
STEPPED: Final = "--step-batch-size-schedule"

_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER: Final = re.compile(r"(\d{1,20}\.?\d{0,20})(?:E\+?(\d{1,2}))?([KMBT]?)", re.IGNORECASE)


@dataclass(frozen=True)
class BatchSizeSchedule:
    """The number of samples in each step, as a function of the samples consumed before it.

    Attributes:
        plateaus: Pairs ``(first, size)`` in increasing order of ``first``: a step that begins after
            at least ``first`` consumed samples has ``size`` samples. The first pair begins at 0.
        multiple: Number of samples that every size is rounded down to a multiple of, as by
            Megatron-LM's ``--decrease-batch-size-if-needed``.
        flag: Flag that gives the sizes; errors name it.

    Raises:
        TrainError: A size is rounded down to 0.
    """

    plateaus: tuple[tuple[int, int], ...]
    multiple: int = 1
    flag: str = GLOBAL

    def __post_init__(self) -> None:
        smallest = min(size for _, size in self.plateaus)
        if smallest < self.multiple:
            raise TrainError(
                f"{self._named(smallest)} is less than {self.multiple} samples, one micro-batch on "
                "each data parallel rank; raise it or lower --micro-batch-size"
            )

    @classmethod
    def constant(cls, size: int, multiple: int = 1) -> "BatchSizeSchedule":
        """Returns a schedule in which every step has ``size`` samples."""
        return cls(((0, size),), multiple)

    @classmethod
    def ramp(cls, ramp: Sequence[int], final: int, multiple: int = 1) -> "BatchSizeSchedule":
        """Returns a schedule that grows by equal increments after equal numbers of samples.

        It is computed with integers. Megatron-LM (``megatron.core.num_microbatches_calculator``)
        divides floats, so that an increment may come one step later there.

        Args:
            ramp: First batch size, increment, and number of samples until ``final`` is reached.
            final: Batch size after the ramp.
            multiple: As for the class.

        Raises:
            TrainError: The ramp does not consist of three positive numbers, or its increments do
                not lead to ``final``.
        """
        flag = f"{RAMP} {' '.join(map(str, ramp))}"
        if len(ramp) != 3 or min(ramp) < 1:
            raise TrainError(
                f"{flag}: needs three numbers of at least 1: first batch size, increment and "
                "number of samples"
            )
        start, increment, samples = ramp
        if start >= final or (final - start) % increment:
            raise TrainError(
                f"{flag}: increments of {increment} do not lead from {start} to {GLOBAL} "
                f"{final}; change one of these numbers"
            )
        sizes = range(start, final + 1, increment)
        plateaus = tuple(
            (-(-i * samples // (len(sizes) - 1)), size) for i, size in enumerate(sizes)
        )
        return cls(plateaus, multiple, RAMP)

    @classmethod
    def stepped(cls, words: Sequence[str], sequence_length: int) -> "BatchSizeSchedule":
        """Returns the schedule of Megatron-LM's ``--step-batch-size-schedule``.

        Args:
            words: Pairs ``TOKENS:SAMPLES``, separated by spaces or commas, such as
                ``0:768 250B:1536``: after that many consumed tokens a step has that many samples.
                The suffixes K, M, B and T multiply by powers of 1,000. A number must be an exact
                integer; Megatron-LM multiplies floats and truncates.
            sequence_length: Tokens in a sample. Token counts are rounded down to whole samples.

        Raises:
            TrainError: The text is not such a schedule; the message names the pair.
        """
        text = ", ".join(words).replace(",", " ").split()
        found = []
        for pair in text:
            threshold, _, samples = pair.partition(":")
            tokens, size = _number(threshold), _number(samples)
            if tokens is None or not size:
                raise TrainError(
                    f"{STEPPED}: {short_repr(pair)} is not TOKENS:SAMPLES, two integers that "
                    "may end in K, M, B or T, with at least 1 sample, as in "
                    '"0:768 250B:1536"'
                )
            found.append((tokens // sequence_length, size, pair))
        found.sort(key=itemgetter(0))
        if not found or found[0][0]:
            raise TrainError(
                f"{STEPPED} {' '.join(text)}: no batch size for token 0; begin with 0:SAMPLES"
            )
        for (first, _, pair), (then, _, other) in pairwise(found):
            if first == then:
                raise TrainError(
                    f"{STEPPED}: {pair} and {other} both begin at sample {first} with --seq-length "
                    f"{sequence_length}; leave out one of them"
                )
        return cls(tuple((first, size) for first, size, _ in found), flag=STEPPED)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes in the order of the run."""
        return tuple(size // self.multiple * self.multiple for _, size in self.plateaus)

    @property
    def last(self) -> int:
        """The last batch size of the schedule."""
        return self.sizes[-1]

    def check(self, micro_batch_size: int, ranks: int) -> None:
        """Refuses a batch size that is not a whole number of micro-batches on each rank.

        Raises:
            TrainError: A size is not a multiple of ``micro_batch_size * ranks``.
        """
        for size in self.sizes:
            if size % (micro_batch_size * ranks):
                times = f" times {ranks} data parallel ranks" if ranks > 1 else ""
                raise TrainError(
                    f"{self._named(size)} is not a multiple of --micro-batch-size "
                    f"{micro_batch_size}{times}; use "
                    f"{nearest_multiples(size, micro_batch_size * ranks)}"
                )

    def at(self, consumed: int) -> int:
        """Returns the samples in the step that begins after ``consumed`` samples."""
        return self.sizes[bisect_right(self.plateaus, consumed, key=itemgetter(0)) - 1]

    def whole_steps(self, samples: int, consumed: int = 0) -> tuple[int, int]:
        """Returns the number of whole steps between ``consumed`` and ``samples`` samples.

        Returns:
            The number of steps, and the samples consumed after them, ``consumed`` included.
        """
        steps = 0
        for size, most in self._stretches(consumed):
            fitting = max(samples - consumed, 0) // size
            count = fitting if most is None else min(most, fitting)
            steps, consumed = steps + count, consumed + count * size
            if most is None or count < most:
                break
        return steps, consumed

    def consumed_by(self, steps: int) -> int:
        """Returns the number of samples that the first ``steps`` steps consume."""
        consumed = 0
        for size, most in self._stretches():
            count = steps if most is None else min(most, steps)
            steps, consumed = steps - count, consumed + count * size
        return consumed

    def _stretches(self, consumed: int = 0) -> Iterator[tuple[int, int | None]]:
        """Yields each size after ``consumed`` samples with its number of steps (None: no end).

        The last step of a size may consume samples beyond the beginning of the next sizes.
        """
        ends: list[int | None] = [first for first, _ in self.plateaus[1:]]
        for size, end in zip(self.sizes, [*ends, None], strict=True):
            if end is None:
                yield size, None
            elif consumed < end:
                steps = -(-(end - consumed) // size)
                yield size, steps
                consumed += steps * size

    def _named(self, size: int) -> str:
        """Returns the flag and a size as the subject of an error message."""
        final = self.flag == RAMP and size == self.plateaus[-1][1]
        if self.flag == GLOBAL or final:
            return f"{GLOBAL} {size}"
        return f"{self.flag} passes through {size}, which"


def _number(text: str) -> int | None:
    """Returns an integer written with a point, exponent or suffix; None if it is not one."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    digits, exponent, unit = match.groups()
    value = Fraction(digits) * 10 ** int(exponent or 0) * _UNITS[unit.upper()]
    return int(value) if value.denominator == 1 and value <= MAX_INTEGER else None
