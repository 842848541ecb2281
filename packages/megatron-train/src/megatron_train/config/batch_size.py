"""Samples in a step, which may change while a run goes on."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Final

from megatron_train.errors import TrainError
from megatron_train.saved_values import MAX_INTEGER, short_repr

GLOBAL: Final = "--global-batch-size"
RAMP: Final = "--rampup-batch-size"
STEPPED: Final = "--step-batch-size-schedule"

_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER: Final = re.compile(r"(\d{1,20}\.?\d{0,20})(?:E\+?(\d{1,2}))?([KMBT]?)", re.IGNORECASE)


@dataclass(frozen=True)
class BatchSizeSchedule:
    """Samples in each step, as a function of the samples consumed before it.

    Attributes:
        plateaus: pairs ``(first, size)`` in increasing order of ``first``, which is 0 in the first
            pair: a step that begins after at least ``first`` samples has ``size`` samples.
        multiple: every size is rounded down to a multiple of this number of samples, as
            Megatron-LM's ``--decrease-batch-size-if-needed`` does.
        flag: where the sizes are given, for errors.

    Raises:
        TrainError: a size is rounded down to 0.
    """

    plateaus: tuple[tuple[int, int], ...]
    multiple: int = 1
    flag: str = GLOBAL

    def __post_init__(self) -> None:
        smallest = min(size for _, size in self.plateaus)
        if smallest < self.multiple:
            raise TrainError(
                f"{self._named(smallest)} is less than {self.multiple} samples, one micro-batch of "
                "every data parallel rank; raise it, or lower --micro-batch-size"
            )

    @classmethod
    def constant(cls, size: int, multiple: int = 1) -> "BatchSizeSchedule":
        """Returns a schedule whose steps all have ``size`` samples."""
        return cls(((0, size),), multiple)

    @classmethod
    def ramp(cls, ramp: Sequence[int], final: int, multiple: int = 1) -> "BatchSizeSchedule":
        """Returns a schedule that grows in equal increments, each after an equal share of samples.

        Megatron-LM's calculator (``megatron.core.num_microbatches_calculator``) divides in floats
        and may be one step late where a share ends exactly; here are whole numbers.

        Args:
            ramp: first size, increment, and samples until ``final`` is reached.
            final: size after the ramp.
            multiple: see the class.

        Raises:
            TrainError: a ramp that is not three numbers, or does not lead from one size to the
                other.
        """
        flag = f"{RAMP} {' '.join(map(str, ramp))}"
        if len(ramp) != 3 or min(ramp) < 1:
            raise TrainError(
                f"{flag} is not a first batch size, an increment and a number of samples, "
                "all at least 1"
            )
        start, increment, samples = ramp
        if start >= final or (final - start) % increment:
            raise TrainError(
                f"{flag}: steps of {increment} do not lead from {start} to {GLOBAL} "
                f"{final}; change one of them"
            )
        sizes = range(start, final + 1, increment)
        plateaus = tuple(
            (-(-i * samples // (len(sizes) - 1)), size) for i, size in enumerate(sizes)
        )
        return cls(plateaus, multiple, RAMP)

    @classmethod
    def stepped(cls, words: Sequence[str], sequence_length: int) -> "BatchSizeSchedule":
        """Returns the schedule that Megatron-LM's ``--step-batch-size-schedule`` describes.

        Args:
            words: pairs ``TOKENS:SAMPLES`` between spaces or commas, such as
                ``0:768 250B:1536``: from that many consumed tokens on a step has that many
                samples. K, M, B and T multiply by powers of 1,000. Megatron-LM multiplies floats
                and cuts off; here a number is exact, and has to be whole.
            sequence_length: tokens in a sample; tokens are counted in whole samples, rounded down.

        Raises:
            TrainError: text that is no such schedule; the line names the pair.
        """
        text = ", ".join(words).replace(",", " ").split()
        found = []
        for pair in text:
            threshold, _, samples = pair.partition(":")
            tokens, size = _number(threshold), _number(samples)
            if tokens is None or not size:
                raise TrainError(
                    f"{STEPPED}: {short_repr(pair)} is not TOKENS:SAMPLES, two whole numbers that "
                    "may end in K, M, B or T, with at least 1 sample; give such as "
                    '"0:768 250B:1536"'
                )
            found.append((tokens // sequence_length, size, pair))
        found.sort(key=itemgetter(0))
        if not found or found[0][0]:
            raise TrainError(
                f"{STEPPED} {' '.join(text)}: the first size is missing; begin with 0:SAMPLES"
            )
        for (first, _, pair), (then, _, other) in pairwise(found):
            if first == then:
                raise TrainError(
                    f"{STEPPED}: {pair} and {other} both begin at sample {first}, as --seq-length "
                    f"is {sequence_length}; leave out one of them"
                )
        return cls(tuple((first, size) for first, size, _ in found), flag=STEPPED)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Every size of a step, in the order of the run."""
        return tuple(size // self.multiple * self.multiple for _, size in self.plateaus)

    @property
    def last(self) -> int:
        """Samples in a step at the end of the schedule."""
        return self.sizes[-1]

    def check(self, micro_batch_size: int, ranks: int) -> None:
        """Refuses a size that is not whole micro-batches of every data-parallel rank.

        Raises:
            TrainError: with the size.
        """
        for size in self.sizes:
            if size % (micro_batch_size * ranks):
                times = f" times {ranks} data parallel ranks" if ranks > 1 else ""
                raise TrainError(
                    f"{self._named(size)} is not a multiple of --micro-batch-size "
                    f"{micro_batch_size}{times}; change one of them"
                )

    def at(self, consumed: int) -> int:
        """Samples in the step that begins after ``consumed`` samples."""
        return self.sizes[bisect_right(self.plateaus, consumed, key=itemgetter(0)) - 1]

    def whole_steps(self, samples: int, consumed: int = 0) -> tuple[int, int]:
        """Returns how many whole steps lead from ``consumed`` to at most ``samples`` samples.

        Returns:
            The steps, and the samples that are consumed after them, ``consumed`` included.
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
        """Returns the samples that the first ``steps`` steps consume."""
        consumed = 0
        for size, most in self._stretches():
            count = steps if most is None else min(most, steps)
            steps, consumed = steps - count, consumed + count * size
        return consumed

    def _stretches(self, consumed: int = 0) -> Iterator[tuple[int, int | None]]:
        """Yields each size from ``consumed`` samples on with its number of steps, None at the end.

        A step may consume samples beyond the first ones of the next size, or of several.
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
        """Returns a size as the flag gives it, the subject of a sentence."""
        final = self.flag == RAMP and size == self.plateaus[-1][1]
        if self.flag == GLOBAL or final:
            return f"{GLOBAL} {size}"
        return f"{self.flag} passes through {size}, which"


def _number(text: str) -> int | None:
    """Returns a whole number that may be written with a point, an exponent or a suffix, or None."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    digits, exponent, unit = match.groups()
    value = Fraction(digits) * 10 ** int(exponent or 0) * _UNITS[unit.upper()]
    return int(value) if value.denominator == 1 and value <= MAX_INTEGER else None
