"""Megatron's sample order, in vectorised numpy.

The order consists of three arrays. The *document index* holds the sequences of the split once per
epoch, shuffled over all epochs together. Concatenated in that order, they form a stream of tokens.
Sample i takes `sequence_length + extra` tokens of the stream, starting at token
`i * sequence_length`. The *sample index* holds the position of each sample in the document index.
The *shuffle index* permutes the samples.

If less than 80 % of the samples of the last epoch are used, the last epoch is shuffled separately,
so that the earlier epochs are complete.

Source: `megatron/core/datasets/gpt_dataset.py` and `helpers.cpp` of NVIDIA/Megatron-LM. The arrays
are equal element by element, including dtypes. They stay equal because numpy's policy freezes
`numpy.random.RandomState`. The results differ where Megatron's are a defect: the number of samples
that includes a partial last one is exact (Megatron rounds it through a 32-bit float), a stream may
end in empty sequences, and an empty split is refused.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError, EmptySplitError
from megatron_data.order.protocol import Span, check_order_arguments

_SEPARATE_BELOW = 0.80
_BLOCK = 1 << 15  # sequences per step, so that their ends fit into the cache of a core


class GPTIndices(NamedTuple):
    """Megatron's document, sample and shuffle index.

    Attributes:
        document_index: Indices of sequences in stream order, int32 `[epochs * sequences]`.
        sample_index: Index into `document_index` and token offset at which each sample begins,
            `[samples + 1, 2]`, int32, or int64 where int32 is too small.
        shuffle_index: Row of `sample_index` for each sample, uint32 `[samples]`, or int64 from
            2^32 - 2 samples on.
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
        lengths: Length of every sequence of the dataset in tokens, int32 `[S]`.
        sequences: Indices of the sequences of the split.
        sequence_length: Stride between samples in tokens.
        seed: Seed of numpy's `RandomState`.
        num_samples: Number of samples. The stream has as many epochs as they need. Defaults to
            the samples of one epoch.
        extra: Tokens that a sample reads beyond `sequence_length`: 1 for the last label.
            Defaults to 1.
        drop_last_partial: Omits the last sample if the stream ends inside it. Defaults to True.

    Raises:
        EmptySplitError: The split has no token.
        DataError: The split has too few tokens for one sample.
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
    """Returns the smallest number of epochs that holds `num_samples` samples, at least 1.

    Raises:
        EmptySplitError: An epoch has no token.
    """
    if epoch_tokens == 0:
        raise EmptySplitError("the split holds no token")
    if num_samples is None:
        return 1
    return max(1, -(-(num_samples * sequence_length + extra) // epoch_tokens))


def _samples_before_last_epoch(
    epochs: int, epoch_tokens: int, num_samples: int, sequence_length: int, extra: int
) -> int | None:
    """Returns the samples before the last epoch if it is shuffled separately, else None."""
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
    """Returns `epochs` copies of `sequences`, shuffled together.

    With `separate_last` the last copy is shuffled separately.
    """
    wide = len(sequences) > 0 and int(sequences[-1]) > np.iinfo(np.int32).max
    index = np.tile(sequences.astype(np.int64 if wide else np.int32, copy=False), epochs)
    split_at = len(index) - len(sequences) if separate_last else len(index)
    random.shuffle(index[:split_at])
    random.shuffle(index[split_at:])  # an empty part takes no draw
    return index


def build_sample_index(
    lengths: NDArray[np.int32],
    document_index: NDArray[np.signedinteger],
    *,
    sequence_length: int,
    extra: int = 1,
    drop_last_partial: bool = True,
) -> NDArray[np.signedinteger]:
    """Returns the position of each sample in the stream, `[samples + 1, 2]`.

    Let the first `i * sequence_length + extra` tokens of the stream end in a sequence. Row i holds
    the index of that sequence in `document_index`, and the offset in it behind these tokens, minus
    `extra`.
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
        reached = (ends - extra) // sequence_length  # samples that end at or before each end
        if done == 1:
            np.maximum(reached, 0, out=reached)  # the quotient is negative before `extra` tokens
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
    """Returns the number of tokens of sequences, without an array of all lengths."""
    starts = range(0, len(sequences), _BLOCK)
    return sum(
        int(lengths.take(sequences[start : start + _BLOCK]).sum(dtype=np.int64)) for start in starts
    )


def build_shuffle_index(
    first: int, total: int, random: np.random.RandomState
) -> NDArray[np.integer]:
    """Returns a permutation of `total` samples that shuffles the first `first` separately."""
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    index: NDArray[np.integer] = np.arange(total, dtype=dtype)
    random.shuffle(index[:first])
    random.shuffle(index[first:])
    return index


class CompatOrder:
    """A `SampleOrder` that reads Megatron's document, sample and shuffle index.

    Args:
        indices: The arrays, in memory or memory-mapped.
        sequence_length: `sequence_length` with which they were built.
        extra: `extra` with which they were built. Defaults to 1.
    """

    def __init__(self, indices: GPTIndices, sequence_length: int, extra: int = 1) -> None:
        self.indices = indices
        self.sequence_length = sequence_length
        self.extra = extra

    @property
    def sample_length(self) -> int:
        """Number of tokens in a full sample."""
        return self.sequence_length + self.extra

    def __len__(self) -> int:
        return len(self.indices.shuffle_index)

    def spans(self, sample: int) -> list[Span]:
        """Returns the spans of a sample, in order.

        Raises:
            IndexError: The order has no such sample.
        """
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} is out of range; there are {len(self)} samples")
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
