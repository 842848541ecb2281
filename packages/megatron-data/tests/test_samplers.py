import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_data import DataError, SequentialSampler, ShuffledSampler
from megatron_data.order.permutation import Permutation, hash_integers


def steps(total: int, consumed: int, micro: int, ranks: int) -> list[list[int]]:
    """Returns the samples of each step, with all ranks in order."""
    own = [list(SequentialSampler(total, consumed, micro, rank, ranks)) for rank in range(ranks)]
    return [[i for part in step for i in part] for step in zip(*own, strict=True)]


@settings(max_examples=200, deadline=None)
@given(
    total=st.integers(1, 300),
    micro=st.integers(1, 7),
    ranks=st.integers(1, 5),
    data=st.data(),
)
def test_every_sample_exactly_once_in_order(
    total: int, micro: int, ranks: int, data: st.DataObject
) -> None:
    consumed = data.draw(st.integers(0, total))
    taken = [i for step in steps(total, consumed, micro, ranks) for i in step]
    whole = (total - consumed) // (micro * ranks) * (micro * ranks)
    assert taken == list(range(consumed, consumed + whole))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_run_resumed_with_other_layouts_skips_and_repeats_no_sample(data: st.DataObject) -> None:
    total, consumed, taken = 600, 0, []
    for _ in range(data.draw(st.integers(1, 5))):
        micro, ranks = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
        samplers = [SequentialSampler(total, consumed, micro, rank, ranks) for rank in range(ranks)]
        parts = [iter(sampler) for sampler in samplers]
        for _ in range(data.draw(st.integers(0, 6))):
            step = [i for part in parts for i in next(part, [])]
            taken += step
        states = [sampler.state_dict() for sampler in samplers]
        assert all(state == states[0] for state in states)
        assert len(json.dumps(states[0])) < 100
        consumed = states[0]["consumed_samples"]
    assert taken == list(range(consumed))


def test_megatrons_example() -> None:
    """Rank r of 2 takes [2r, 2r + 2) of every 4 samples; the last 3 of 11 are dropped."""
    assert list(SequentialSampler(11, 0, 2, 0, 2)) == [[0, 1], [4, 5]]
    assert list(SequentialSampler(11, 0, 2, 1, 2)) == [[2, 3], [6, 7]]
    assert len(SequentialSampler(11, 4, 2, 1, 2)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 1, 0, 1), "0 samples"),
        ((10, -1, 1, 0, 1), "-1 consumed"),
        ((10, 11, 1, 0, 1), "11 samples are consumed, but the dataset has 10"),
        ((10, 0, 0, 0, 1), "micro-batch size 0"),
        ((10, 0, 1, 2, 2), "rank 2 of 2"),
        ((10, 0, 1, -1, 2), "rank -1 of 2"),
    ],
)
def test_invalid_numbers_are_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        SequentialSampler(*arguments)


def test_a_sampler_has_one_rank_one_epoch_and_the_seed_1234_by_default() -> None:
    assert list(SequentialSampler(5, 0, 2)) == [[0, 1], [2, 3]]
    assert list(SequentialSampler(1, 0, 1)) == [[0]]
    assert len(SequentialSampler(10, 10, 1)) == 0  # a finished run
    order = Permutation(5, hash_integers(1234, 0))
    assert list(ShuffledSampler(5, 0, 5)) == [[order[number] for number in range(5)]]
    assert len(ShuffledSampler(5, 0, 2)) == 2
    other = Permutation(5, hash_integers(1234, 1))
    # The last sample of an epoch and the first of the next are one step of two ranks.
    two = [list(ShuffledSampler(5, 4, 1, rank, 2, epochs=2)) for rank in range(2)]
    assert two[0][0] == [order[4]] and two[1][0] == [other[0]]
