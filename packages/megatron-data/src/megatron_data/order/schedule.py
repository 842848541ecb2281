"""Blends whose weights may change during a run."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_data.errors import DataError
from megatron_data.order.apportionment import Apportionment
from megatron_data.order.protocol import BlendEntry


class WeightChange(NamedTuple):
    """Weights that apply from one sample on.

    Attributes:
        first_sample: First sample with these weights. 0 in the first change.
        weights: A positive number for each source, by name.
    """

    first_sample: int
    weights: Mapping[str, float]


class _Segment(NamedTuple):
    """The samples between two changes.

    Attributes:
        first_sample: First sample of the segment.
        sources: Indices of its sources.
        shares: Assigns its samples to `sources`.
        drawn: Samples taken from each known source before the segment.
    """

    first_sample: int
    sources: tuple[int, ...]
    shares: Apportionment
    drawn: tuple[int, ...]


class BlendSchedule:
    """A `BlendOrder` computed from weights that may change at given samples.

    A change applies from its first sample on and does not affect earlier samples. Each source
    continues where it stopped, also after samples in which it had no weight. A new source starts at
    its first sample.

    Args:
        changes: Weights, ordered by their first sample. The first change begins at sample 0.
        num_samples: Number of samples of the blend.

    Attributes:
        sources: Names of all sources in the order of their first appearance.
            `BlendEntry.source_index` is an index into it.

    Raises:
        DataError: `changes` is empty or not in order, or a weight is not positive.
    """

    def __init__(self, changes: Sequence[WeightChange], num_samples: int) -> None:
        if num_samples < 0:
            raise DataError(f"num_samples {num_samples} of a blend; give at least 0")
        self.num_samples = num_samples
        self._segments: list[_Segment] = []
        numbers: dict[str, int] = {}
        for change in changes:
            drawn = self._counts_before(change)
            for name in change.weights:
                numbers.setdefault(name, len(numbers))
            drawn += [0] * (len(numbers) - len(drawn))
            sources = tuple(numbers[name] for name in change.weights)
            shares = Apportionment(list(change.weights.values()))
            self._segments.append(_Segment(change.first_sample, sources, shares, tuple(drawn)))
        if not self._segments:
            raise DataError("a blend without weights; give weights for at least one source")
        self._firsts = [segment.first_sample for segment in self._segments]
        self.sources = tuple(numbers)

    def _counts_before(self, change: WeightChange) -> list[int]:
        """Returns the samples taken from each known source before a change."""
        if not self._segments:
            if change.first_sample:
                raise DataError(
                    f"the first weights of a blend begin at sample {change.first_sample}; "
                    "begin at 0"
                )
            return []
        last = self._segments[-1]
        if change.first_sample <= last.first_sample:
            raise DataError(
                f"weights that begin at sample {change.first_sample} follow weights that begin at "
                f"sample {last.first_sample}; sort them"
            )
        return self._counts_up_to(last, change.first_sample)

    def _counts_up_to(self, segment: _Segment, samples: int) -> list[int]:
        counts = list(segment.drawn)
        own_counts = segment.shares.counts(samples - segment.first_sample)
        for source, count in zip(segment.sources, own_counts, strict=True):
            counts[source] += count
        return counts

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, sample: int) -> BlendEntry:
        """Returns the source of a sample and the sample's index in it.

        Raises:
            IndexError: The blend has no such sample.
        """
        if not 0 <= sample < self.num_samples:
            raise IndexError(
                f"sample {sample} is out of range; there are {self.num_samples} samples"
            )
        segment = self._segment_of(sample)
        own_index, sample_index = segment.shares[sample - segment.first_sample]
        source = segment.sources[own_index]
        return BlendEntry(source, segment.drawn[source] + sample_index)

    def counts(self) -> list[int]:
        """Returns the number of samples from each of `sources`."""
        counts = self._counts_up_to(self._segment_of(self.num_samples), self.num_samples)
        return counts + [0] * (len(self.sources) - len(counts))

    def _segment_of(self, sample: int) -> _Segment:
        return self._segments[bisect_right(self._firsts, sample) - 1]
