"""Packs whole documents into samples by best-fit-decreasing bin packing.

If documents are concatenated and cut, a fifth of the documents of a web corpus end up in two
samples. Packing splits only documents that are longer than a sample: into full samples and a
remainder, which is packed with the other documents. The rest of each sample is padding.

Best-fit-decreasing takes the lengths from the longest to the shortest and puts each into the
fullest sample that has room for it. Its progress depends only on the number of samples with each
amount of free space. All documents of one length are therefore placed together, into whole ranges
of samples with equal free space. This takes a few thousand steps for any number of documents.

Source: Ding et al., "Fewer Truncations Improve Language Modeling" (ICML 2024).
"""

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError, EmptySplitError
from megatron_data.lru_cache import LRUCache
from megatron_data.order.permutation import Permutation, hash_integers
from megatron_data.order.protocol import Span, check_order_arguments

_MAX_CAPACITY = 1 << 16
_CACHED_EPOCHS = 4


class PackingReport(NamedTuple):
    """Statistics of a packing.

    Attributes:
        num_samples: Number of samples.
        num_documents: Number of packed documents. Empty documents are not packed.
        split_documents: Documents in more than one sample, which are all longer than a sample.
        padding_tokens: Padding tokens of all samples.
        padding_fraction: `padding_tokens` divided by the tokens of all samples.
    """

    num_samples: int
    num_documents: int
    split_documents: int
    padding_tokens: int
    padding_fraction: float


class Packing:
    """Assigns documents to samples of a given capacity.

    Args:
        lengths: Length of every document in tokens, `[D]`. Empty documents are omitted.
        capacity: Tokens of a sample, 1 to 65,536.

    Attributes:
        full: Number of samples that hold a single span of a long document. They come first.

    Raises:
        EmptySplitError: No document has a token.
        DataError: `capacity` is out of range.
    """

    def __init__(self, lengths: NDArray[np.integer], capacity: int) -> None:
        if not 1 <= capacity <= _MAX_CAPACITY:
            raise DataError(
                f"sample length {capacity}; packing supports 1 to {_MAX_CAPACITY:,} tokens"
            )
        self.capacity = capacity
        (self._long,) = np.nonzero(lengths >= capacity)
        self._full_ends = np.cumsum(lengths[self._long] // capacity, dtype=np.int64)
        remainders = (lengths % capacity).astype(np.uint16)
        self._tokens = int(lengths.sum(dtype=np.int64))
        if not self._tokens:
            raise EmptySplitError("the split holds no token")
        self._documents = int(np.count_nonzero(lengths))
        self._num_split = int(np.count_nonzero(lengths[self._long] > capacity))
        self._remainders = remainders
        self._packed, self._starts = _pack(remainders, capacity)
        self.full: int = self._full_ends.item(-1) if len(self._full_ends) else 0

    def __len__(self) -> int:
        """Returns the number of samples."""
        return self.full + len(self._starts) - 1

    def spans(self, number: int, first: int = 0) -> list[Span]:
        """Returns the spans of documents in a sample.

        Args:
            number: Index of the sample.
            first: Offset that is added to the indices of the documents. Defaults to 0.

        Raises:
            IndexError: The packing has no such sample.
        """
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} is out of range; there are {len(self)} samples")
        if number < self.full:
            index = int(self._full_ends.searchsorted(number, "right"))
            before = self._full_ends.item(index - 1) if index else 0
            offset = (number - before) * self.capacity
            return [Span(first + self._long.item(index), offset, self.capacity)]
        begin, end = self._starts[number - self.full : number - self.full + 2].tolist()
        documents = self._packed[begin:end]
        indices = self._long.searchsorted(documents).tolist()
        remainders = self._remainders[documents].tolist()
        return [
            Span(first + document, self._tokens_in_full_samples(index, document), remainder)
            for document, index, remainder in zip(
                documents.tolist(), indices, remainders, strict=True
            )
        ]

    def _tokens_in_full_samples(self, index: int, document: int) -> int:
        """Returns the tokens of a document in full samples: 0 unless `_long[index]` is it."""
        if index == len(self._long) or self._long.item(index) != document:
            return 0
        before: int = self._full_ends.item(index - 1) if index else 0
        return (self._full_ends.item(index) - before) * self.capacity

    def report(self) -> PackingReport:
        """Returns the statistics of the packing."""
        room = len(self) * self.capacity
        padding = room - self._tokens
        return PackingReport(len(self), self._documents, self._num_split, padding, padding / room)


