"""Batch size schedules, computed by hand. The parity session compares with megatron-core."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_train import TrainError
from megatron_train.config.batch_size import BatchSizeSchedule


def schedules() -> st.SearchStrategy[BatchSizeSchedule]:
    """Returns schedules that go up and down, at samples where steps end or that they pass over."""
    pair = st.tuples(st.integers(1, 60), st.integers(4, 40))
    pairs = st.lists(pair, max_size=5, unique_by=lambda pair: pair[0])
    return st.builds(
        lambda size, rest, multiple: BatchSizeSchedule(((0, size), *sorted(rest)), multiple),
        st.integers(4, 40),
        pairs,
        st.integers(1, 4),
    )


def test_a_ramp_has_increments_of_equal_length() -> None:
    schedule = BatchSizeSchedule.ramp((2, 3, 30), 8)
    assert list(schedule.sizes) == [2, 5, 8]
    assert [schedule.at(n) for n in (0, 14, 15, 29, 30, 31, 10**12)] == [2, 2, 5, 5, 8, 8, 8]


def test_a_ramp_with_more_increments_than_samples_skips_sizes() -> None:
    schedule = BatchSizeSchedule.ramp((1, 1, 2), 8)
    assert [schedule.at(n) for n in (0, 1, 2)] == [1, 4, 8]


def test_a_constant_schedule_has_equal_steps() -> None:
    schedule = BatchSizeSchedule.constant(8)
    assert schedule.plateaus == ((0, 8),)
    assert list(schedule.sizes) == [8] and schedule.at(0) == schedule.at(10**12) == 8
    assert schedule.whole_steps(63) == (7, 56) and schedule.consumed_by(7) == 56


def test_the_stepped_schedule_of_megatrons_gpt3_script() -> None:
    words = ["0:16", "2.4B:320", "4.8B:624", "7.2B:928", "9.6B:1232", "12B:1536"]
    schedule = BatchSizeSchedule.stepped(words, 2048)
    assert schedule == BatchSizeSchedule.stepped([" ".join(words)], 2048)
    assert schedule == BatchSizeSchedule.stepped([",".join(words)], 2048)
    # 2.4e9 / 2048 = 1171875 samples, and so on in equal parts
    assert schedule.plateaus == tuple(
        (1171875 * i, size) for i, size in enumerate((16, 320, 624, 928, 1232, 1536))
    )
    assert [schedule.at(n) for n in (0, 1171874, 1171875, 5859375)] == [16, 16, 320, 1536]
    # 73243 steps of 16 consume 1171888 samples, the first multiple of 16 above 1171875
    assert schedule.whole_steps(1171888 + 320) == (73244, 1172208)


def test_a_stepped_schedule_may_decrease_and_be_given_in_any_order() -> None:
    schedule = BatchSizeSchedule.stepped(["1.5k:2", "0:0.004K", "5E2:8"], 100)
    assert schedule.plateaus == ((0, 4), (5, 8), (15, 2)) and schedule.last == 2
    # 4 + 4 passes 5; 8 more are 16, which passes 15; then 2 at a time
    assert schedule.whole_steps(21) == (5, 20)
    assert [schedule.consumed_by(steps) for steps in range(6)] == [0, 4, 8, 16, 18, 20]


def test_tokens_are_rounded_down_to_samples() -> None:
    assert BatchSizeSchedule.stepped(["0:2 31:4"], 16).plateaus == ((0, 2), (1, 4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no batch size for token 0; begin with 0:SAMPLES"),
        ("99:768", "99:768: no batch size for token 0"),
        ("0:768 250B", "'250B' is not TOKENS:SAMPLES"),
        ("0:768 250G:1536", "'250G:1536' is not"),
        ("0:0", "with at least 1 sample"),
        ("0:1.5", "two integers"),
        ("0:-4", "two integers"),
        ("0:4:8", "'0:4:8' is not"),
        ("0:nan", "'0:nan' is not"),
        ("0:4 9e99T:8", "'9e99T:8' is not"),
        ("0:2 5:4 7:8", "0:2 and 5:4 both begin at sample 0 with --seq-length 16"),
    ],
)
def test_an_invalid_schedule_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(TrainError) as caught:
        BatchSizeSchedule.stepped(text.split(), 16)
    line = str(caught.value)
    assert line.startswith("--step-batch-size-schedule") and message in line and "\n" not in line


def test_sizes_are_rounded_down_to_whole_micro_batches_on_all_ranks() -> None:
    schedule = BatchSizeSchedule.constant(33, 16)
    assert (schedule.at(0), schedule.last, schedule.whole_steps(100)) == (32, 32, (3, 96))
    schedule.check(8, 2)
    ramp = BatchSizeSchedule.ramp((4, 5, 30), 14, 4)  # 4, 9, 14 at 0, 15, 30
    assert ramp.sizes == (4, 8, 12) and [ramp.at(n) for n in (0, 16, 32)] == [4, 8, 12]
    with pytest.raises(TrainError) as caught:
        BatchSizeSchedule.constant(3, 4)
    assert str(caught.value).startswith(
        "--global-batch-size 3 is less than 4 samples, one micro-batch on each data parallel rank"
    )


@settings(deadline=None)
@given(schedules(), st.integers(0, 200), st.integers(0, 80))
def test_whole_steps_equal_those_of_a_loop(
    schedule: BatchSizeSchedule, samples: int, begun: int
) -> None:
    steps, consumed = 0, begun
    while consumed + schedule.at(consumed) <= samples:
        consumed += schedule.at(consumed)
        steps += 1
    assert schedule.whole_steps(samples, begun) == (steps, consumed)


@settings(deadline=None)
@given(schedules(), st.integers(0, 30))
def test_consumed_samples_equal_those_of_a_loop(schedule: BatchSizeSchedule, steps: int) -> None:
    consumed = 0
    for _ in range(steps):
        consumed += schedule.at(consumed)
    assert schedule.consumed_by(steps) == consumed


@settings(deadline=None)
@given(schedules(), st.integers(0, 200))
def test_a_size_is_that_of_the_last_plateau_reached(
    schedule: BatchSizeSchedule, consumed: int
) -> None:
    size = [size for first, size in schedule.plateaus if first <= consumed][-1]
    assert schedule.at(consumed) == size - size % schedule.multiple > 0


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        (
            (2, 3),
            "needs three numbers of at least 1: first batch size, increment and number of samples",
        ),
        ((2, 0, 9), "three numbers of at least 1"),
        ((2, 4, 9), "increments of 4 do not lead from 2 to --global-batch-size 8"),
        ((8, 1, 9), "do not lead from 8"),
    ],
)
def test_an_invalid_ramp_is_refused(ramp: tuple[int, ...], message: str) -> None:
    with pytest.raises(TrainError) as caught:
        BatchSizeSchedule.ramp(ramp, 8)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("schedule", "named"),
    [
        (BatchSizeSchedule.ramp((4, 6, 100), 16), "--rampup-batch-size passes through 10, which"),
        (BatchSizeSchedule.ramp((4, 6, 100), 22), "--rampup-batch-size passes through 10, which"),
        (BatchSizeSchedule.ramp((4, 2, 100), 6), "--global-batch-size 6"),
        (
            BatchSizeSchedule.stepped(["0:4 100:10"], 1),
            "--step-batch-size-schedule passes through 10, which",
        ),
    ],
)
def test_a_size_that_does_not_divide_over_ranks_is_named(
    schedule: BatchSizeSchedule, named: str
) -> None:
    BatchSizeSchedule.ramp((4, 4, 100), 16).check(2, 2)
    with pytest.raises(TrainError) as caught:
        schedule.check(2, 2)
    assert str(caught.value).startswith(
        f"{named} is not a multiple of --micro-batch-size 2 times 2 data parallel ranks"
    )


@pytest.mark.parametrize(
    ("written", "samples"),
    [
        *(("0:7", 7), ("0:7k", 7_000), ("0:7M", 7 * 10**6), ("0:7b", 7 * 10**9)),
        *(("0:7T", 7 * 10**12), ("0:7e3", 7_000), ("0:7E+3K", 7 * 10**6), ("0:7.", 7)),
        *(("0:0.5K", 500), ("0:1.25e2", 125), ("0:1e0", 1), (f"0:{2**63 - 1}", 2**63 - 1)),
    ],
)
def test_numbers_of_a_schedule_have_units_and_exponents(written: str, samples: int) -> None:
    assert BatchSizeSchedule.stepped([written], 1).sizes == (samples,)


@pytest.mark.parametrize(
    "written", [f"0:{2**63}", "0:1e-3", "0:1.5e0", "0:.5K", "0:1KK", "0:1e100", "0:1x", "0:", ":1"]
)
def test_other_numbers_of_a_schedule_are_refused(written: str) -> None:
    with pytest.raises(TrainError, match="is not TOKENS:SAMPLES"):
        BatchSizeSchedule.stepped([written], 1)


def test_a_batch_may_be_one_micro_batch_on_each_rank_and_no_less() -> None:
    assert BatchSizeSchedule.constant(4, 4).sizes == (4,)
    with pytest.raises(TrainError, match="--global-batch-size 3 is less than 4 samples"):
        BatchSizeSchedule.constant(3, 4)
    BatchSizeSchedule.constant(4).check(4, 1)
    with pytest.raises(TrainError) as caught:
        BatchSizeSchedule.constant(6).check(4, 1)
    assert str(caught.value) == (
        "--global-batch-size 6 is not a multiple of --micro-batch-size 4; use 4 or 8"
    )
    with pytest.raises(TrainError, match="-size 4 times 2 data parallel ranks; use 8 or 16"):
        BatchSizeSchedule.constant(12).check(4, 2)


@pytest.mark.parametrize("ramp", [(0, 1, 9), (2, 1, 0), (2, -1, 9), (2, 1, 9, 9)])
def test_each_number_of_a_ramp_is_at_least_1(ramp: tuple[int, ...]) -> None:
    assert BatchSizeSchedule.ramp((1, 1, 1), 2).sizes == (1, 2)
    with pytest.raises(TrainError, match="needs three numbers of at least 1"):
        BatchSizeSchedule.ramp(ramp, 8)
