"""Parses Megatron's `--split`: the fractions for training, validation and test."""

import re
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np

from megatron_data.datasets.split_names import SPLITS
from megatron_data.errors import DataError
from megatron_data.indexed.reader import IndexedDataset

DEFAULT_SPLIT = "969,30,1"

Interval: TypeAlias = tuple[float, float]


def parse_split(split: str) -> tuple[Interval | None, ...]:
    """Returns the intervals of train, valid and test within [0, 1]. An empty interval is None.

    Args:
        split: One to three numbers such as `969,30,1` or `98, 2`. They are divided by their sum.

    Raises:
        DataError: There is no number, more than three, a negative one, or all are zero.
    """
    try:
        shares = [float(number) for number in re.findall(r"[.0-9]+", split)]
    except ValueError:
        raise DataError(f"split {split!r} is not three numbers such as {DEFAULT_SPLIT}") from None
    if not 1 <= len(shares) <= len(SPLITS) or not sum(shares) or "-" in split:
        raise DataError(
            f"split {split!r}: give one to three numbers, not all zero, such as {DEFAULT_SPLIT}"
        )
    shares += [0.0] * (len(SPLITS) - len(shares))
    total = np.sum(np.array(shares))
    bounds = list(accumulate((float(share / total) for share in shares), initial=0.0))
    return tuple((begin, end) if end > begin else None for begin, end in pairwise(bounds))


def sequence_range(interval: Interval, count: int) -> tuple[int, int]:
    """Returns the first sequence of an interval and the index after its last.

    Bounds are rounded half to even, as in Megatron.
    """
    begin, end = (round(bound * float(count)) for bound in interval)
    return begin, end


def count_tokens(dataset: IndexedDataset, interval: Interval) -> int:
    """Returns the number of tokens of the sequences in an interval."""
    bounds = np.array(sequence_range(interval, len(dataset)), np.int64)
    begin, end = dataset.tokens_before(bounds).tolist()
    return int(end - begin)
