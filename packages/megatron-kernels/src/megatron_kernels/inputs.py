"""Inputs of calls, drawn from a seed for any dtype, device and size."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from megatron_kernels.ops.attention.dropout import DropoutHash
from megatron_kernels.ops.dropout.bias_dropout_add import DropoutSite, hashes

Size = Literal["small", "empty", "one", "large", "many"]
"""Sizes of inputs: as a case writes them, without rows, one row, more rows, or many rows.

With many rows, sums over rows in 16 bits are wrong by half and more.
"""

_MANY: Final = 5000


@dataclass(frozen=True)
class InputGenerator:
    """Generates inputs: the same numbers for every dtype and device.

    Attributes:
        dtype: Dtype of floating-point tensors.
        device: Device of all tensors.
        seed: Seed of the numbers.
        size: Number of rows (tokens, queries and keys) instead of those of the case.
    """

    dtype: torch.dtype
    device: torch.device
    seed: int = 1234
    size: Size = "small"

    def rows(self, count: int, *, sequence: bool = False) -> int:
        """Returns the number of rows of this size instead of ``count``.

        Args:
            count: Number of rows of the case.
            sequence: Whether the cost of the reference rises faster than the number of rows.
        """
        large = 23 * count
        many = large if sequence or not count else _MANY
        return {"small": count, "empty": 0, "one": 1, "large": large, "many": many}[self.size]

    def normal(self, *shape: int, mean: float = 0.0) -> Tensor:
        """Returns a leaf that requires a gradient, from a normal distribution with deviation 1."""
        numbers = torch.randn(shape, generator=self._generator(shape), dtype=torch.float64) + mean
        return numbers.to(self.device, self.dtype).requires_grad_()

    def integers(self, below: int, *shape: int) -> Tensor:
        """Returns int64 numbers in [0, below)."""
        generator = self._generator(shape)
        return torch.randint(below, shape, generator=generator).to(self.device)

    def _generator(self, shape: tuple[int, ...]) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + sum(shape))


@dataclass(frozen=True, eq=False)
class CaseDropout:
    """Dropout of a quarter of the elements `[b, n, s, t]` by a hash in 64-bit integers.

    Attributes:
        word0: First words of the key of each query `[s, b]`.
        word1: Second words.
        columns: Column of each key `[b or 1, t]`. None means its index.
        first_head: Number of the first head.
        length: Channels of a head.
    """

    word0: Tensor
    word1: Tensor
    columns: Tensor | None = None
    first_head: int = 3
    length: int = 1000

    @property
    def site(self) -> DropoutSite:
        """Numbers of the site and the probability."""
        return DropoutSite(-(2**31) + 5, 123456789, -(2**31) + 2**30, 4 / 3)

    @property
    def probability(self) -> float:
        """As in `TiledDropout`."""
        return 0.25

    def __call__(self, p: Tensor) -> Tensor:
        """Returns the probabilities after dropout."""
        samples, heads, queries, keys = (slice(0, size) for size in p.shape)
        kept = self.kept(samples, heads, p.shape[3])(queries, keys)
        return torch.where(kept == 0, 0, p * self.site.scale)

    def kept(self, samples: slice, heads: slice, length: int) -> Callable[[slice, slice], Tensor]:
        """Returns a function of queries and keys: 1 for elements that are kept, 0 for others."""
        columns = torch.arange(length, device=self.word0.device)[None]
        if self.columns is not None:
            columns = self.columns[samples] if len(self.columns) > 1 else self.columns
        of_heads = torch.arange(heads.start, heads.stop, device=columns.device) + self.first_head
        numbers = (of_heads * self.length)[:, None, None] + columns[:, None, None]
        key0 = self.word0[:, samples].t().long() + self.site.word0
        key1 = self.word1[:, samples].t().long() ^ self.site.word1

        def of(queries: slice, keys: slice) -> Tensor:
            own = (key[:, None, queries, None] for key in (key0, key1))
            return (hashes(numbers[..., keys], *own) >= self.site.least).int()

        return of

    def hash_numbers(self, keys: int) -> DropoutHash:
        """Returns the numbers for a kernel."""
        words = self.word0, self.word1
        return DropoutHash(*words, self.first_head, self.length, self.columns, self.site)


def draw_words(draw: InputGenerator, *shape: int) -> tuple[Tensor, Tensor]:
    """Returns both words of the key of each token."""
    first, second = (draw.integers(2**32, *shape, 1 + each) - 2**31 for each in range(2))
    return first[..., 0].to(torch.int32), second[..., 0].to(torch.int32)


def of_rows(x: Tensor, rows: int) -> Tensor:
    """Returns the first columns of a row for each sample, or stretches the columns."""
    width = x.shape[1]
    return x[:, :rows] if rows <= width else x.repeat_interleave(-(-rows // width), 1)[:, :rows]
