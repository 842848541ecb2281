"""The order of samples against a second implementation and recorded values.

A changed order would silently change every resumed run. If a test fails, give the new order another
name instead of updating the values.
"""

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from megatron_data import SequentialSampler, ShuffledSampler
from megatron_data.order import (
    BlendSchedule,
    InMemorySequenceTable,
    PackedOrder,
    Permutation,
    StatelessOrder,
    WeightChange,
)
from megatron_data.order.permutation import hash_integers, shuffled

WORD = 2**64


def finish(bits: int) -> int:
    """Applies the finaliser of SplitMix64 with the constants of the paper."""
    bits = (bits ^ bits >> 30) * 13787848793156543929 % WORD
    bits = (bits ^ bits >> 27) * 10723151780598845931 % WORD
    return bits ^ bits >> 31


def key_of(*words: int) -> int:
    state = len(words)
    for word in words:
        for half in (word % WORD, (word >> 64) % WORD):
            state = finish((state + 11400714819323198485) % WORD ^ half)
    return state


def sorted_by_draws(count: int, key: int) -> list[int]:
    """Returns the numbers sorted by pseudorandom high bits, with the number as low bits."""
    width = max(count - 1, 1).bit_length()
    draws = [finish((n * 11400714819323198485 + key) % WORD) >> width for n in range(count)]
    return sorted(range(count), key=lambda number: (draws[number], number))


def permuted(number: int, count: int, key: int) -> int:
    """Applies a Feistel network of six rounds until the number is below the count."""
    if count <= 4096:
        return sorted_by_draws(count, key)[number]
    bits = (count - 1).bit_length()
    widths = (bits // 2, bits - bits // 2)
    while True:
        left, right = divmod(number, 2 ** widths[1])
        for turn in range(6):
            drawn = finish((right + key_of(key, turn)) % WORD) % 2 ** widths[turn % 2]
            left, right = right, left ^ drawn
        number = left * 2 ** widths[1] + right
        if number < count:
            return number


def laid_out(first: int, last: int, seed: int, epoch: int) -> Iterator[int]:
    """Yields the sequences of an epoch in the order of the stream."""
    begin = first + (key_of(seed, 0, epoch) % 4096 or 4096)
    bounds = [first, *range(begin, last, 4096), last]
    for block in sorted_by_draws(len(bounds) - 1, key_of(seed, 1, epoch)):
        start, count = bounds[block], bounds[block + 1] - bounds[block]
        for place in sorted_by_draws(count, key_of(seed, 2, epoch, block)):
            yield start + place


def stretches_of(
    sample: int, lengths: list[int], first: int, last: int, seed: int, length: int, extra: int = 1
) -> list[tuple[int, int, int]]:
    """Returns the (sequence, offset, length) spans of a sample of an endless run."""
    tokens = sum(lengths[first:last])
    epoch = sample * length // tokens
    row, following = (-(-number * tokens // length) for number in (epoch, epoch + 1))
    row += permuted(sample - row, following - row, key_of(seed, 3, epoch))
    epoch, position = divmod(row * length, tokens)
    found, wanted = [], length + extra
    while wanted:
        for sequence in laid_out(first, last, seed, epoch):
            taken = min(max(lengths[sequence] - position, 0), wanted)
            if taken:
                found.append((sequence, position, taken))
            position = max(position - lengths[sequence], 0)
            wanted -= taken
        epoch += 1
    return found


@pytest.mark.parametrize("count", [1, 2, 7, 4096, 4097, 100_003, 3 * 10**9, 1 << 40])
def test_permutations_equal_the_second_implementation(count: int) -> None:
    key = key_of(5, count)
    assert hash_integers(5, count) == key
    permutation = Permutation(count, key)
    for number in {0, count // 2, count - 1}:
        assert permutation[number] == permuted(number, count, key)


@pytest.mark.parametrize(("first", "last", "length"), [(0, 9000, 64), (37, 8000, 5), (3, 50, 999)])
def test_samples_equal_the_second_implementation(first: int, last: int, length: int) -> None:
    lengths = np.random.default_rng(0).integers(0, 30, 9000).astype(np.int32)
    order = StatelessOrder(
        InMemorySequenceTable(lengths),
        (first, last),
        sequence_length=length,
        seed=11,
        num_samples=10**6,
    )
    for sample in (0, 1, 777, 54_321):
        wanted = stretches_of(sample, lengths.tolist(), first, last, 11, length)
        assert [tuple(span) for span in order.spans(sample)] == wanted


def test_recorded_values() -> None:
    assert hash_integers(1, 2, 3) == 5858941973532095891
    assert hash_integers(-1, 1 << 80) == 1474740317014155925
    assert shuffled(10, 77).tolist() == [0, 4, 1, 9, 6, 8, 2, 3, 5, 7]
    network = Permutation(10_000, 77)
    assert [network[number] for number in range(6)] == [3721, 800, 4933, 9801, 1226, 8580]
    sampler = ShuffledSampler(10, 8, 2, 1, 2, epochs=3, seed=7)
    assert list(sampler) == [[7, 4], [9, 0], [8, 5], [4, 3], [6, 2]]


def digest(samples: Iterable[Iterable[tuple[int | None, ...]]]) -> str:
    """Returns the SHA-256 of integers as text, which does not depend on the version of numpy."""
    numbers = [[[int(part or 0) for part in one] for one in sample] for sample in samples]
    return hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]


def test_recorded_orders() -> None:
    """Compares digests of whole orders: stateless, packed, and the sources of a blend."""
    lengths = (np.arange(9000) * 7919 % 41).astype(np.int32)
    table = InMemorySequenceTable(lengths)
    options = {"sequence_length": 64, "seed": 1234, "num_samples": 4000}
    whole = StatelessOrder(table, (0, 9000), **options)
    assert digest(whole.spans(i) for i in range(4000)) == "75bcc1f8572c4138"
    packed = PackedOrder(lengths, (0, 9000), **options)
    assert digest(packed.spans(i) for i in range(4000)) == "bd81a6e66a6b1b31"
    changes = [WeightChange(0, {"a": 0.5, "b": 0.3, "c": 0.2}), WeightChange(500, {"c": 1, "d": 2})]
    blend = BlendSchedule(changes, 1000)
    assert digest([[blend[i] for i in range(1000)]]) == "742bbc33aeb3c034"


@pytest.mark.parametrize("consumed", [2**31 - 4, 2**31, 2**32, 2**40])
def test_samplers_work_beyond_32_bits(consumed: int) -> None:
    total = consumed + 14
    for rank in (0, 1):
        first = consumed + 2 * rank
        wanted = [[first, first + 1], [first + 4, first + 5], [first + 8, first + 9]]
        sampler = SequentialSampler(total, consumed, 2, rank, 2)
        assert list(sampler) == wanted
        assert sampler.state_dict() == {"consumed_samples": consumed + 12}
        size = 3 * 10**9
        epochs = -(-total // size)
        shuffling = ShuffledSampler(size, consumed, 2, rank, 2, epochs=epochs, seed=7)
        for sequential in wanted:
            places = [divmod(number, size) for number in sequential]
            expected = [permuted(place, size, key_of(7, epoch)) for epoch, place in places]
            assert next(iter(shuffling)) == expected
