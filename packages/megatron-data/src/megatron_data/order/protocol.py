"""What a dataset asks of an order, whichever it is."""

from typing import NamedTuple, Protocol

from megatron_data.errors import DataError


class Span(NamedTuple):
    """A stretch of one sequence: tokens `offset` to `offset + length`; to its end if None."""

    sequence: int
    offset: int
    length: int | None


class BlendEntry(NamedTuple):
    """One sample of a blend: its source, and how many samples of that source come before it."""

    source_index: int
    sample_index: int


class SampleOrder(Protocol):
    """Sample number to the stretches of sequences that make up the sample."""

    @property
    def sample_length(self) -> int:
        """Tokens in a whole sample; the last one may be shorter."""

    def __len__(self) -> int:
        """Returns the number of samples."""

    def spans(self, sample: int) -> list[Span]:
        """Returns the stretches of a sample, in order.

        Raises:
            IndexError: no such sample.
        """


class BlendOrder(Protocol):
    """Sample number of a blend to a source and to the sample's number there."""

    def __len__(self) -> int:
        """Returns the number of samples."""

    def __getitem__(self, sample: int, /) -> BlendEntry:
        """Returns where a sample comes from.

        Raises:
            IndexError: no such sample.
        """

    def counts(self) -> list[int]:
        """Returns how many samples come from each source."""


def check_order_arguments(sequence_length: int, extra: int, num_samples: int | None) -> None:
    """Refuses numbers that no order can be made of.

    Raises:
        DataError: a length below 1, more than one token beyond it, or a negative count.
    """
    if sequence_length < 1:
        raise DataError(f"sequence length {sequence_length}; give at least 1")
    if extra not in (0, 1):
        raise DataError(f"extra {extra}; a sample reads 0 or 1 tokens beyond its length")
    if num_samples is not None and num_samples < 0:
        raise DataError(f"{num_samples} samples; give at least 0, or None for one epoch")
