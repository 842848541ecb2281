"""Permutations that are computed from a key and a count instead of being stored.

Bits are mixed by the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014). All arithmetic is on integers modulo 2^64, so that every machine
and every version of numpy gives the same order.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError

MAX_STORED = 4096
"""Largest count whose permutation is stored as an array. Larger ones are computed by element."""

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_ROUNDS = 6  # even, so that both halves have their initial width at the end
_NEIGHBOURS = 1024  # numbers that are computed together,
_ENOUGH = 64  # after this many single look-ups, which take about as long as all 1024 at once


def hash_integers(*words: int) -> int:
    """Returns a 64-bit hash of integers. Bits above 128 of an integer are ignored."""
    state = len(words)
    for word in words:
        low, high = word & _MASK, (word >> 64) & _MASK
        state = _finish((state + _STEP & _MASK) ^ low)
        state = _finish((state + _STEP & _MASK) ^ high)
    return state


def shuffled(count: int, key: int) -> NDArray[np.int64]:
    """Returns the numbers below `count` in an order that depends on `key`, int64 `[count]`.

    The numbers are sorted by pseudorandom bits. The lowest bits are replaced by the number itself:
    this resolves ties, and values are sorted instead of indices, which is several times faster.
    """
    width = (count - 1).bit_length()
    numbers = np.arange(count, dtype=np.uint64)
    draws = _finish_all(numbers * np.uint64(_STEP) + np.uint64(key))
    own = np.uint64((1 << width) - 1)
    draws = np.sort(draws & ~own | numbers)
    return (draws & own).astype(np.int64)


class Permutation:
    """A permutation of the numbers below `count`.

    Up to `MAX_STORED` numbers the permutation is the array of `shuffled`. Beyond that it is a
    Feistel network of six rounds on as many bits as `count` needs, applied until the result is
    below `count` (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). Its
    memory does not depend on `count`.

    Args:
        count: Number of elements, at most 2^62.
        key: 64-bit key; see `hash_integers`.

    Raises:
        DataError: `count` is negative or above 2^62.
    """

    def __init__(self, count: int, key: int) -> None:
        if not 0 <= count <= 1 << 62:
            raise DataError(f"count {count} of a permutation; give 0 to 2^62")
        self.count = count
        self.key = key
        bits = (count - 1).bit_length()
        self._right = bits - bits // 2
        self._left = bits // 2
        self._keys = tuple(hash_integers(key, number) for number in range(_ROUNDS))
        # The neighbourhood of the last number, its look-ups so far, and its images once there were
        # enough of them. They are one tuple, so that threads see a consistent state.
        self._last: tuple[int, int, list[int]] = (-1, 0, [])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> int:
        """Returns the image of a number.

        Raises:
            IndexError: `number` is not in `[0, count)`.
        """
        if not 0 <= number < self.count:
            raise IndexError(
                f"number {number} is out of range; the permutation has {self.count} elements"
            )
        if self.count <= MAX_STORED:
            return int(_written_out(self.count, self.key)[number])
        neighbourhood, offset = divmod(number, _NEIGHBOURS)
        last, lookups, images = self._last
        if neighbourhood != last:
            lookups, images = 0, []
        elif images:
            return images[offset]
        if lookups == _ENOUGH:
            first = number - offset
            numbers = np.arange(first, min(first + _NEIGHBOURS, self.count), dtype=np.uint64)
            images = self._walk_all(numbers).tolist()
        self._last = neighbourhood, lookups + 1, images
        return images[offset] if images else self._walk(number)

    def _walk(self, number: int) -> int:
        number = self._once(number)
        while number >= self.count:
            number = self._once(number)
        return number

    def _once(self, number: int) -> int:
        """Applies the network once, a permutation of all numbers with that many bits."""
        right_bits, left_bits = self._right, self._left
        left_mask, right_mask = (1 << left_bits) - 1, (1 << right_bits) - 1
        left, right = number >> right_bits, number & right_mask
        for key in self._keys:
            bits = right + key & _MASK  # inlined `_finish`, because this runs for every sample
            bits = (bits ^ (bits >> 30)) * _FIRST & _MASK
            bits = (bits ^ (bits >> 27)) * _SECOND & _MASK
            left, right = right, left ^ ((bits ^ (bits >> 31)) & left_mask)
            left_mask, right_mask = right_mask, left_mask
        return left << right_bits | right

    def all(self) -> NDArray[np.int64]:
        """Returns the images of all numbers, int64 `[count]`."""
        if self.count <= MAX_STORED:
            return _written_out(self.count, self.key).copy()
        return self._walk_all(np.arange(self.count, dtype=np.uint64))

    def _walk_all(self, numbers: NDArray[np.uint64]) -> NDArray[np.int64]:
        images = self._once_all(numbers)
        out_of_range = np.flatnonzero(images >= self.count)
        while len(out_of_range):
            images[out_of_range] = self._once_all(images[out_of_range])
            out_of_range = out_of_range[images[out_of_range] >= self.count]
        return images.astype(np.int64)

    def _once_all(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bits = (np.uint64(self._left), np.uint64(self._right))
        masks = [np.uint64((1 << int(width)) - 1) for width in bits]
        left, right = numbers >> bits[1], numbers & masks[1]
        for number, key in enumerate(self._keys):
            left = left ^ (_finish_all(right + np.uint64(key)) & masks[number % 2])
            left, right = right, left
        return left << bits[1] | right


@lru_cache(maxsize=64)
def _written_out(count: int, key: int) -> NDArray[np.int64]:
    order = shuffled(count, key)
    order.flags.writeable = False
    return order


def _finish(bits: int) -> int:
    bits = (bits ^ (bits >> 30)) * _FIRST & _MASK
    bits = (bits ^ (bits >> 27)) * _SECOND & _MASK
    return bits ^ (bits >> 31)


def _finish_all(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_FIRST)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_SECOND)
    return bits ^ (bits >> np.uint64(31))
