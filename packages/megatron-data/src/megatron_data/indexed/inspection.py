"""Statistics and histograms of a dataset."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError
from megatron_data.indexed.images import TEXT_MODE, text_mask
from megatron_data.indexed.reader import IndexedDataset
from megatron_data.preprocessing.manifest import Counts, count_dataset

_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class DatasetSummary:
    """Statistics of a dataset.

    Attributes:
        counts: Number of documents, sequences, tokens and images.
        document_lengths: Text tokens of every document, int64 `[documents]`.
        token_counts: Occurrences of each token id in text, int64 `[largest id + 1]`.
    """

    counts: Counts
    document_lengths: NDArray[np.int64]
    token_counts: NDArray[np.int64]

    @property
    def distinct_tokens(self) -> int:
        """Number of token ids that occur."""
        return int(np.count_nonzero(self.token_counts))

    def most_common(self, number: int) -> list[tuple[int, int]]:
        """Returns the most common token ids with their counts, in decreasing order."""
        order = np.argsort(-self.token_counts, kind="stable")[:number]
        return [(int(token), int(self.token_counts[token])) for token in order]


def summarize(dataset: IndexedDataset) -> DatasetSummary:
    """Returns statistics of a dataset. Reads it once, in constant memory.

    Raises:
        DataError: The index is damaged, the tokens are not token ids, or a URL cannot be read.
    """
    if dataset.dtype.kind not in "iu":
        raise DataError(f"{dataset.prefix} holds {dataset.dtype}, which cannot be token ids")
    dataset.check()
    token_counts = np.zeros(0, np.int64)
    for tokens in _texts(dataset):
        if len(tokens) and int(tokens.min()) < 0:
            raise DataError(f"{dataset.prefix} holds negative numbers, which are not token ids")
        token_counts = _add(token_counts, np.bincount(tokens))
    totals = np.zeros(len(dataset) + 1, np.int64)
    modes = dataset.sequence_modes
    lengths = dataset.sequence_lengths
    np.cumsum(lengths if modes is None else lengths * (modes == TEXT_MODE), out=totals[1:])
    document_lengths = np.diff(totals[dataset.document_indices])
    return DatasetSummary(count_dataset(dataset), document_lengths, token_counts)


def document_text(dataset: IndexedDataset, document: int) -> tuple[NDArray[Any], int]:
    """Returns the text tokens of a document, and the number of its other sequences."""
    if dataset.sequence_modes is None:
        return dataset.document(document), 0
    first, last = dataset.document_indices[document : document + 2].tolist()
    texts = [
        dataset.get(number)
        for number in range(first, last)
        if dataset.sequence_modes[number] == TEXT_MODE
    ]
    return np.concatenate([np.empty(0, dataset.dtype), *texts]), last - first - len(texts)


def _texts(dataset: IndexedDataset) -> Iterator[NDArray[Any]]:
    """Yields the text tokens of a dataset in blocks, without images."""
    begin = 0
    for tokens in dataset.scan():
        end = begin + len(tokens)
        yield tokens if dataset.sequence_modes is None else tokens[text_mask(dataset, begin, end)]
        begin = end


def _add(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the sum of two count arrays of possibly different lengths, in the longer array."""
    longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
    longer[: len(shorter)] += shorter
    return longer


def draw_histogram(values: NDArray[np.integer], width: int = 50, blocks: bool = True) -> str:
    """Returns a histogram of values between powers of two as text, one bar per line.

    Args:
        values: Non-negative integers.
        width: Length of the longest bar in characters. Defaults to 50.
        blocks: Draws with block characters instead of `#`. Defaults to True.
    """
    bins = _bins(values)
    most = max(number for _, number in bins)
    rows = (
        f"{name:>24} {_bar(number / max(most, 1), width, blocks)} {number:,}"
        for name, number in bins
    )
    return "\n".join(rows)


def draw_svg(values: NDArray[np.integer], title: str) -> str:
    """Returns the histogram of `draw_histogram` as an SVG document.

    Args:
        values: Non-negative integers.
        title: Title above the histogram.
    """
    bins = _bins(values)
    most = max(number for _, number in bins)
    height = 40 + 22 * len(bins)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="12" y="22" font-weight="bold">{escape(title)}</text>',
    ]
    for row, (name, number) in enumerate(bins):
        y, length = 40 + 22 * row, 440 * number / max(most, 1)
        parts += [
            f'<text x="190" y="{y + 14}" text-anchor="end">{name}</text>',
            f'<rect x="200" y="{y + 2}" width="{length:.1f}" height="16" fill="#3b6ea5"/>',
            f'<text x="{206 + length:.1f}" y="{y + 14}">{number:,}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _bins(values: NDArray[np.integer]) -> list[tuple[str, int]]:
    """Returns the labels of ranges between powers of two, and the count of each."""
    exponents = np.frexp(values.astype(np.float64))[1]  # 0 -> 0, 1 -> 1, 2 and 3 -> 2, …
    counts = np.bincount(exponents, minlength=1)
    first = int(np.flatnonzero(counts)[0]) if counts.any() else 0
    bins = []
    for exponent in range(first, len(counts)):
        low, high = (1 << exponent) >> 1, (1 << exponent) - 1
        name = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        bins.append((name, int(counts[exponent])))
    return bins


def _bar(share: float, width: int, blocks: bool) -> str:
    if not blocks:
        return "#" * max(round(share * width), int(share > 0))
    eighths = max(round(share * width * 8), int(share > 0))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
