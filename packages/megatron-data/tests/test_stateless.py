"""The stateless order: a function of seed and sample index."""

import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_data import (
    DataError,
    EmptySplitError,
    IndexedDataset,
    build_gpt_datasets,
    build_sft_datasets,
)
from megatron_data.order import InMemorySequenceTable, Permutation, StatelessOrder, stateless
from megatron_data.order.permutation import _ENOUGH, _NEIGHBOURS, MAX_STORED, shuffled

Write = Callable[..., str]

lengths = st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any)


def order_of(
    sizes: Sequence[int], samples: int | None, length: int = 8, **options
) -> StatelessOrder:
    table = InMemorySequenceTable(np.array(sizes, np.int32))
    options = {"sequences": (0, len(sizes)), "seed": 1} | options
    return StatelessOrder(table, sequence_length=length, num_samples=samples, **options)


def taken(
    order: StatelessOrder, samples: Sequence[int], extra: int = 1
) -> Counter[tuple[int, int]]:
    """Returns how often each (sequence, token) is an input of the samples."""
    counts: Counter[tuple[int, int]] = Counter()
    for sample in samples:
        tokens = [
            (span.sequence, span.offset + i)
            for span in order.spans(sample)
            for i in range(span.length or 0)
        ]
        counts.update(tokens[: len(tokens) - extra])
    return counts


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 4096, 4097, 5000, 1 << 16, 100_003])
def test_a_permutation_is_one_to_one(count: int) -> None:
    permutation = Permutation(count, 77)
    places = permutation.all()
    assert np.array_equal(np.sort(places), np.arange(count))
    for number in {0, count // 3, count - 1} - {-1} if count else ():
        assert permutation[number] == places[number]
    assert [permutation[number] for number in range(min(count, 600))] == places[:600].tolist()
    last = range(max(count - 300, 0), count)
    assert [permutation[number] for number in last] == places[last.start :].tolist()
    for number in (-1, count):
        with pytest.raises(IndexError, match=f"number {number} is out of range; the permutation "):
            permutation[number]


def test_numbers_have_the_same_images_in_any_order_of_look_ups() -> None:
    """Consecutive numbers are far apart, so that each image is computed alone."""
    permutation = Permutation(4100, 77)
    numbers = [step * 1031 % 4100 for step in range(4100)]
    assert [permutation[number] for number in numbers] == permutation.all()[numbers].tolist()


def test_images_of_neighbours_are_computed_together_after_single_look_ups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone: list[int] = []
    walk = Permutation._walk
    monkeypatch.setattr(
        Permutation, "_walk", lambda self, number: alone.append(number) or walk(self, number)
    )
    network = Permutation(5000, 77)
    first = [network[number] for number in range(_NEIGHBOURS)]
    assert alone == list(range(_ENOUGH))
    assert first == network.all()[:_NEIGHBOURS].tolist()
    again = [network[number] for number in (_NEIGHBOURS, 0, 1)]  # neighbourhoods begin anew
    assert again[1:] == first[:2]
    assert alone[_ENOUGH:] == [_NEIGHBOURS, 0, 1]


@pytest.mark.parametrize("count", [1000, MAX_STORED + 1000], ids=["sorted", "network"])
def test_permutations_of_different_keys_look_independent(count: int) -> None:
    """Tests images for uniformity (chi-squared) and neighbours for correlation, over many keys."""
    places = np.stack([Permutation(count, key * 7919).all() for key in range(200)])
    boxes = np.stack([np.bincount(row * 10 // count, minlength=10) for row in places[:, :100]])
    expected = boxes.sum() / 10
    assert ((boxes.sum(0) - expected) ** 2 / expected).sum() < 27.9  # 9 degrees, p = 0.001
    correlation = np.corrcoef(places[:, :-1].ravel(), places[:, 1:].ravel())[0, 1]
    assert abs(correlation) < 4 / np.sqrt(places.size)


def test_all_permutations_of_few_elements_are_equally_likely() -> None:
    seen = Counter(tuple(shuffled(4, key).tolist()) for key in range(24_000))
    assert len(seen) == 24
    assert sum((count - 1000) ** 2 / 1000 for count in seen.values()) < 49.7  # 23, p = 0.001


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(1, 50), st.integers(1, 4), st.sampled_from([1, 3, 4096]))
def test_every_token_occurs_once_in_every_epoch(
    sizes: list[int], length: int, epochs: int, block: int
) -> None:
    """Rows are consecutive, so that n epochs of rows contain every token n times."""
    tokens = sum(sizes)
    rows = epochs * tokens  # so that a row ends where an epoch ends
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stateless, "BLOCK", block)
        order = order_of(sizes, rows, length)
        counts = taken(order, range(rows))
    assert set(counts.values()) == {epochs * length}
    assert len(counts) == tokens


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(1, 50), st.integers(0, 3), st.integers(0, 1))
def test_a_split_without_a_number_of_samples_is_one_epoch(
    sizes: list[int], length: int, spare: int, extra: int
) -> None:
    if sum(sizes) < length + extra:
        with pytest.raises(DataError, match="too few for one sample"):
            order_of(sizes, None, length, extra=extra)
        return
    order = order_of(sizes, None, length, extra=extra)
    assert len(order) == (sum(sizes) - extra) // length
    counts = taken(order, range(len(order)), extra)
    assert set(counts.values()) == {1}
    assert sum(counts.values()) == len(order) * length
    whole = order_of(sizes, None, length, extra=extra, drop_last_partial=False)
    assert sum(taken(whole, range(len(whole)), extra).values()) == sum(sizes) - extra


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(1, 20), st.integers(1, 50), st.integers(0, 200))
def test_a_longer_run_begins_with_the_samples_of_a_shorter_one(
    sizes: list[int], length: int, samples: int, more: int
) -> None:
    short, long = (order_of(sizes, count, length) for count in (samples, samples + more))
    for sample in range(samples):
        assert short.spans(sample) == long.spans(sample)


