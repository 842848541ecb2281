"""Batch sizes of a ramp against megatron-core's calculator."""

import random

import pytest
from megatron_train.config.batch_size import BatchSizeSchedule

calculators = pytest.importorskip("megatron.core.num_microbatches_calculator")


def test_sizes_of_random_ramps_are_equal() -> None:
    choose = random.Random(0)
    for _ in range(100):
        start, increment = choose.randint(1, 64), choose.randint(1, 64)
        increments, samples = choose.randint(1, 50), choose.randint(1, 10**6)
        final = start + increment * increments
        ours = BatchSizeSchedule(final, (start, increment, samples))
        theirs = calculators.RampupBatchsizeNumMicroBatchesCalculator(
            final, 1, 1, False, 1, start, increment, samples
        )
        for consumed in (0, samples, samples + 1, *choose.sample(range(2 * samples), 2)):
            theirs.update(consumed, consistency_check=False)
            expected = theirs.get_current_global_batch_size()
            if consumed * increments % samples == 0:  # there its division in floats may round down
                assert ours.at(consumed) in (expected, expected + increment)
            else:
                assert ours.at(consumed) == expected
