"""What datasets share whose samples are rows of sentences, along Megatron's maps."""

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError


def sample_row(sample_map: NDArray[np.unsignedinteger], sample: int) -> tuple[int, int, int]:
    """First sentence of a sample, the one after its last, and the length aimed at.

    Raises:
        IndexError: No such sample.
    """
    if not 0 <= sample < len(sample_map):
        raise IndexError(f"sample {sample} of {len(sample_map)}")
    first, last, target = sample_map[sample].tolist()
    return first, last, target


def sample_generator(seed: int, sample: int) -> np.random.RandomState:
    """The generator of one sample: its draws do not depend on which samples were read before."""
    return np.random.RandomState((seed + sample) % (1 << 32))


def check_short_probability(share: float) -> None:
    """Refuses a share of short samples that is none.

    Raises:
        DataError: It is not between 0 and 1.
    """
    if not 0 <= share <= 1:
        raise DataError(f"share of short samples {share}; give one from 0 to 1")
