"""Target lengths of samples of sentences, with draws of numpy's Mersenne Twister."""

from itertools import islice

import numpy as np
import pytest
from megatron_data.order.sentences import _targets


@pytest.mark.parametrize(("probability", "every"), [(0.0, 0), (1.0, 1), (0.1, 10), (0.4, 3)])
def test_one_target_in_so_many_is_shorter(probability: float, every: int) -> None:
    """Of one draw in `round(1 / probability)` a shorter length follows, as in Megatron."""
    bits = np.random.MT19937()
    bits._legacy_seeding(7)
    draws = bits.random_raw(20_000).tolist()
    expected = [2 + draw % 127 if every and draw % every == 0 else 128 for draw in draws]
    assert list(islice(_targets(7, 128, probability), 20_000)) == expected
