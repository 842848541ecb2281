"""Megatron's order of conversations: a sample is a row of the file."""

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import EmptySplitError
from megatron_data.order.protocol import Span, check_order_arguments


class RowOrder:
    """A `SampleOrder` whose samples are documents, in their order, over and over.

    A document that is longer than a sample is cut at its end, to one token less than there is room
    for, as Megatron cuts the conversations of a row.

    Args:
        document_bounds: first sequence of every document and the end of the last, int64 `[D + 1]`.
        lengths: tokens of every sequence of the dataset, int32.
        documents: first document of the split, and the one after its last.
        sequence_length: tokens of a sample; the order reads one more, for the last label.
        num_samples: how many samples there are; None for one of every document.

    Attributes:
        truncated: documents of the split that lose their end.

    Raises:
        EmptySplitError: the split has no document.
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
        """Returns the stretches of a sample, in order.

        Raises:
            IndexError: no such sample.
        """
        if not 0 <= sample < self._samples:
            raise IndexError(f"sample {sample} of {self._samples}")
        row = self._first + sample % self._count
        begin, end = self._bounds[row : row + 2].tolist()
        kept = truncated_lengths(self._lengths[begin:end], self.sample_length - 1)
        return [Span(begin + number, 0, length) for number, length in enumerate(kept) if length]


def truncated_lengths(lengths: NDArray[np.integer], sequence_length: int) -> list[int]:
    """Returns how many tokens of each of a row's sequences a sample has room for.

    A row that does not end in a sample loses its end, to one token less than there is room for.

    Args:
        lengths: tokens of the sequences, `[S]`.
        sequence_length: tokens of a sample, which reads one more for the last label.
    """
    ends = np.append(0, np.cumsum(lengths, dtype=np.int64))
    if ends[-1] > sequence_length:
        ends = np.minimum(ends, sequence_length)
    kept: list[int] = np.diff(ends).tolist()
    return kept