def test_order_differs_between_epochs_and_seeds_but_not_between_calls() -> None:
    order = order_of([10] * 100, 250, 8)
    assert [order.epoch_of(sample) for sample in (0, 124, 125, 249)] == [0, 0, 1, 1]
    first = [order.spans(sample) for sample in range(125)]
    assert first != [order.spans(sample) for sample in range(125, 250)]
    assert first != [order_of([10] * 100, 250, 8, seed=2).spans(sample) for sample in range(125)]
    fresh = order_of([10] * 100, 250, 8)
    assert [fresh.spans(sample) for sample in reversed(range(125))] == first[::-1]
    again = pickle.loads(pickle.dumps(order))
    assert again.spans(3) == order.spans(3)


def test_block_bounds_differ_between_epochs() -> None:
    """Sequences of one block of an epoch are in different blocks in other epochs."""
    order = order_of([1] * 3 * stateless.BLOCK, 10, 1, extra=0)
    assert len({int(order._epoch(epoch).bounds[1]) for epoch in range(10)}) > 5


@pytest.mark.parametrize("length", [1, 5])
def test_an_indexed_dataset_as_table_gives_the_same_samples(
    write_dataset: Write, length: int
) -> None:
    prefix = write_dataset([range(n % 7) for n in range(50)])
    with IndexedDataset(prefix) as dataset:
        options = {"sequence_length": length, "seed": 3, "num_samples": 100}
        ours = StatelessOrder(dataset, (5, 45), **options)
        counted = StatelessOrder(
            InMemorySequenceTable(dataset.sequence_lengths), (5, 45), **options
        )
        assert all(ours.spans(i) == counted.spans(i) for i in range(100))
        bounds = np.arange(51)
        ends = np.concatenate([[0], np.cumsum(dataset.sequence_lengths)])
        assert np.array_equal(dataset.tokens_before(bounds), ends)


def test_a_deleted_order_is_freed_at_once() -> None:
    """An order keeps mapped files open, so it must not be part of a reference cycle."""
    order = order_of([10] * 100, 250)
    order.spans(7)
    held = weakref.ref(order)
    del order
    assert held() is None


def test_only_lengths_that_a_sample_needs_are_read() -> None:
    class Watched:
        """A table of a billion sequences that records which lengths are read."""

        asked = 0

        @property
        def sequence_lengths(self):
            return np.broadcast_to(np.int32(1000), (10**9,))

        def tokens_before(self, sequences):
            self.asked += len(sequences)
            return sequences * 1000

    table = Watched()
    order = StatelessOrder(
        table, (0, 10**9), sequence_length=4096, seed=0, num_samples=10**11, extra=1
    )
    assert table.asked == 2
    assert sum(span.length or 0 for span in order.spans(123_456_789_012 % 10**11)) == 4097
    assert table.asked < 3 * 10**9 // stateless.BLOCK


def test_an_unknown_order_is_refused() -> None:
    wrong: Any = "packd"
    wanted = "order='packd'; give one of stateless, packed, compat"
    with pytest.raises(DataError, match=wanted):
        build_gpt_datasets("nothing", order=wrong)
    with pytest.raises(DataError, match=wanted):
        build_sft_datasets("nothing", order=wrong)


def test_refusals() -> None:
    with pytest.raises(EmptySplitError, match="holds no token"):
        order_of([0, 0], 5)
    with pytest.raises(DataError, match="sequence length 0"):
        order_of([3], 5, 0)
    with pytest.raises(IndexError, match="sample 5 is out of range; there are 5 samples"):
        order_of([9], 5).spans(5)
    with pytest.raises(IndexError, match="sample -1 is out of range; there are 5 samples"):
        order_of([9], 5).spans(-1)
    with pytest.raises(DataError, match="too few for one sample of 8 \\+ 1"):
        order_of([8], None)
    assert len(order_of([9], None)) == 1
    largest = Permutation(1 << 62, 1)
    assert 0 <= largest[(1 << 62) - 1] < len(largest) == 1 << 62
    for count in (-1, (1 << 62) + 1):
        with pytest.raises(DataError, match=rf"count {count} of a permutation; give 0 to 2\^62"):
            Permutation(count, 1)


def test_a_run_resumes_after_its_data_changed(write_dataset: Write) -> None:
    first, second, third = (
        write_dataset([[number] * 9 for _ in range(40)], name)
        for number, name in ((1, "a"), (2, "b"), (3, "c"))
    )
    before = build_gpt_datasets(["3", first, "1", second], "100", (400, 0, 0), 16).train
    changed = build_gpt_datasets(
        ["3", first, "1", second],
        "100",
        (400, 0, 0),
        16,
        data_path_changes=[(100, ["1", second, "1", third])],
    ).train
    assert before is not None
    assert changed is not None
    for sample in range(100):
        assert np.array_equal(before[sample]["tokens"], changed[sample]["tokens"])
    after = Counter(int(changed[sample]["tokens"][0]) for sample in range(100, 400))
    assert after == {2: 150, 3: 150}
    with pytest.raises(DataError, match='does not work with the order "compat"'):
        build_gpt_datasets(
            first, "100", (10, 0, 0), 16, order="compat", data_path_changes=[(1, second)]
        )
    with pytest.raises(DataError, match="from sample 1 on has no training data"):
        build_gpt_datasets(first, "100", (10, 0, 0), 16, data_path_changes=[(1, {"valid": second})])
