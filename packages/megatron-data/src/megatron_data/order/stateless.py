"""A sample order that depends only on the seed and the index of the sample.

Each epoch concatenates the sequences in a new order. Blocks of `BLOCK` consecutive sequences, whose
bounds shift with each epoch, are permuted, and so are the sequences within each block. All epochs
together form an endless stream of tokens. Row i takes `sequence_length + extra` tokens of the
stream, starting at token `i * sequence_length`. The samples of an epoch are the rows that begin in
it, permuted.

No array over all sequences or samples is built or stored: a block is computed when a sample needs
it. A longer run begins with the samples of a shorter one. Each epoch contains each sequence once.

In contrast to Megatron's order, the sequences of a sample come from one block, or from two blocks
if the sample crosses their boundary.
"""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError, EmptySplitError
from megatron_data.lru_cache import LRUCache
from megatron_data.order.permutation import Permutation, hash_integers, shuffled
from megatron_data.order.protocol import Span, check_order_arguments

BLOCK = 4096
"""Number of consecutive sequences that are permuted together."""


class SequenceTable(Protocol):
    """Sequence lengths of a dataset: an `IndexedDataset` or an `InMemorySequenceTable`."""

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Length of every sequence in tokens, int32 `[S]`. Samples read slices of it."""

    def tokens_before(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the tokens of all sequences before each of `sequences`, which are 0 to S."""


