"""Functions shared by the datasets that use Megatron's sentence maps."""

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError


def sample_row(sample_map: NDArray[np.unsignedinteger], sample: int) -> tuple[int, int, int]:
    """Returns the first sentence, the end and the target length of a sample.

    Raises:
        IndexError: The map has no such sample.
    """
    if not 0 <= sample < len(sample_map):
        raise IndexError(f"sample {sample} is out of range; there are {len(sample_map)} samples")
    first, last, target = sample_map[sample].tolist()
    return first, last, target


def sample_generator(seed: int, sample: int) -> np.random.RandomState:
    """Returns the random generator of one sample, which does not depend on other samples."""
    return np.random.RandomState((seed + sample) % (1 << 32))


def check_short_probability(share: float) -> None:
    """Checks a fraction of short samples.

    Raises:
        DataError: The fraction is not between 0 and 1.
    """
    if not 0 <= share <= 1:
        raise DataError(f"short_probability {share} is not a probability; give 0 to 1")
