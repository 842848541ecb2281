"""Samples of sentences and of rows by hand; target lengths with draws of numpy's twister."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
from megatron_data import DataError, EmptySplitError
from megatron_data.order.rows import RowOrder
from megatron_data.order.sentences import _shuffled, _targets, block_map, sentence_map


@pytest.mark.parametrize(("probability", "every"), [(0.0, 0), (1.0, 1), (0.1, 10), (0.4, 3)])
def test_one_target_in_so_many_is_shorter(probability: float, every: int) -> None:
    """Of one draw in `round(1 / probability)` a shorter length follows, as in Megatron."""
    bits = np.random.MT19937()
    bits._legacy_seeding(7)
    draws = bits.random_raw(20_000).tolist()
    expected = [2 + draw % 127 if every and draw % every == 0 else 128 for draw in draws]
    assert list(islice(_targets(7, 128, probability), 20_000)) == expected


def bounds(*ends: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    return np.array([0, *ends], np.int64)


def test_a_sentence_has_at_most_512_tokens_unless_it_is_a_whole_document() -> None:
    """As in Megatron, whose BERT and T5 check only documents of several sentences."""

    def rows(*lengths: int, least: int = 1) -> list[list[int]]:
        table = np.array(lengths, np.int32)
        found = sentence_map(
            bounds(len(lengths)), table, max_length=1000, short_probability=0, seed=1,
            min_sentences=least,
        )  # fmt: skip
        return found.tolist()

    assert rows(5, 512, 5) == [[0, 3, 1000]]
    assert rows(600) == [[0, 1, 1000]]
    for lengths, least in (((5, 513, 5), 1), ((5,), 2)):
        with pytest.raises(EmptySplitError, match=f"none of 1 documents has at least {least} sent"):
            rows(*lengths, least=least)
    titles = np.zeros(1, np.int32)
    for one in (False, True):
        with pytest.raises(EmptySplitError, match=r"none of them longer than 512 tokens"):
            block_map(bounds(1), np.array([513], np.int32), titles, max_length=9, seed=1,
                      use_one_sentence_blocks=one)  # fmt: skip


@pytest.mark.parametrize(
    ("one", "samples", "blocks"),
    [
        (False, None, [[0, 3, 0, 0], [3, 5, 1, 1], [5, 7, 1, 2]]),
        (True, None, [[0, 2, 0, 0], [2, 3, 0, 1], [3, 4, 1, 2], [4, 5, 1, 3], [5, 7, 1, 4]]),
        (False, 4, [[0, 3, 0, 0], [3, 5, 1, 1], [5, 7, 1, 2]] * 2),
        (False, 3, [[0, 3, 0, 0], [3, 5, 1, 1], [5, 7, 1, 2]]),
    ],
)
def test_blocks_by_hand(one: bool, samples: int | None, blocks: list[list[int]]) -> None:
    """With its title of 2 a block of the first document has 13 tokens, if enough sentences follow.

    The title of the second document has 7 of the 13. Blocks are numbered in each epoch.
    """
    lengths = np.array([5, 6, 7, 6, 6, 1, 1], np.int32)
    found = block_map(
        bounds(3, 7), lengths, np.array([2, 7], np.int32), max_length=13, seed=1,
        num_samples=samples, use_one_sentence_blocks=one,
    )  # fmt: skip
    assert sorted(found.tolist()) == sorted(blocks)


def test_rows_of_conversations_by_hand() -> None:
    lengths, ends = np.array([3, 4, 2, 6, 1], np.int32), bounds(2, 3, 5)
    order = RowOrder(ends, lengths, (0, 3), sequence_length=6, num_samples=5)
    assert (len(order), order.truncated, order.sample_length) == (5, 2, 7)
    assert order.spans(0) == order.spans(3) == [(0, 0, 3), (1, 0, 3)]
    assert order.spans(1) == order.spans(4) == [(2, 0, 2)]
    assert order.spans(2) == [(3, 0, 6)]
    whole = RowOrder(ends, lengths, (1, 3), sequence_length=7)
    assert (len(whole), whole.truncated) == (2, 0)
    assert [whole.spans(number) for number in range(2)] == [[(2, 0, 2)], [(3, 0, 6), (4, 0, 1)]]
    for sample in (-1, 2):
        with pytest.raises(IndexError, match=f"sample {sample} is out of range; there are 2"):
            whole.spans(sample)
    with pytest.raises(EmptySplitError, match="the split holds no document"):
        RowOrder(ends, lengths, (1, 1), sequence_length=7)
    for wrong, message in (
        ({"sequence_length": 0}, "sequence length 0; give at least 1"),
        ({"sequence_length": 7, "num_samples": -1}, "num_samples -1; give at least 0"),
    ):
        with pytest.raises(DataError, match=message):
            RowOrder(ends, lengths, (0, 3), **wrong)
    assert len(RowOrder(ends, lengths, (0, 3), sequence_length=1, num_samples=0)) == 0


def test_two_sentences_must_follow_a_sample_that_ends_before_its_document() -> None:
    def rows(count: int) -> list[list[int]]:
        lengths = np.full(count, 5, np.int32)
        found = sentence_map(bounds(count), lengths, max_length=10, short_probability=0, seed=1)
        return sorted(found.tolist())

    assert rows(1) == [[0, 1, 10]]  # a sample of one sentence, by default
    assert rows(3) == [[0, 3, 10]]
    assert rows(4) == [[0, 2, 10], [2, 4, 10]]
    assert rows(5) == [[0, 2, 10], [2, 5, 10]]


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("samples", [None, 1, 60, 61, 400])
def test_samples_and_targets_equal_those_of_the_loop_of_megatron(
    least: int, samples: int | None
) -> None:
    """Steps through the sentences one by one, like `build_mapping` of Megatron's `helpers.cpp`."""
    random = np.random.default_rng(least)
    lengths = random.integers(1, 12, 200).astype(np.int32)
    ends = np.unique([0, *random.integers(1, 200, 40), 200])
    bits = np.random.MT19937()
    bits._legacy_seeding(9)
    draws = iter(bits.random_raw(20_000).tolist())

    def target() -> int:
        draw = next(draws)
        return int(2 + draw % 29 if draw % 2 == 0 else 30)

    rows: list[list[int]] = []
    while not rows or (samples is not None and len(rows) < samples):
        for first, last in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            if last - first < least:
                continue
            begin, wanted, tokens = first, target(), 0
            for sentence in range(first, last):
                tokens += int(lengths[sentence])
                left, held = last - sentence - 1, sentence + 1 - begin
                if left == 0 or (tokens >= wanted and left > 1 and held >= least):
                    rows.append([begin, sentence + 1, wanted])
                    begin, wanted, tokens = sentence + 1, target(), 0
    found = sentence_map(
        ends, lengths, max_length=30, short_probability=0.5, seed=9, num_samples=samples,
        min_sentences=least,
    )  # fmt: skip
    assert sorted(found.tolist()) == sorted(rows)


@pytest.mark.parametrize(("sentences", "dtype"), [(2**32 - 1, np.uint32), (2**32, np.uint64)])
def test_rows_have_64_bits_only_if_sentences_need_them(sentences: int, dtype: type) -> None:
    rows = _shuffled([0, 1, 2], 3, 1, sentences)
    assert rows.dtype == dtype and rows.tolist() == [[0, 1, 2]]
