"""Interfaces between datasets and orders."""

from typing import NamedTuple, Protocol

from megatron_data.errors import DataError


class Span(NamedTuple):
    """Tokens `offset` to `offset + length` of one sequence.

    Attributes:
        sequence: Index of the sequence in the dataset.
        offset: First token of the span in the sequence.
        length: Number of tokens. None extends the span to the end of the sequence.
    """

    sequence: int
    offset: int
    length: int | None


class BlendEntry(NamedTuple):
    """The dataset and the sample that a sample of a blend refers to.

    Attributes:
        source_index: Index of the dataset in the blend.
        sample_index: Index of the sample in that dataset, which is the number of samples that the
            blend takes from the dataset before this one.
    """

    source_index: int
    sample_index: int


class SampleOrder(Protocol):
    """Maps a sample index to the spans of sequences that form the sample."""

    @property
    def sample_length(self) -> int:
        """Number of tokens in a full sample. The last sample may be shorter."""

    def __len__(self) -> int:
        """Returns the number of samples."""

    def spans(self, sample: int) -> list[Span]:
        """Returns the spans of a sample, in order.

        Raises:
            IndexError: The order has no such sample.
        """


class BlendOrder(Protocol):
    """Maps a sample index of a blend to a dataset and a sample index in that dataset."""

    def __len__(self) -> int:
        """Returns the number of samples."""

    def __getitem__(self, sample: int, /) -> BlendEntry:
        """Returns the dataset and the sample that a sample of the blend refers to.

        Raises:
            IndexError: The blend has no such sample.
        """

    def counts(self) -> list[int]:
        """Returns the number of samples that the blend takes from each dataset."""


def check_order_arguments(sequence_length: int, extra: int, num_samples: int | None) -> None:
    """Checks the arguments that all sample orders have in common.

    Raises:
        DataError: `sequence_length` is below 1, `extra` is neither 0 nor 1, or `num_samples` is
            negative.
    """
    if sequence_length < 1:
        raise DataError(f"sequence length {sequence_length}; give at least 1")
    if extra not in (0, 1):
        raise DataError(f"extra {extra}; give 0 or 1 tokens beyond the sequence length")
    if num_samples is not None and num_samples < 0:
        raise DataError(f"num_samples {num_samples}; give at least 0, or None for one epoch")
