"""Blends by epochs or tokens, and what any blend comes to: samples and epochs of each source."""

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
        prefix: Its `.bin/.idx` pair without suffix.
        documents: Of the whole dataset.
        tokens: Of the part that is trained on.
        weight: As given, those of a source that is named twice together; its tokens if none were.
        samples: How many of the samples come from it.
        drawn: Tokens of these samples.
    """

    prefix: str
    num_documents: int
    num_tokens: int
    weight: float
    num_samples: int
    drawn_tokens: int

    @property
    def epochs(self) -> float:
        """How often its tokens are read."""
        return self.drawn_tokens / self.num_tokens


def blend_by_epochs(
    epochs: Mapping[str, float], split: str | None = None, storage: StorageCache | None = None
) -> Blend:
    """Returns the blend in which sources are read a number of times in the same run.

    Args:
        epochs: How often each source is read, by prefix.
        split: The `--split` that cuts off what is trained on; None for all.
        storage: The cache for the indices of prefixes that are URLs.

    Returns:
        The blend, whose weights are the tokens to be read of each source. A run of their sum
        divided by the sequence length, in samples, reads them.

    Raises:
        DataError: No source, one that is missing, damaged or empty, or a number that is not
            positive.
    """
    interval = _training(split)
    wanted = {
        prefix: round(_positive(prefix, times, "epochs") * _size(prefix, interval, storage)[1])
        for prefix, times in epochs.items()
    }
    return blend_by_tokens(wanted)


def blend_by_tokens(tokens: Mapping[str, int]) -> Blend:
    """Returns the blend in which so many tokens of each source are read, by prefix.

    Raises:
        DataError: No source, or a number that is not positive.
    """
    if not tokens:
        raise DataError("a blend of no source; name at least one")
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
    """What a run draws from each source of a blend; the counts are those of the stateless order.

    Args:
        blend: As `parse_data_path`, `blend_by_epochs` or `blend_by_tokens` give it.
        num_samples: Samples of the run.
        sequence_length: Tokens of a sample.
        split: The `--split` that cuts off what is trained on; None for all.
        storage: The cache for the indices of prefixes that are URLs.

    Raises:
        TokenizerMismatchError: Different tokenizers made two of the sources.
        DataError: A source that is missing, damaged or empty, or weights that are not positive.
    """
    if num_samples < 1 or sequence_length < 1:
        raise DataError(
            f"{num_samples} samples of {sequence_length} tokens; give at least 1 of each"
        )
    interval = _training(split)
    compare_fingerprints(recorded_fingerprints(blend.prefixes))
    sizes = {prefix: _size(prefix, interval, storage) for prefix in blend.prefixes}
    weights: dict[str, float] = {}
    given = blend.weights or [sizes[prefix][1] for prefix in blend.prefixes]
    for prefix, weight in zip(blend.prefixes, given, strict=True):
        weights[prefix] = weights.get(prefix, 0) + weight
    schedule = BlendSchedule([WeightChange(0, weights)], num_samples)
    return [
        BlendSourceSummary(prefix, *sizes[prefix], weights[prefix], count, count * sequence_length)
        for prefix, count in zip(schedule.sources, schedule.counts(), strict=True)
    ]


def _training(split: str | None) -> Interval:
    interval = WHOLE if split is None else parse_split(split)[0]
    if interval is None:
        raise DataError(f"split {split!r} leaves nothing to train on")
    return interval


def _size(prefix: str, interval: Interval, storage: StorageCache | None) -> tuple[int, int]:
    """Documents of a dataset, and tokens of the part that is trained on."""
    with IndexedDataset(prefix, storage) as dataset:
        documents, tokens = dataset.num_documents, count_tokens(dataset, interval)
    if not tokens:
        raise DataError(f"{prefix} holds no token to train on")
    return documents, tokens


def _positive(prefix: str, value: float, what: str) -> float:
    if not 0 < value < float("inf"):
        raise DataError(f"{value} {what} of {prefix}; give a positive number")
    return value
