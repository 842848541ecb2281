"""Megatron's maps from samples to sentences, for datasets with one sequence per sentence.

A map is built in one pass over the documents of each epoch. Documents with too few sentences, or
with a sentence of more than 512 tokens, are skipped. The sentences of a document are added to a
sample until the sample reaches a target length. The sample ends there if enough sentences follow;
otherwise it takes the rest of the document.

`sentence_map` is for BERT and T5, where some target lengths are drawn shorter. `block_map` is for
the inverse cloze task, where the title of the document reduces the target length.

Source: `helpers.cpp` of NVIDIA/Megatron-LM. The results are equal row by row, including dtypes. The
code needs one bisection per sample instead of one step per sentence. If no document can be used,
Megatron loops forever and these functions raise an error.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import EmptySplitError
from megatron_data.order.mersenne import mt19937, mt19937_64

MAX_SENTENCE_LENGTH = 512
"""Largest length of a sentence in tokens. Documents with a longer sentence are skipped."""

_MIN_SENTENCES_AFTER = 2  # sentences that must follow a sample that ends before its document


def sentence_map(
    document_bounds: NDArray[np.int64],
    lengths: NDArray[np.int32],
    *,
    max_length: int,
    short_probability: float,
    seed: int,
    num_samples: int | None = None,
    min_sentences: int = 1,
) -> NDArray[np.unsignedinteger]:
    """Builds the sample map of BERT and T5.

    Args:
        document_bounds: First sentence of every document and the end of the last, int64 `[D + 1]`.
        lengths: Length of every sentence of the dataset in tokens, int32 `[S]`.
        max_length: Target length of a sample, without the special tokens that the task adds.
        short_probability: Fraction of samples whose target length is drawn from 2 to `max_length`.
            As in Megatron, its reciprocal is rounded to an integer.
        seed: Seed of both of Megatron's generators.
        num_samples: Minimum number of samples, in whole epochs. Defaults to one epoch.
        min_sentences: Minimum number of sentences in a sample: 2 for BERT with sentence order
            prediction. Defaults to 1.

    Returns:
        First sentence, end and target length of each sample, `[samples, 3]`, uint32, or uint64
        where there are more than 2^32 - 1 sentences.

    Raises:
        EmptySplitError: No document can be used.
    """
    targets = _targets(seed, max_length, short_probability)
    documents = _usable_documents(document_bounds, lengths, min_sentences, 1)
    ends = _cumulative_lengths(lengths)
    rows: list[int] = []

    def add_epoch() -> None:
        for _, first, last in documents:
            target = next(targets)
            start = first
            while start < last:
                end = _sample_end(ends, start, last, target, min_sentences, _MIN_SENTENCES_AFTER)
                rows.extend((start, end, target))
                start, target = end, next(targets)

    _run_epochs(add_epoch, lambda: len(rows) // 3, num_samples)
    return _shuffled(rows, 3, seed, len(lengths))


def block_map(
    document_bounds: NDArray[np.int64],
    lengths: NDArray[np.int32],
    title_lengths: NDArray[np.int32],
    *,
    max_length: int,
    seed: int,
    num_samples: int | None = None,
    use_one_sentence_blocks: bool = False,
) -> NDArray[np.unsignedinteger]:
    """Builds the sample map of the inverse cloze task and of retrieval.

    Args:
        document_bounds: First sentence of every document and the end of the last, int64 `[D + 1]`.
        lengths: Length of every sentence of the dataset in tokens, int32 `[S]`.
        title_lengths: Length of every document's title in tokens, int32 `[D]`.
        max_length: Target length of title and block together, without the special tokens that the
            task adds.
        seed: Seed of the shuffle.
        num_samples: Minimum number of samples, in whole epochs. Defaults to one epoch.
        use_one_sentence_blocks: Allows blocks of one sentence instead of at least two. Defaults to
            False.

    Returns:
        First sentence, end, document, and index of the block within an epoch, `[samples, 4]`,
        uint32, or uint64 where there are more than 2^32 - 1 sentences.

    Raises:
        EmptySplitError: No document can be used.
    """
    min_sentences = 1 if use_one_sentence_blocks else 2
    documents = _usable_documents(document_bounds, lengths, min_sentences, 0)
    ends, titles = _cumulative_lengths(lengths), title_lengths.tolist()
    rows: list[int] = []

    def add_epoch() -> None:
        block = 0
        for document, start, last in documents:
            while start < last:
                end = _sample_end(
                    ends, start, last, max_length - titles[document], min_sentences, min_sentences
                )
                rows.extend((start, end, document, block))
                start, block = end, block + 1

    _run_epochs(add_epoch, lambda: len(rows) // 4, num_samples)
    return _shuffled(rows, 4, seed, len(lengths))


def _usable_documents(
    bounds: NDArray[np.int64], lengths: NDArray[np.int32], min_sentences: int, checked_above: int
) -> list[tuple[int, int, int]]:
    """Returns index, first sentence and end of the documents that are used.

    The length of sentences is not checked in documents of at most `checked_above` sentences.
    """
    counts = np.diff(bounds)
    long = np.concatenate([[0], np.cumsum(lengths > MAX_SENTENCE_LENGTH)])
    too_long = (long[bounds[1:]] > long[bounds[:-1]]) & (counts > checked_above)
    (numbers,) = np.nonzero((counts >= max(min_sentences, 1)) & ~too_long)
    if not len(numbers):
        raise EmptySplitError(
            f"none of {len(counts)} documents has at least {min_sentences} sentences, none of them "
            f"longer than {MAX_SENTENCE_LENGTH} tokens; preprocess with --split-sentences"
        )
    return list(
        zip(numbers.tolist(), bounds[numbers].tolist(), bounds[numbers + 1].tolist(), strict=True)
    )


def _cumulative_lengths(lengths: NDArray[np.int32]) -> "array[int]":
    """Returns the cumulative lengths of the sentences as an array that `bisect` reads fast."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=ends[1:])
    return array("q", ends.tobytes())


