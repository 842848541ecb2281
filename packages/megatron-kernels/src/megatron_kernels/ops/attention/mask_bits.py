"""Masks of attention dropout that are saved for the backward pass, one bit for each probability.

To pack and unpack the mask of a tile takes a quarter of the time that computing it again takes. The
memory grows with the square of the length, so only masks of short sequences are saved: at most 64
bytes for each query and head, which is a quarter of the bytes of a query of 64 channels in float32.
"""

from typing import Final

import torch
from jaxtyping import Int32
from torch import Tensor
from torch.nn import functional

ROWS: Final = 32
"""Queries of a word. The first query of a tile must be a multiple of it."""

SHORT: Final = 512
"""Largest number of queries and of keys of a mask that is saved."""


class MaskBits:
    """A mask as words `[b, n, s / 32, t]`; a bit is 1 for a kept element."""

    def __init__(self, words: Int32[Tensor, "b n rows t"]) -> None:
        self.words = words
        self._shifts = torch.arange(ROWS, dtype=torch.int32).unsqueeze(1)
        self._bits = torch.ones_like(self._shifts) << self._shifts

    @classmethod
    def empty(cls, samples: int, heads: int, queries: int, keys: int) -> "MaskBits":
        """Returns a mask that drops all elements."""
        shape = samples, heads, -(-queries // ROWS), keys
        return cls(torch.zeros(shape, dtype=torch.int32))

    def write(
        self, kept: Int32[Tensor, "b n s t"], samples: slice, heads: slice, queries: slice
    ) -> None:
        """Writes a part of the mask.

        Args:
            kept: 1 for elements that are kept and 0 for others, of the first `t` keys. Overwritten.
            samples: Samples of the part.
            heads: Heads of the part.
            queries: Queries of the part. The first one is a multiple of 32.
        """
        missing = -kept.shape[2] % ROWS
        padded = functional.pad(kept, (0, 0, 0, missing)) if missing else kept
        bits = torch.unflatten(padded, 2, (-1, ROWS)).mul_(self._bits)
        self._rows(samples, heads, queries, kept.shape[3]).copy_(bits.sum(3, dtype=torch.int32))

    def read(
        self, samples: slice, heads: slice, queries: slice, keys: int
    ) -> Int32[Tensor, "b n s t"]:
        """Returns a part of the mask, of the keys before `keys`."""
        words = self._rows(samples, heads, queries, keys).unsqueeze(3)
        rows = (words >> self._shifts).bitwise_and_(1).flatten(2, 3)
        return rows[:, :, : queries.stop - queries.start]

    def _rows(self, samples: slice, heads: slice, queries: slice, keys: int) -> Tensor:
        rows = slice(queries.start // ROWS, -(-queries.stop // ROWS))
        return self.words[samples, heads, rows, :keys]