def _pack(
    remainders: NDArray[np.uint16], capacity: int
) -> tuple[NDArray[np.signedinteger], NDArray[np.int64]]:
    """Returns the documents ordered by sample, and the index at which each sample begins."""
    counts = np.bincount(remainders, minlength=capacity)
    counts[0] = 0
    bins: NDArray[np.signedinteger] = np.empty(
        int(counts.sum()), np.int32 if len(remainders) < 1 << 31 else np.int64
    )
    done = used = 0
    free = _FreeSpace()
    for length in range(capacity - 1, 0, -1):
        remaining = int(counts[length])
        while remaining:
            room, first, last = free.tightest(length) or (capacity, used, used + remaining)
            per_sample = min(room // length, remaining)
            num_bins = min(last - first, remaining // per_sample)
            if room == capacity:
                used = first + num_bins
            else:
                free.restore(room, first + num_bins, last)
            for _ in range(per_sample):
                bins[done : done + num_bins] = np.arange(first, first + num_bins, dtype=bins.dtype)
                done += num_bins
            remaining -= per_sample * num_bins
            free.add(room - per_sample * length, first, first + num_bins)
    by_length = _sorted_descending(remainders, counts)
    order = _argsort(bins, used)
    starts = np.zeros(used + 1, np.int64)
    np.cumsum(np.bincount(bins, minlength=used), out=starts[1:])
    del bins
    return by_length[order], starts


class _FreeSpace:
    """Ranges of samples, by the free space of their samples."""

    def __init__(self) -> None:
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        self._present: list[int] = []

    def tightest(self, length: int) -> tuple[int, int, int] | None:
        """Removes a range with the least free space that fits `length`.

        Returns:
            Free space, first sample and end of the range, or None if no sample has room.
        """
        index = bisect_left(self._present, length)
        if index == len(self._present):
            return None
        room = self._present[index]
        first, last = self._ranges[room].pop()
        if not self._ranges[room]:
            del self._ranges[room], self._present[index]
        return room, first, last

    def restore(self, room: int, first: int, last: int) -> None:
        """Adds the unused rest of a range again."""
        if first < last:
            self.add(room, first, last)

    def add(self, room: int, first: int, last: int) -> None:
        """Adds a range of samples. Samples without free space are ignored."""
        if not room:
            return
        if room not in self._ranges:
            self._ranges[room] = []
            insort(self._present, room)
        self._ranges[room].append((first, last))


def _sorted_descending(
    remainders: NDArray[np.uint16], counts: NDArray[np.integer]
) -> NDArray[np.signedinteger]:
    """Returns the documents with a remainder by decreasing length, in a stable order."""
    order = _radix(np.uint16(0) - remainders)  # 0 stays first and is omitted
    return order[len(remainders) - int(counts.sum()) :]


def _argsort(bins: NDArray[np.signedinteger], used: int) -> NDArray[np.signedinteger]:
    """Returns a stable argsort of numbers below `used`, 16 bits per pass."""
    order = _radix((bins & 0xFFFF).astype(np.uint16))
    for shift in range(16, used.bit_length(), 16):
        order = order[_radix(((bins >> shift) & 0xFFFF).astype(np.uint16)[order])]
    return order


def _radix(digits: NDArray[np.uint16]) -> NDArray[np.signedinteger]:
    """Returns a stable argsort in the narrowest dtype. numpy sorts 16-bit numbers by radix."""
    order = np.argsort(digits, kind="stable")
    return order.astype(np.int32) if len(order) < 1 << 31 else order


class PackedOrder:
    """A `SampleOrder` of packed documents, permuted differently in each epoch.

    Only documents that are longer than a sample are split. Reset attention and positions at
    document ends, and mask the padding. The packing is the same in all epochs.

    Args:
        lengths: Length of every sequence of the dataset in tokens, int32 `[S]`.
        sequences: First sequence of the split, and the index after its last.
        sequence_length: Tokens of a sample without `extra`.
        seed: Seed of the permutations.
        num_samples: Number of samples. Defaults to the samples of one epoch.
        extra: Tokens that a sample reads beyond `sequence_length`: 1 for the last label.
            Defaults to 1.

    Raises:
        EmptySplitError: The split has no token.
        DataError: `sequence_length`, `num_samples` or `extra` is out of range.
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
        check_order_arguments(sequence_length, extra, num_samples)
        self.sample_length = sequence_length + extra
        self.packing = Packing(lengths[slice(*sequences)], self.sample_length)
        self.seed = seed
        self._first = sequences[0]
        self._samples = len(self.packing) if num_samples is None else num_samples
        self._permutations: LRUCache[Permutation] = LRUCache(_CACHED_EPOCHS)

    def __len__(self) -> int:
        return self._samples

    def spans(self, sample: int) -> list[Span]:
        """Returns the spans of a sample, in order.

        Raises:
            IndexError: The order has no such sample.
        """
        if not 0 <= sample < self._samples:
            raise IndexError(f"sample {sample} is out of range; there are {self._samples} samples")
        epoch, number = divmod(sample, len(self.packing))
        permutation = self._permutations.get(epoch, lambda: self._permute(epoch))
        return self.packing.spans(permutation[number], self._first)

    def _permute(self, epoch: int) -> Permutation:
        return Permutation(len(self.packing), hash_integers(self.seed, epoch))