class InMemorySequenceTable:
    """A `SequenceTable` in memory, for sources without cumulative lengths.

    Args:
        sequence_lengths: Length of every sequence in tokens, int32 `[S]`.
    """

    def __init__(self, sequence_lengths: NDArray[np.int32]) -> None:
        self.sequence_lengths = sequence_lengths
        self._ends = np.concatenate([[0], np.cumsum(sequence_lengths, dtype=np.int64)])

    def tokens_before(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the tokens of all sequences before each of `sequences`, which are 0 to S."""
        return self._ends[sequences]


_CACHED_EPOCHS = 4
_CACHED_BLOCKS = 512
_BEGIN, _BLOCKS, _WITHIN, _SAMPLES = range(4)  # purposes of hash keys


class _Epoch(NamedTuple):
    """Blocks of one epoch.

    Attributes:
        bounds: First sequence of every block in the order of the file, and the end of the last.
        order: Indices of the blocks in the order of the stream.
        ends: Cumulative tokens at the end of each block of `order`.
    """

    bounds: NDArray[np.int64]
    order: NDArray[np.int64]
    ends: NDArray[np.int64]


class _Block(NamedTuple):
    """Sequences of one block in the order of the stream, and their cumulative tokens."""

    sequences: NDArray[np.int64]
    ends: NDArray[np.int64]

    def take(self, position: int, num_tokens: int, spans: list[Span]) -> int:
        """Appends spans of up to `num_tokens` tokens from `position` on to `spans`.

        Returns:
            The number of tokens appended.
        """
        index = int(self.ends.searchsorted(position, "right"))
        begin = self.ends.item(index - 1) if index else 0
        until = min(position + num_tokens, self.ends.item(-1))
        count = until - position
        while position < until:
            end = self.ends.item(index)
            stop = min(end, until)
            if stop > position:
                spans.append(Span(self.sequences.item(index), position - begin, stop - position))
            begin = position = end
            index += 1
        return count


class StatelessOrder:
    """A `SampleOrder` that computes each sample from its index.

    Args:
        table: Lengths of the sequences of the dataset.
        sequences: First sequence of the split, and the index after its last.
        sequence_length: Stride between samples in tokens.
        seed: Seed of all permutations.
        num_samples: Number of samples, over as many epochs as they need. Defaults to one epoch,
            whose last sample does not continue into the next epoch.
        extra: Tokens that a sample reads beyond `sequence_length`: 1 for the last label.
            Defaults to 1.
        drop_last_partial: If `num_samples` is None, omits the last sample if the epoch ends inside
            it. Defaults to True.

    Raises:
        EmptySplitError: The split has no token.
        DataError: `sequence_length`, `num_samples` or `extra` is out of range, or one epoch is too
            short for one sample.
    """

    def __init__(
        self,
        table: SequenceTable,
        sequences: tuple[int, int],
        *,
        sequence_length: int,
        seed: int,
        num_samples: int | None = None,
        extra: int = 1,
        drop_last_partial: bool = True,
    ) -> None:
        check_order_arguments(sequence_length, extra, num_samples)
        self.sequence_length = sequence_length
        self.extra = extra
        self.seed = seed
        self._table = table
        self._first, self._last = sequences
        begin, end = table.tokens_before(np.array(sequences, np.int64)).tolist()
        self.epoch_tokens: int = end - begin
        if self.epoch_tokens == 0:
            raise EmptySplitError("the split holds no token")
        self._closed = num_samples is None
        if num_samples is None:
            num_samples, rest = divmod(self.epoch_tokens - extra, sequence_length)
            num_samples += bool(rest) and not drop_last_partial
            if num_samples < 1:
                raise DataError(
                    f"{self.epoch_tokens} tokens are too few for one sample of {sequence_length} + "
                    f"{extra}; shorten the sequence length or widen the split"
                )
        self._samples = int(num_samples)
        self._epochs: LRUCache[_Epoch] = LRUCache(_CACHED_EPOCHS)
        self._blocks: LRUCache[_Block] = LRUCache(_CACHED_BLOCKS)
        self._permutations: LRUCache[Permutation] = LRUCache(_CACHED_EPOCHS)

    @property
    def sample_length(self) -> int:
        """Number of tokens in a full sample."""
        return self.sequence_length + self.extra

    def __len__(self) -> int:
        return self._samples

    def epoch_of(self, sample: int) -> int:
        """Returns the epoch in which a sample begins, from 0."""
        return 0 if self._closed else sample * self.sequence_length // self.epoch_tokens

    def spans(self, sample: int) -> list[Span]:
        """Returns the spans of a sample, in order.

        Raises:
            IndexError: The order has no such sample.
        """
        if not 0 <= sample < self._samples:
            raise IndexError(f"sample {sample} is out of range; there are {self._samples} samples")
        epoch = self.epoch_of(sample)
        first = self._first_sample(epoch)
        row = first + self._permutation(epoch)[sample - first]
        return self._spans_at(row * self.sequence_length, self.sample_length)

    def _spans_at(self, position: int, num_tokens: int) -> list[Span]:
        """Returns spans of `num_tokens` tokens of the stream from `position` on.

        There are fewer tokens if the stream is a single epoch that ends before.
        """
        spans: list[Span] = []
        epoch, position = divmod(position, self.epoch_tokens)
        while num_tokens:
            blocks = self._epoch(epoch)
            number = int(blocks.ends.searchsorted(position, "right"))
            if number:
                position -= blocks.ends.item(number - 1)
            while num_tokens and number < len(blocks.order):
                block = self._block(epoch, blocks.order.item(number))
                num_tokens -= block.take(position, num_tokens, spans)
                position = 0
                number += 1
            if self._closed:
                break
            epoch += 1
        return spans

    def _first_sample(self, epoch: int) -> int:
        """Returns the first row that begins in an epoch, which is also its first sample."""
        return -(-epoch * self.epoch_tokens // self.sequence_length)

    def _permutation(self, epoch: int) -> Permutation:
        return self._permutations.get(epoch, lambda: self._compute_permutation(epoch))

    def _compute_permutation(self, epoch: int) -> Permutation:
        count = self._samples
        if not self._closed:
            count = self._first_sample(epoch + 1) - self._first_sample(epoch)
        return Permutation(count, hash_integers(self.seed, _SAMPLES, epoch))

    def _epoch(self, epoch: int) -> _Epoch:
        return self._epochs.get(epoch, lambda: self._compute_epoch(epoch))

    def _compute_epoch(self, epoch: int) -> _Epoch:
        begin = self._first + (hash_integers(self.seed, _BEGIN, epoch) % BLOCK or BLOCK)
        inner = np.arange(begin, self._last, BLOCK, dtype=np.int64)
        bounds = np.concatenate([[self._first], inner, [self._last]])
        tokens = np.diff(self._table.tokens_before(bounds))
        order = shuffled(len(tokens), hash_integers(self.seed, _BLOCKS, epoch))
        return _Epoch(bounds, order, np.cumsum(tokens[order]))

    def _block(self, epoch: int, block: int) -> _Block:
        return self._blocks.get((epoch, block), lambda: self._compute_block(epoch, block))

    def _compute_block(self, epoch: int, block: int) -> _Block:
        first, last = self._epoch(epoch).bounds[block : block + 2].tolist()
        order = shuffled(last - first, hash_integers(self.seed, _WITHIN, epoch, block))
        lengths = self._table.sequence_lengths[first:last][order]
        return _Block(first + order, np.cumsum(lengths, dtype=np.int64))
