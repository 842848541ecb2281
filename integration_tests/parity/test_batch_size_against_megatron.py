"""Batch sizes of ramps and rounded batch sizes equal those of megatron-core's calculators."""

import random

import pytest
from megatron_train.config.batch_size import BatchSizeSchedule

calculators = pytest.importorskip("megatron.core.num_microbatches_calculator")


def test_sizes_of_random_ramps_are_equal() -> None:
    if not hasattr(calculators, "RampupBatchsizeNumMicroBatchesCalculator"):
        pytest.skip("megatron-core 0.19 has steps in the place of ramps")
    choose = random.Random(0)
    for _ in range(100):
        start, increment = choose.randint(1, 64), choose.randint(1, 64)
        increments, samples = choose.randint(1, 50), choose.randint(1, 10**6)
        final = start + increment * increments
        micro, ranks = choose.randint(1, 4), choose.randint(1, 4)
        start, final = start + micro * ranks, final + micro * ranks
        ours = BatchSizeSchedule.ramp((start, increment, samples), final, micro * ranks)
        theirs = calculators.RampupBatchsizeNumMicroBatchesCalculator(
            final, micro, ranks, True, 1, start, increment, samples
        )
        for consumed in (0, samples, samples + 1, *choose.sample(range(2 * samples), 2)):
            theirs.update(consumed, consistency_check=False)
            asked = theirs.get_current_global_batch_size()
            sizes = {theirs.get_current_running_global_batch_size()}
            if (
                consumed * increments % samples == 0
            ):  # megatron-core divides floats there, which may round down
                sizes.add((asked + increment) // (micro * ranks) * micro * ranks)
            assert ours.at(consumed) in sizes


def test_rounded_sizes_of_constant_batches_are_equal() -> None:
    choose = random.Random(1)
    for _ in range(100):
        micro, ranks = choose.randint(1, 8), choose.randint(1, 8)
        size = choose.randint(micro * ranks, 500)
        theirs = calculators.ConstantNumMicroBatchesCalculator(size, micro, ranks, True, 1)
        ours = BatchSizeSchedule.constant(size, micro * ranks)
        assert ours.at(0) == theirs.get_current_running_global_batch_size()
        assert ours.at(0) // (micro * ranks) == theirs.get()


def test_sizes_of_random_steps_are_equal() -> None:
    if not hasattr(calculators, "StepBatchsizeNumMicroBatchesCalculator"):
        pytest.skip("this megatron-core has no schedules of steps")
    choose = random.Random(2)
    for _ in range(100):
        micro, ranks, length = (choose.randint(1, 4) for _ in range(3))
        firsts = [0, *sorted(choose.sample(range(1, 10**5), choose.randint(1, 5)))]
        sizes = [micro * ranks * choose.randint(1, 20) for _ in firsts]
        words = [f"{n * length}:{size}" for n, size in zip(firsts, sizes, strict=True)]
        theirs = calculators.StepBatchsizeNumMicroBatchesCalculator(
            micro, ranks, False, 1, " ".join(words), length
        )
        ours = BatchSizeSchedule.stepped(words, length)
        edges = [n + shift for n in firsts for shift in (-1, 0, 1) if n + shift >= 0]
        for consumed in edges:
            theirs.update(consumed, consistency_check=False)
            assert ours.at(consumed) == theirs.get_current_running_global_batch_size()
