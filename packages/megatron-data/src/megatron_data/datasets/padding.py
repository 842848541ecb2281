"""Padding of samples."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def pad(values: Sequence[int], length: int) -> NDArray[np.int64]:
    """Pads `values` with zeros, int64 `[length]`."""
    array = np.zeros(length, np.int64)
    array[: len(values)] = values
    return array


def pad_text(tokens: Sequence[int], length: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Pads tokens with zeros. Only the added tokens are padding.

    Returns:
        Tokens, int64 `[length]`, and document ids, int32 `[length]`: 0, or -1 for padding.
    """
    document_ids = np.full(length, -1, np.int32)
    document_ids[: len(tokens)] = 0
    return pad(tokens, length), document_ids
