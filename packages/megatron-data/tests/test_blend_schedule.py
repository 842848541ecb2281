"""Computed blends: exact shares, no drift, and weight changes."""

import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from megatron_data import DataError
from megatron_data.order import Apportionment, BlendEntry, BlendSchedule, WeightChange

LARGE_AND_TINY = [0.5] + [0.005] * 100
ZIPF = [1 / (rank + 1) for rank in range(100)]
FIBONACCI = [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610]
GEOMETRIC = [0.618**power for power in range(18)]

weights = st.lists(
    st.one_of(st.floats(1e-4, 1e3), st.sampled_from([1.0, 2.0, 1e-3])), min_size=1, max_size=12
)


def worst(shares: list[float], samples: int) -> float:
    """Returns the largest deviation of a count from its share after any number of samples."""
    order = Apportionment(shares)
    total = sum(order.weights)
    counts = [0] * len(shares)
    largest = 0
    for sample in range(samples):
        draw = order[sample]
        assert draw.sample_index == counts[draw.source_index]  # no sample is skipped or repeated
        counts[draw.source_index] += 1
        off = (
            abs(n * total - (sample + 1) * w) for n, w in zip(counts, order.weights, strict=True)
        )
        largest = max(largest, *off)
    assert order.counts(samples) == counts
    return largest / total


@pytest.mark.parametrize(
    "shares",
    [LARGE_AND_TINY, [0.901] + [0.001] * 99, ZIPF, FIBONACCI, GEOMETRIC, [1.0], [1e-9, 1.0]],
    ids=["large and tiny", "larger and tinier", "zipf", "fibonacci", "geometric", "one", "dust"],
)
def test_every_source_stays_near_its_share(shares: list[float]) -> None:
    assert worst(shares, 2000) < 1.5


@settings(max_examples=50, deadline=None)
@given(weights)
@example([0.0342, 1.3218, 1.4349, 1.2125, 7.3])
def test_every_source_stays_near_its_share_with_any_weights(shares: list[float]) -> None:
    assert worst(shares, 400) < 1.5
    assert Apportionment(shares).max_error() < 1.69


def test_shares_do_not_drift() -> None:
    """At 10^15 samples the counts follow the exact decimal weights, which float64 cannot hold."""
    order = Apportionment([0.1, 0.2, 0.7])
    assert order.weights == (1, 2, 7)
    counts = order.counts(10**15 + 5)
    assert sum(counts) == 10**15 + 5
    for count, share in zip(counts, (1, 2, 7), strict=True):
        assert abs(count - Fraction((10**15 + 5) * share, 10)) < 1.5


def test_as_many_samples_as_the_sum_of_the_weights_draw_the_weights_exactly() -> None:
    assert Apportionment([7, 1, 30, 12]).counts(50) == [7, 1, 30, 12]


@pytest.mark.parametrize(
    ("shares", "sources"),
    [
        ([1, 1, 1, 1], [0, 2, 1, 3]),  # (0 1) and (2 3)
        ([2, 2, 1, 1, 1, 1], [0, 2, 1, 4, 0, 3, 1, 5]),  # (0 1) and ((2 3) (4 5))
        ([3, 1, 1, 1], [0, 1, 0, 3, 0, 2]),  # 0 and (3 (1 2))
    ],
)
def test_of_equal_subtrees_the_older_one_is_left(shares: list[int], sources: list[int]) -> None:
    order = Apportionment(shares)
    assert [order[sample].source_index for sample in range(len(sources))] == sources


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 80),
            st.dictionaries(st.sampled_from("abcd"), st.floats(0.01, 9), min_size=1),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_changes_do_not_affect_earlier_samples_and_skip_none(reigns: list) -> None:
    first, changes = 0, []
    for length, shares in reigns:
        changes.append(WeightChange(first, shares))
        first += length
    schedule = BlendSchedule(changes, first)
    drawn = [schedule[sample] for sample in range(first)]
    seen: Counter[int] = Counter()
    for draw in drawn:
        assert draw.sample_index == seen[draw.source_index]
        seen[draw.source_index] += 1
    assert schedule.counts() == [seen[source] for source in range(len(schedule.sources))]
    for number in range(1, len(changes)):
        earlier = BlendSchedule(changes[:number], first)
        for sample in range(changes[number].first_sample):
            then = earlier[sample]
            assert (schedule.sources[drawn[sample].source_index], drawn[sample].sample_index) == (
                earlier.sources[then.source_index],
                then.sample_index,
            )
    for (length, shares), change in zip(reigns, changes, strict=True):
        part = drawn[change.first_sample : change.first_sample + length]
        counts = Counter(schedule.sources[draw.source_index] for draw in part)
        for name, weight in shares.items():
            assert abs(counts[name] - length * weight / sum(shares.values())) < 1.5


def test_refusals() -> None:
    for bad in ([], [0.5, 0.0], [1.0, math.nan], [1.0, math.inf], [-1.0]):
        with pytest.raises(DataError, match="each must be a positive number"):
            Apportionment(bad)
    with pytest.raises(DataError, match="begin at sample 5; begin at 0"):
        BlendSchedule([WeightChange(5, {"a": 1.0})], 10)
    with pytest.raises(DataError, match="begin at sample 3 follow weights that begin at sample 3"):
        BlendSchedule(
            [WeightChange(0, {"a": 1}), WeightChange(3, {"a": 1}), WeightChange(3, {"b": 1})], 10
        )
    with pytest.raises(DataError, match="begin at sample 2 follow weights that begin at sample 3"):
        BlendSchedule([WeightChange(n, {"a": 1}) for n in (0, 3, 2)], 10)
    with pytest.raises(DataError, match="a blend without weights"):
        BlendSchedule([], 10)
    with pytest.raises(IndexError, match="sample 10 is out of range; there are 10 samples"):
        BlendSchedule([WeightChange(0, {"a": 1})], 10)[10]
    assert BlendSchedule([WeightChange(0, {"a": 1})], 10)[9] == BlendEntry(0, 9)


@pytest.mark.parametrize(
    ("shares", "bound"),
    [
        ([5], 0.0),
        ([1, 3], 1 / 2),
        ([1, 1, 1], 1 / 2 * 1 / 2 + 1 / 2),  # one source, and a node of two
        ([1, 2, 4], 2 / 3 * 1 / 2 + 1 / 2),  # the second of a node of one third and two thirds
        ([1, 2, 3, 20], 2 / 3 * (1 / 2 * 1 / 2 + 1 / 2) + 1 / 2),
    ],
)
def test_the_bound_of_the_error_by_hand(shares: list[float], bound: float) -> None:
    """Each node adds half a sample to the share of the error of its parent."""
    assert Apportionment(shares).max_error() == pytest.approx(bound)
    with pytest.raises(IndexError, match="sample -1 of a blend; give at least 0"):
        Apportionment(shares)[-1]


def test_a_schedule_may_have_no_sample() -> None:
    empty = BlendSchedule([WeightChange(0, {"a": 1, "b": 2})], 0)
    assert (len(empty), empty.counts(), empty.sources) == (0, [0, 0], ("a", "b"))
    changes = [WeightChange(0, {"a": 1}), WeightChange(5, {"b": 1})]
    assert BlendSchedule(changes, 5).counts() == [5, 0]  # the change comes after the last sample
    assert BlendSchedule(changes, 6).counts() == [5, 1]
    with pytest.raises(DataError, match="num_samples -1 of a blend; give at least 0"):
        BlendSchedule(changes, -1)
    with pytest.raises(IndexError, match="sample -1 is out of range; there are 5 samples"):
        BlendSchedule(changes, 5)[-1]