def _sample_end(
    ends: "array[int]", start: int, last: int, target: int, min_sentences: int, after: int
) -> int:
    """Returns the end of a sample from sentence `start` of a document that ends at `last`."""
    end = max(bisect_left(ends, ends[start] + target, start + 1, last), start + min_sentences)
    return end if last - end >= after else last


def _targets(seed: int, max_length: int, short_probability: float) -> Iterator[int]:
    """Yields the target length of each sample."""
    every = round_half_away(1 / short_probability) if short_probability > 0 else 0
    if not every:
        while True:
            yield max_length
    for draws in mt19937(seed):
        wide = draws.astype(np.int64)
        yield from np.where(wide % every == 0, 2 + wide % (max_length - 1), max_length).tolist()


def round_half_away(number: float) -> int:
    """Rounds a positive number to an integer as C does, with halves away from zero."""
    return int(number + 0.5)


def _run_epochs(
    add_epoch: Callable[[], None], count_samples: Callable[[], int], num_samples: int | None
) -> None:
    if num_samples is None:
        add_epoch()
        return
    while count_samples() < num_samples:
        add_epoch()


def _shuffled(
    rows: list[int], width: int, seed: int, sentences: int
) -> NDArray[np.unsignedinteger]:
    """Returns the rows after a Fisher-Yates shuffle by the 64-bit generator."""
    count = len(rows) // width
    draws = mt19937_64(seed + 1, max(count - 1, 0))
    partners = (draws % np.arange(count, 1, -1, dtype=np.uint64)).tolist()
    order = list(range(count))
    for index, partner in zip(range(count - 1, 0, -1), partners, strict=True):
        order[index], order[partner] = order[partner], order[index]
    wide = sentences > np.iinfo(np.uint32).max
    table: NDArray[np.unsignedinteger] = np.array(rows, np.uint64 if wide else np.uint32)
    return table.reshape(count, width)[np.array(order, np.int64)]
