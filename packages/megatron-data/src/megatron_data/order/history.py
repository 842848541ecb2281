"""A blend whose weights may change in the course of a run."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_data.errors import DataError
from megatron_data.order.apportionment import Apportionment
from megatron_data.order.spans import Draw


class Change(NamedTuple):
    """Weights from one sample on.

    Attributes:
        first_sample: the first sample drawn by them; 0 in the first change.
        weights: a positive number for every source that is drawn from.
    """

    first_sample: int
    weights: Mapping[str, float]


class _Reign(NamedTuple):
    """What holds from one change to the next: the sources' numbers and what was drawn before."""

    first_sample: int
    sources: tuple[int, ...]
    shares: Apportionment
    drawn: tuple[int, ...]


class BlendHistory:
    """A `BlendOrder` computed from the weights and all their changes.

    A change takes effect at its first sample and leaves what came before as it was. Sources go on
    where they were, also after a time without weight; new ones begin at their first sample.

    Args:
        changes: in order; the first begins at sample 0.
        num_samples: how many samples are drawn.

    Attributes:
        sources: names of all sources in the order of their first appearance; `Draw.source` is a
            place among them.

    Raises:
        DataError: no change, one that does not begin after the one before it, or unusable weights.
    """

    def __init__(self, changes: Sequence[Change], num_samples: int) -> None:
        if num_samples < 0:
            raise DataError(f"a blend of {num_samples} samples; give at least 0")
        self.num_samples = num_samples
        self._reigns: list[_Reign] = []
        numbers: dict[str, int] = {}
        for change in changes:
            drawn = self._drawn_before(change)
            for name in change.weights:
                numbers.setdefault(name, len(numbers))
            drawn += [0] * (len(numbers) - len(drawn))
            sources = tuple(numbers[name] for name in change.weights)
            shares = Apportionment(list(change.weights.values()))
            self._reigns.append(_Reign(change.first_sample, sources, shares, tuple(drawn)))
        if not self._reigns:
            raise DataError("a blend without weights; name at least one source")
        self._firsts = [reign.first_sample for reign in self._reigns]
        self.sources = tuple(numbers)

    def _drawn_before(self, change: Change) -> list[int]:
        """Samples of every source so far known that come before a change."""
        if not self._reigns:
            if change.first_sample:
                raise DataError(
                    f"the first weights of a blend begin at sample {change.first_sample}, not at 0"
                )
            return []
        last = self._reigns[-1]
        if change.first_sample <= last.first_sample:
            raise DataError(
                f"weights that begin at sample {change.first_sample} follow weights that begin at "
                f"sample {last.first_sample}; put them in order"
            )
        return self._counted(last, change.first_sample)

    def _counted(self, reign: _Reign, samples: int) -> list[int]:
        counts = list(reign.drawn)
        own = reign.shares.counts(samples - reign.first_sample)
        for source, count in zip(reign.sources, own, strict=True):
            counts[source] += count
        return counts

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, sample: int) -> Draw:
        """Returns where a sample comes from.

        Raises:
            IndexError: no such sample.
        """
        if not 0 <= sample < self.num_samples:
            raise IndexError(f"sample {sample} of {self.num_samples}")
        reign = self._reign(sample)
        place, number = reign.shares[sample - reign.first_sample]
        source = reign.sources[place]
        return Draw(source, reign.drawn[source] + number)

    def counts(self) -> list[int]:
        """Returns how many samples come from each of `sources`."""
        if not self.num_samples:
            return [0] * len(self.sources)
        counts = self._counted(self._reign(self.num_samples - 1), self.num_samples)
        return counts + [0] * (len(self.sources) - len(counts))

    def _reign(self, sample: int) -> _Reign:
        return self._reigns[bisect_right(self._firsts, sample) - 1]
