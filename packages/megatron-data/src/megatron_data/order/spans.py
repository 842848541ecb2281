"""What a dataset asks of an order, whichever it is."""

from typing import NamedTuple, Protocol


class Span(NamedTuple):
    """A stretch of one sequence: tokens `offset` to `offset + length`; to its end if None."""

    sequence: int
    offset: int
    length: int | None


class SampleOrder(Protocol):
    """Sample number to the stretches of sequences that make up the sample."""

    @property
    def sample_length(self) -> int:
        """Tokens in a whole sample; the last one may be shorter."""

    def __len__(self) -> int:
        """Number of samples."""

    def spans(self, sample: int) -> list[Span]:
        """The stretches of a sample, in order.

        Raises:
            IndexError: no such sample.
        """
