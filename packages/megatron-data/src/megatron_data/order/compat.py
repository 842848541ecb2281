"""Megatron's sample order, in vectorised numpy.

Three arrays are built. The document index holds the split's sequences, once per epoch, shuffled
over all epochs together. Laid end to end in that order they form one stream of tokens; sample i
takes `sequence_length + extra` tokens of the stream from token `i * sequence_length` on, and the
sample index says where in the document index that is. The shuffle index permutes the samples.

When the last epoch is needed only in part (less than 80 % of its samples), it is shuffled apart,
so that the earlier epochs are complete.

Source: `megatron/core/datasets/gpt_dataset.py` and `helpers.cpp` of NVIDIA/Megatron-LM, whose
results these arrays equal element by element, dtypes included. `numpy.random.RandomState` is
frozen by numpy's policy, so they stay equal. Differences, where Megatron's result is a defect:
the number of samples with a partial last one is exact (Megatron rounds it through a 32-bit
float), a stream that ends in empty sequences is allowed, and an empty split is refused.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError, EmptySplitError
from megatron_data.order.protocol import Span, check_order_arguments

_SEPARATE_BELOW = 0.80
_BLOCK = 1 << 15  # sequences at a time: their ends stay in the cache of a core


class GPTIndices(NamedTuple):
    """The three arrays.

    Attributes:
        document_index: sequence numbers in stream order, int32 `[epochs * sequences]`.
        sample_index: position in `document_index` and token offset at which each sample begins,
            one more row than samples; int32, or int64 where int32 is too small.
        shuffle_index: sample number to row of `sample_index`, uint32, or int64 from 2^32 - 2 on.
    """

    document_index: NDArray[np.signedinteger]
    sample_index: NDArray[np.signedinteger]
    shuffle_index: NDArray[np.integer]


def build_gpt_indices(
    lengths: NDArray[np.int32],
    sequences: NDArray[np.integer],
    *,
    sequence_length: int,
    seed: int,
    num_samples: int | None = None,
    extra: int = 1,
    drop_last_partial: bool = True,
) -> GPTIndices:
    """Builds the document, sample and shuffle index of one split.

    Args:
        lengths: tokens of every sequence of the dataset, int32.
        sequences: the numbers of the split's sequences.
        sequence_length: tokens a sample advances by.
        seed: of numpy's `RandomState`.
        num_samples: how many samples are wanted; as many epochs are laid out as that needs.
            None for one epoch.
        extra: tokens a sample reads beyond `sequence_length`: 1 for the last label.
        drop_last_partial: leave out the last sample if the stream ends inside it.

    Raises:
        DataError: the split has no token, or too few for one sample.
    """
    check_order_arguments(sequence_length, extra, num_samples)
    epoch_tokens = _tokens(lengths, sequences)
    epochs = epochs_needed(epoch_tokens, sequence_length, num_samples, extra)
    whole_epochs_samples = None
    if epochs > 1 and num_samples is not None:
        whole_epochs_samples = _samples_before_last_epoch(
            epochs, epoch_tokens, num_samples, sequence_length, extra
        )
    random = np.random.RandomState(seed)
    document_index = build_document_index(
        sequences, epochs, random, separate_last=whole_epochs_samples is not None
    )
    sample_index = build_sample_index(
        lengths,
        document_index,
        sequence_length=sequence_length,
        extra=extra,
        drop_last_partial=drop_last_partial,
    )
    total = len(sample_index) - 1
    if total < 1:
        raise DataError(
            f"{epoch_tokens} tokens are too few for one sample of {sequence_length} + {extra}; "
            "shorten the sequence length or widen the split"
        )
    shuffle_index = build_shuffle_index(
        total if whole_epochs_samples is None else whole_epochs_samples, total, random
    )
    return GPTIndices(document_index, sample_index, shuffle_index)


def epochs_needed(
    epoch_tokens: int, sequence_length: int, num_samples: int | None, extra: int = 1
) -> int:
    """Least number of epochs that hold `num_samples` samples, at least 1.

    Raises:
        EmptySplitError: an epoch without tokens.
    """
    if epoch_tokens == 0:
        raise EmptySplitError("the split holds no token")
    wanted = 0 if num_samples is None else num_samples * sequence_length + extra
    return max(1, -(-wanted // epoch_tokens))


def _samples_before_last_epoch(
    epochs: int, epoch_tokens: int, num_samples: int, sequence_length: int, extra: int
) -> int | None:
    """Samples of all epochs but the last if that one is to be shuffled apart, else None."""
    before = ((epochs - 1) * epoch_tokens - extra) // sequence_length
    per_epoch = (epoch_tokens - extra) // sequence_length
    return before if num_samples - before < int(_SEPARATE_BELOW * per_epoch) else None


def build_document_index(
    sequences: NDArray[np.integer],
    epochs: int,
    random: np.random.RandomState,
    *,
    separate_last: bool = False,
) -> NDArray[np.signedinteger]:
    """`epochs` copies of `sequences`, shuffled together; the last copy apart if asked."""
    wide = len(sequences) > 0 and int(sequences[-1]) > np.iinfo(np.int32).max
    index = np.tile(sequences.astype(np.int64 if wide else np.int32, copy=False), epochs)
    apart = len(index) - len(sequences) if separate_last and epochs > 1 else len(index)
    random.shuffle(index[:apart])
    if apart < len(index):
        random.shuffle(index[apart:])
    return index


def build_sample_index(
    lengths: NDArray[np.int32],
    document_index: NDArray[np.signedinteger],
    *,
    sequence_length: int,
    extra: int = 1,
    drop_last_partial: bool = True,
) -> NDArray[np.signedinteger]:
    """Returns where in the stream each sample begins, `[samples + 1, 2]`.

    Row i is the position in `document_index` of the sequence that holds the last of the first
    `i * sequence_length + extra` tokens of the stream, and the place in that sequence after
    them, less `extra`.
    """
    largest = max(len(document_index), int(lengths.max(initial=0)))
    dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    last = None if drop_last_partial else _tokens(lengths, document_index)
    pieces = [np.zeros((1, 2), dtype)]
    done, before = 1, 0
    for first in range(0, len(document_index), _BLOCK):
        block = lengths.take(document_index[first : first + _BLOCK])
        ends = block.astype(np.int64)
        ends[0] += before
        np.cumsum(ends, out=ends)
        before = int(ends[-1])
        reached = (ends - extra) // sequence_length  # samples up to each end
        if done == 1:
            np.maximum(reached, 0, out=reached)  # before the first `extra` tokens
        positions = np.flatnonzero(reached[1:] > reached[:-1]) + 1
        positions = np.repeat(positions, reached[positions] - reached[positions - 1])
        if reached[0] >= done:
            positions = np.append(np.zeros(reached[0] - done + 1, np.int64), positions)
        consumed = np.arange(done, done + len(positions), dtype=np.int64)
        consumed *= sequence_length
        consumed += extra
        done += len(positions)
        if before == last:
            if (last - extra) % sequence_length and last > extra:
                positions = np.append(positions, np.searchsorted(ends, last))
                consumed = np.append(consumed, last)
            last = None  # only empty sequences follow
        if len(consumed):
            rows = np.empty((len(consumed), 2), dtype)
            np.add(positions, first, out=rows[:, 0], casting="unsafe")
            begins = ends[positions] - block[positions]
            np.subtract(consumed - extra, begins, out=rows[:, 1], casting="unsafe")
            pieces.append(rows)
    return np.concatenate(pieces)


def _tokens(lengths: NDArray[np.int32], sequences: NDArray[np.integer]) -> int:
    """Tokens of sequences, without an array of all their lengths."""
    starts = range(0, len(sequences), _BLOCK)
    return sum(
        int(lengths.take(sequences[start : start + _BLOCK]).sum(dtype=np.int64)) for start in starts
    )


def build_shuffle_index(
    first: int, total: int, random: np.random.RandomState
) -> NDArray[np.integer]:
    """Permutation of `total` samples; the first `first` and the others stay apart."""
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    index: NDArray[np.integer] = np.arange(total, dtype=dtype)
    random.shuffle(index[:first])
    if first < total:
        random.shuffle(index[first:])
    return index


class CompatOrder:
    """A `SampleOrder` over Megatron's three arrays.

    Args:
        indices: the arrays, in memory or mapped.
        sequence_length: as they were built.
        extra: as they were built.
    """

    def __init__(self, indices: GPTIndices, sequence_length: int, extra: int = 1) -> None:
        self.indices = indices
        self.sequence_length = sequence_length
        self.extra = extra

    @property
    def sample_length(self) -> int:
        """Tokens in a whole sample."""
        return self.sequence_length + self.extra

    def __len__(self) -> int:
        return len(self.indices.shuffle_index)

    def spans(self, sample: int) -> list[Span]:
        """Returns the stretches of a sample, in order.

        Raises:
            IndexError: no such sample.
        """
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        row = int(self.indices.shuffle_index[sample])
        (first, begin), (last, end) = self.indices.sample_index[row : row + 2].tolist()
        end += self.extra
        documents = self.indices.document_index[first : last + 1].tolist()
        if first == last:
            return [Span(documents[0], begin, end - begin)]
        return [
            Span(documents[0], begin, None),
            *(Span(document, 0, None) for document in documents[1:-1]),
            Span(documents[-1], 0, end),
        ]
