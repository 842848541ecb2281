"""Filling samples up to a length."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def pad(values: Sequence[int], length: int) -> NDArray[np.int64]:
    """`values` and then zeros, int64 `[length]`."""
    array = np.zeros(length, np.int64)
    array[: len(values)] = values
    return array


def pad_text(tokens: Sequence[int], length: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Tokens and then zeros, and the numbers of their documents: 0, or -1 for padding.

    Padding is what stands behind the tokens; no token inside the text counts as padding.

    Returns:
        Tokens, int64 `[length]`, and document numbers, int32 `[length]`.
    """
    document_ids = np.full(length, -1, np.int32)
    document_ids[: len(tokens)] = 0
    return pad(tokens, length), document_ids
