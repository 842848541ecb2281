"""The two Mersenne twisters of the C++ standard library, which Megatron's sentence maps use.

Source: Matsumoto and Nishimura, "Mersenne Twister" (1998), and Nishimura, "Tables of 64-bit
Mersenne Twisters" (2000), with the constants of `std::mt19937` and `std::mt19937_64`.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_WORDS, _MIDDLE = 312, 156
_SEED_FACTOR = 6364136223846793005
_HIGH, _LOW = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
_TWIST = np.uint64(0xB5026F5AA96619E9)
_ONE = np.uint64(1)
_MASK = (1 << 64) - 1
_BLOCK = 1 << 14


def mt19937(seed: int) -> Iterator[NDArray[np.uint32]]:
    """Yields the numbers of `std::mt19937` in blocks, uint32 `[16384]`, without end."""
    generator = np.random.RandomState(seed & 0xFFFFFFFF)
    while True:
        yield generator.randint(0, 1 << 32, _BLOCK, np.uint32)


def mt19937_64(seed: int, count: int) -> NDArray[np.uint64]:
    """Returns the first `count` numbers of `std::mt19937_64`, uint64 `[count]`."""
    state = _seeded(seed)
    rounds = -(-count // _WORDS)
    numbers = np.empty((rounds, _WORDS), np.uint64)
    for row in range(rounds):
        _advance(state)
        numbers[row] = state
    return _tempered(numbers.reshape(-1)[:count])


def _seeded(seed: int) -> NDArray[np.uint64]:
    words = [seed & _MASK]
    for number in range(1, _WORDS):
        last = words[-1]
        words.append((_SEED_FACTOR * (last ^ (last >> 62)) + number) & _MASK)
    return np.array(words, np.uint64)


def _advance(state: NDArray[np.uint64]) -> None:
    """Replaces all words in three steps, because later words depend on new values."""
    ends = _WORDS - 1
    state[:_MIDDLE] = state[_MIDDLE:] ^ _twisted(state[:_MIDDLE], state[1 : _MIDDLE + 1])
    state[_MIDDLE:ends] = state[: ends - _MIDDLE] ^ _twisted(
        state[_MIDDLE:ends], state[_MIDDLE + 1 :]
    )
    state[ends:] = state[ends - _MIDDLE : _MIDDLE] ^ _twisted(state[ends:], state[:1])


def _twisted(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> NDArray[np.uint64]:
    word = (high & _HIGH) | (low & _LOW)
    return (word >> _ONE) ^ (_TWIST * (word & _ONE))


def _tempered(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = words ^ ((words >> np.uint64(29)) & np.uint64(0x5555555555555555))
    words = words ^ ((words << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000))
    words = words ^ ((words << np.uint64(37)) & np.uint64(0xFFF7EEE000000000))
    return words ^ (words >> np.uint64(43))
