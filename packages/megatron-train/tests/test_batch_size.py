"""Samples in each step, by hand; against megatron-core in the parity session."""

import pytest
from megatron_train import TrainError
from megatron_train.config.batch_size import BatchSizeSchedule


def test_a_ramp_takes_equal_shares_of_its_samples() -> None:
    schedule = BatchSizeSchedule(8, (2, 3, 30))
    assert list(schedule.sizes) == [2, 5, 8]
    assert [schedule.at(n) for n in (0, 14, 15, 29, 30, 31, 10**12)] == [2, 2, 5, 5, 8, 8, 8]


def test_without_a_ramp_all_steps_are_equal() -> None:
    schedule = BatchSizeSchedule(8)
    assert list(schedule.sizes) == [8] and schedule.at(0) == schedule.at(10**12) == 8
    assert schedule.whole_steps(63) == (7, 56)


@pytest.mark.parametrize("ramp", [(2, 3, 30), (1, 1, 1), (4, 4, 1000), (2, 6, 7)])
def test_whole_steps_are_those_that_are_made_one_by_one(ramp: tuple[int, ...]) -> None:
    schedule = BatchSizeSchedule(8, ramp)
    for samples in (1, 2, 5, 29, 30, 31, 100, 1023):
        steps = consumed = 0
        while consumed + schedule.at(consumed) <= samples:
            consumed += schedule.at(consumed)
            steps += 1
        assert schedule.whole_steps(samples) == (steps, consumed)


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        ((2, 3), "is not a first batch size, an increment and a number of samples"),
        ((2, 0, 9), "all at least 1"),
        ((2, 4, 9), "steps of 4 do not lead from 2 to --global-batch-size 8"),
        ((8, 1, 9), "do not lead from 8"),
    ],
)
def test_what_is_no_ramp_is_refused(ramp: tuple[int, ...], message: str) -> None:
    with pytest.raises(TrainError) as caught:
        BatchSizeSchedule(8, ramp)
    assert message in str(caught.value)


def test_a_size_on_the_way_that_ranks_cannot_share_is_named() -> None:
    BatchSizeSchedule(16, (4, 4, 100)).check(2, 2)
    with pytest.raises(TrainError) as caught:
        BatchSizeSchedule(16, (4, 6, 100)).check(2, 2)
    message = "--rampup-batch-size passes through 10, which is not a multiple of "
    assert f"{message}--micro-batch-size 2 times 2 data parallel ranks" in str(caught.value)
