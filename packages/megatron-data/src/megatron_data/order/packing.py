"""Whole documents in samples: best-fit-decreasing bin packing of any number of lengths.

Laid end to end and cut, a fifth of the documents of a web corpus end up in two samples. Packed,
only those are cut that are longer than a sample: into full samples and a rest, which is packed with
the others. The rest of every sample is padding.

Best-fit-decreasing takes the lengths from the longest to the shortest and puts each into the
fullest sample with room for it. How it goes on depends on nothing but how many samples there are
of each fill, so all documents of one length are placed at once, a whole range of samples with the
same room at a time: some thousand steps, whatever the number of documents.

Source: Ding et al., "Fewer Truncations Improve Language Modeling" (ICML 2024).
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, EmptySplitError
from .permutation import Permutation, mixed
from .spans import Span, check_order

_MOST_CAPACITY = 1 << 16


class PackingReport(NamedTuple):
    """What a packing cost.

    Attributes:
        samples: how many there are.
        documents: how many are in them; empty ones are not.
        cut: documents that are in more than one sample, all longer than a sample.
        padding: tokens of all samples that hold nothing.
        share: `padding` of all tokens.
    """

    samples: int
    documents: int
    cut: int
    padding: int
    share: float


class Packing:
    """Documents in samples of bounded length.

    Args:
        lengths: tokens of every document, `[D]`; empty ones take no room and are left out.
        capacity: tokens of a sample, up to 65,536.

    Raises:
        EmptySplitError: no document has a token.
        DataError: a capacity that is too small or too large.
    """

    def __init__(self, lengths: NDArray[np.integer], capacity: int) -> None:
        if not 1 <= capacity <= _MOST_CAPACITY:
            raise DataError(f"samples of {capacity} tokens; give 1 to {_MOST_CAPACITY:,}")
        self.capacity = capacity
        (self._long,) = np.nonzero(lengths >= capacity)
        self._full_ends = np.cumsum(lengths[self._long] // capacity, dtype=np.int64)
        rests = (lengths % capacity).astype(np.uint16)
        self._tokens = int(lengths.sum(dtype=np.int64))
        if not self._tokens:
            raise EmptySplitError("the split holds no token")
        self._documents = int(np.count_nonzero(lengths))
        self._cut = int(np.count_nonzero(lengths[self._long] > capacity))
        self._rests = rests
        self._packed, self._starts = _pack(rests, capacity)

    @property
    def full(self) -> int:
        """Samples that are one stretch of a long document; they come first."""
        return int(self._full_ends[-1]) if len(self._full_ends) else 0

    def __len__(self) -> int:
        """Number of samples."""
        return self.full + len(self._starts) - 1

    def spans(self, number: int) -> list[Span]:
        """The stretches of documents in a sample.

        Raises:
            IndexError: no such sample.
        """
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        if number < self.full:
            place = int(np.searchsorted(self._full_ends, number, "right"))
            before = int(self._full_ends[place - 1]) if place else 0
            offset = (number - before) * self.capacity
            return [Span(int(self._long[place]), offset, self.capacity)]
        first, last = self._starts[number - self.full : number - self.full + 2].tolist()
        return [self._rest_of(document) for document in self._packed[first:last].tolist()]

    def _rest_of(self, document: int) -> Span:
        """What is left of a document after its full samples."""
        place = int(np.searchsorted(self._long, document))
        whole = 0
        if place < len(self._long) and self._long[place] == document:
            whole = int(self._full_ends[place])
            whole -= int(self._full_ends[place - 1]) if place else 0
        return Span(document, whole * self.capacity, int(self._rests[document]))

    def report(self) -> PackingReport:
        """Return what the packing cost."""
        room = len(self) * self.capacity
        padding = room - self._tokens
        return PackingReport(len(self), self._documents, self._cut, padding, padding / room)


def _pack(
    rests: NDArray[np.uint16], capacity: int
) -> tuple[NDArray[np.signedinteger], NDArray[np.int64]]:
    """Documents in the order of the samples that hold them, and where each sample begins."""
    counts = np.bincount(rests, minlength=capacity)
    counts[0] = 0
    bins: NDArray[np.signedinteger] = np.empty(
        int(counts.sum()), np.int32 if len(rests) < 1 << 31 else np.int64
    )
    done = used = 0
    rooms = _Rooms()
    for length in range(capacity - 1, 0, -1):
        left = int(counts[length])
        while left:
            room, first, last = rooms.tightest(length) or (capacity, used, used + left)
            each = min(room // length, left)
            taken = min(last - first, left // each)
            if room == capacity:
                used = first + taken
            else:
                rooms.give_back(room, first + taken, last)
            for _ in range(each):
                bins[done : done + taken] = np.arange(first, first + taken, dtype=bins.dtype)
                done += taken
            left -= each * taken
            rooms.add(room - each * length, first, first + taken)
    by_length = _sorted_descending(rests, counts)
    order = _argsort(bins, used)
    starts = np.zeros(used + 1, np.int64)
    np.cumsum(np.bincount(bins, minlength=used), out=starts[1:])
    del bins
    return by_length[order], starts


class _Rooms:
    """Ranges of samples by the room that is left in them."""

    def __init__(self) -> None:
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        self._present: list[int] = []

    def tightest(self, length: int) -> tuple[int, int, int] | None:
        """Take a range of the samples with the least room for a length: room, first and end."""
        place = bisect_left(self._present, length)
        if place == len(self._present):
            return None
        room = self._present[place]
        first, last = self._ranges[room].pop()
        if not self._ranges[room]:
            del self._ranges[room], self._present[place]
        return room, first, last

    def give_back(self, room: int, first: int, last: int) -> None:
        """Return what was not used of a range."""
        if first < last:
            self.add(room, first, last)

    def add(self, room: int, first: int, last: int) -> None:
        """Remember a range; samples without room need not be."""
        if not room:
            return
        if room not in self._ranges:
            self._ranges[room] = []
            insort(self._present, room)
        self._ranges[room].append((first, last))


def _sorted_descending(
    rests: NDArray[np.uint16], counts: NDArray[np.integer]
) -> NDArray[np.signedinteger]:
    """Documents with a rest from the longest to the shortest, equal ones in their order."""
    order = _radix(np.uint16(0) - rests)  # 0 stays first, and is left out
    return order[len(rests) - int(counts.sum()) :]


def _argsort(bins: NDArray[np.signedinteger], used: int) -> NDArray[np.signedinteger]:
    """A stable argsort of numbers below `used`, 16 bits at a time."""
    order = _radix((bins & 0xFFFF).astype(np.uint16))
    for shift in range(16, max(used - 1, 1).bit_length(), 16):
        order = order[_radix(((bins >> shift) & 0xFFFF).astype(np.uint16)[order])]
    return order


def _radix(digits: NDArray[np.uint16]) -> NDArray[np.signedinteger]:
    """A stable argsort: numpy sorts 16 bits by radix. As narrow as it can be, for memory."""
    order = np.argsort(digits, kind="stable")
    return order.astype(np.int32) if len(order) < 1 << 31 else order


class PackedOrder:
    """A `SampleOrder` of packed documents, in an order drawn anew for every epoch.

    Nothing is cut but documents longer than a sample; use it with attention and positions reset at
    document ends, and with padding masked. The packing is the same in all epochs.

    Args:
        lengths: tokens of every sequence of the dataset, int32 `[S]`.
        sequences: first sequence of the split, and the one after its last.
        sequence_length: tokens of a sample, without `extra`.
        seed: of the order.
        num_samples: how many samples there are; None for one epoch.
        extra: tokens a sample reads beyond `sequence_length`: 1 for the last label.

    Raises:
        EmptySplitError: the split has no token.
        DataError: numbers that no order can be made of.
    """

    def __init__(
        self,
        lengths: NDArray[np.int32],
        sequences: tuple[int, int],
        *,
        sequence_length: int,
        seed: int,
        num_samples: int | None = None,
        extra: int = 1,
    ) -> None:
        check_order(sequence_length, extra, num_samples)
        self.sample_length = sequence_length + extra
        self.packing = Packing(lengths[slice(*sequences)], self.sample_length)
        self.seed = seed
        self._first = sequences[0]
        self._samples = len(self.packing) if num_samples is None else num_samples

    def __len__(self) -> int:
        return self._samples

    def spans(self, sample: int) -> list[Span]:
        """The stretches of a sample, in order.

        Raises:
            IndexError: no such sample.
        """
        if not 0 <= sample < self._samples:
            raise IndexError(f"sample {sample} of {self._samples}")
        epoch, number = divmod(sample, len(self.packing))
        permutation = Permutation(len(self.packing), mixed(self.seed, epoch))
        return list(self._moved(permutation[number]))

    def _moved(self, number: int) -> Iterator[Span]:
        for span in self.packing.spans(number):
            yield span._replace(sequence=self._first + span.sequence)
