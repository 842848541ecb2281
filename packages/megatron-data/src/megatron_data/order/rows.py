"""Megatron's order of conversations: one row of the file is one sample."""

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import EmptySplitError
from megatron_data.order.protocol import Span, check_order_arguments


class RowOrder:
    """A `SampleOrder` whose samples are documents in the order of the file, repeated.

    A document that is longer than a sample is truncated to `sequence_length` tokens, one less than
    the sample has room for, as in Megatron.

    Args:
        document_bounds: First sequence of every document and the end of the last, int64 `[D + 1]`.
        lengths: Length of every sequence of the dataset in tokens, int32 `[S]`.
        documents: First document of the split, and the index after its last.
        sequence_length: Tokens of a sample. The order reads one more, for the last label.
        num_samples: Number of samples. Defaults to the number of documents.

    Attributes:
        truncated: Number of documents of the split that are truncated.

    Raises:
        EmptySplitError: The split has no document.
    """

    def __init__(
        self,
        document_bounds: NDArray[np.int64],
        lengths: NDArray[np.int32],
        documents: tuple[int, int],
        *,
        sequence_length: int,
        num_samples: int | None = None,
    ) -> None:
        check_order_arguments(sequence_length, 1, num_samples)
        first, last = documents
        if first >= last:
            raise EmptySplitError("the split holds no document")
        self.sample_length = sequence_length + 1
        tokens = np.append(0, np.cumsum(lengths, dtype=np.int64))
        rows = np.diff(tokens[document_bounds[first : last + 1]])
        self.truncated = int(np.count_nonzero(rows > sequence_length))
        self._bounds = document_bounds
        self._lengths = lengths
        self._first, self._count = first, last - first
        self._samples = self._count if num_samples is None else num_samples

    def __len__(self) -> int:
        return self._samples

    def spans(self, sample: int) -> list[Span]:
        """Returns the spans of a sample, in order.

        Raises:
            IndexError: The order has no such sample.
        """
        if not 0 <= sample < self._samples:
            raise IndexError(f"sample {sample} is out of range; there are {self._samples} samples")
        row = self._first + sample % self._count
        begin, end = self._bounds[row : row + 2].tolist()
        truncated = truncated_lengths(self._lengths[begin:end], self.sample_length - 1)
        return [
            Span(begin + number, 0, length) for number, length in enumerate(truncated) if length
        ]


def truncated_lengths(lengths: NDArray[np.integer], sequence_length: int) -> list[int]:
    """Returns the lengths of a row's sequences after truncation to one sample.

    Args:
        lengths: Lengths of the sequences in tokens, `[S]`.
        sequence_length: Largest sum of the returned lengths.
    """
    ends = np.append(0, np.cumsum(lengths, dtype=np.int64))
    truncated: list[int] = np.diff(np.minimum(ends, sequence_length)).tolist()
    return truncated
