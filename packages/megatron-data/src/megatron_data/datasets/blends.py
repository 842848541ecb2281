"""Blends by epochs or tokens, and the samples and epochs that a blend draws from each source."""

from collections.abc import Mapping
from typing import NamedTuple

from megatron_data.datasets.paths import Blend
from megatron_data.datasets.split import Interval, count_tokens, parse_split
from megatron_data.errors import DataError
from megatron_data.indexed.reader import IndexedDataset
from megatron_data.order.schedule import BlendSchedule, WeightChange
from megatron_data.preprocessing.fingerprints import compare_fingerprints, recorded_fingerprints
from megatron_data.sources.block_cache import StorageCache

WHOLE: Interval = (0.0, 1.0)


class BlendSourceSummary(NamedTuple):
    """One source of a blend.

    Attributes:
        prefix: Path of the dataset without `.bin` or `.idx`.
        num_documents: Number of documents of the whole dataset.
        num_tokens: Number of tokens of the training split.
        weight: Sum of its weights, or `num_tokens` if the blend has no weights.
        num_samples: Number of samples of the run that come from it.
        drawn_tokens: Number of tokens of these samples.
    """

    prefix: str
    num_documents: int
    num_tokens: int
    weight: float
    num_samples: int
    drawn_tokens: int

    @property
    def epochs(self) -> float:
        """Number of times that its tokens are read."""
        return self.drawn_tokens / self.num_tokens


def blend_by_epochs(
    epochs: Mapping[str, float], split: str | None = None, storage: StorageCache | None = None
) -> Blend:
    """Returns the blend that reads each source for a given number of epochs.

    Args:
        epochs: Number of epochs of each source, by prefix.
        split: Value of `--split`, whose training split is read. Defaults to the whole dataset.
        storage: Cache for the indices of prefixes that are URLs.

    Returns:
        The blend, whose weights are the tokens to read from each source. Train for the sum of the
        weights divided by the sequence length, in samples.

    Raises:
        DataError: `epochs` is empty, a source is missing, damaged or empty, or a number is not
            positive.
    """
    interval = _training(split)
    tokens = {
        prefix: round(_positive(prefix, times, "epochs") * _size(prefix, interval, storage)[1])
        for prefix, times in epochs.items()
    }
    return blend_by_tokens(tokens)


def blend_by_tokens(tokens: Mapping[str, int]) -> Blend:
    """Returns the blend that reads a given number of tokens from each source, by prefix.

    Raises:
        DataError: `tokens` is empty, or a number is not positive.
    """
    if not tokens:
        raise DataError("a blend without sources; give at least one")
    for prefix, count in tokens.items():
        _positive(prefix, count, "tokens")
    return Blend(tuple(tokens), tuple(tokens.values()))


def summarize_blend(
    blend: Blend,
    num_samples: int,
    sequence_length: int,
    split: str | None = None,
    storage: StorageCache | None = None,
) -> list[BlendSourceSummary]:
    """Returns what a run draws from each source of a blend in the stateless order.

    Args:
        blend: Blend, such as the result of `parse_data_path`, `blend_by_epochs` or
            `blend_by_tokens`.
        num_samples: Number of samples of the run.
        sequence_length: Tokens of a sample.
        split: Value of `--split`, whose training split is read. Defaults to the whole dataset.
        storage: Cache for the indices of prefixes that are URLs.

    Raises:
        TokenizerMismatchError: Two sources were made with different tokenizers.
        DataError: A source is missing, damaged or empty, or a weight is not positive.
    """
    if num_samples < 1 or sequence_length < 1:
        raise DataError(
            f"{num_samples} samples of {sequence_length} tokens; give at least 1 of each"
        )
    interval = _training(split)
    compare_fingerprints(recorded_fingerprints(blend.prefixes))
    sizes = {prefix: _size(prefix, interval, storage) for prefix in blend.prefixes}
    weights: dict[str, float] = {}
    given_weights = blend.weights or [sizes[prefix][1] for prefix in blend.prefixes]
    for prefix, weight in zip(blend.prefixes, given_weights, strict=True):
        weights[prefix] = weights.get(prefix, 0) + weight
    schedule = BlendSchedule([WeightChange(0, weights)], num_samples)
    return [
        BlendSourceSummary(prefix, *sizes[prefix], weights[prefix], count, count * sequence_length)
        for prefix, count in zip(schedule.sources, schedule.counts(), strict=True)
    ]


def _training(split: str | None) -> Interval:
    interval = WHOLE if split is None else parse_split(split)[0]
    if interval is None:
        raise DataError(f"split {split!r} has no training split; increase its first number")
    return interval


def _size(prefix: str, interval: Interval, storage: StorageCache | None) -> tuple[int, int]:
    """Returns the documents of a dataset, and the tokens of its training split."""
    with IndexedDataset(prefix, storage) as dataset:
        documents, tokens = dataset.num_documents, count_tokens(dataset, interval)
    if not tokens:
        raise DataError(f"the training split of {prefix} has no token")
    return documents, tokens


def _positive(prefix: str, value: float, what: str) -> float:
    if not 0 < value < float("inf"):
        raise DataError(f"{value} {what} of {prefix}; give a positive number")
    return value
