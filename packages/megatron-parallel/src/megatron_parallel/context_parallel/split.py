"""Which indices of a sequence each context-parallel rank holds.

Under a causal mask the token at place `i` attends to `i + 1` keys, so contiguous parts are unequal
work: the last of 4 ranks would have 7 times that of the first. The zig-zag split cuts the sequence
into `2 n` chunks, and rank `r` of `n` holds chunks `r` and `2 n - 1 - r`: such a pair is the same
work for all `r`. Where packed documents do not attend to each other, work starts anew in every
document, and only a zig-zag inside each of them is balanced.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from megatron_parallel.errors import LayoutError


def check_length(length: int, ranks: int) -> None:
    """Raises `LayoutError` unless a sequence of `length` can be cut over `ranks` ranks."""
    if length % (2 * ranks):
        below = length // (2 * ranks) * 2 * ranks
        near = f"{below} or {below + 2 * ranks}" if below else str(2 * ranks)
        raise LayoutError(
            f"a sequence of {length} tokens cannot be cut into 2 x {ranks} equal chunks for "
            f"context parallelism; use a multiple of {2 * ranks}, for example {near}"
        )


@dataclass(frozen=True, eq=False)
class ContextSplit:
    """The indices of every rank, ascending; every place of the sequence is at one rank.

    Attributes:
        indices: int64 `[ranks, b, part]`; `b` is 1 where all samples are cut alike.
    """

    indices: Int[Tensor, "ranks b part"]

    @classmethod
    def zigzag(cls, length: int, ranks: int, device: torch.device | str = "cpu") -> "ContextSplit":
        """Chunks `r` and `2 n - 1 - r` of the whole sequence for rank `r`, as Megatron does.

        Raises:
            LayoutError: The length is not a multiple of `2 * ranks`.
        """
        check_length(length, ranks)
        chunks = torch.arange(length, device=device).view(2 * ranks, -1)
        return cls(torch.cat([chunks[:ranks], chunks[ranks:].flip(0)], 1)[:, None])

    @classmethod
    def per_document(cls, document_ids: Int[Tensor, "b s"], ranks: int) -> "ContextSplit":
        """A zig-zag inside each document, whatever the documents' lengths: nothing is padded.

        All ranks hold equally many tokens. The first `length mod 2n` tokens of a document, which
        have the fewest keys, do not fit into `2 n` equal chunks: they are dealt out one by one,
        back and forth, over the whole sample.

        Args:
            document_ids: `[b, s]`; equal neighbours are one document.
            ranks: Number of ranks.

        Raises:
            LayoutError: The length is not a multiple of `2 * ranks`.
        """
        b, length = document_ids.shape
        check_length(length, ranks)
        device, chunks = document_ids.device, 2 * ranks
        indices = torch.arange(length, device=device).expand(b, -1)
        begins = torch.ones_like(document_ids, dtype=torch.bool)
        begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
        start = torch.where(begins, indices, 0).cummax(1).values
        number = begins.cumsum(1) - 1
        lengths = torch.zeros_like(indices).scatter_add_(1, number, torch.ones_like(indices))
        extent = lengths.gather(1, number)
        rest = extent % chunks
        inside = indices - start - rest  # negative: one of the rest
        dealt = (inside < 0).cumsum(1) - 1
        chunk = torch.where(inside < 0, dealt % chunks, inside * chunks // (extent - rest).clamp(1))
        rank = torch.minimum(chunk, chunks - 1 - chunk)
        order = (rank * length + indices).argsort(1)
        return cls(order.view(b, ranks, -1).transpose(0, 1))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.indices.shape[0]

    @property
    def local_length(self) -> int:
        """Tokens at each rank."""
        return self.indices.shape[2]

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        return self.ranks * self.local_length

    def take(self, t: Shaped[Tensor, "b s *rest"], rank: int) -> Shaped[Tensor, "b part *rest"]:
        """Returns what `rank` holds of a tensor over the whole sequence."""
        return gather(t, self.indices[rank], 1)

    def to_sequence_order(self, t: Shaped[Tensor, "s b *rest"]) -> Shaped[Tensor, "s b *rest"]:
        """The parts of all ranks, one after the other along dim 0, in the order of the sequence."""
        return gather(t, self._inverse, 0)

    def to_rank_order(self, t: Shaped[Tensor, "s b *rest"]) -> Shaped[Tensor, "s b *rest"]:
        """Returns the inverse of `to_sequence_order`."""
        return gather(t, self._order, 0)

    def joined(self, size: int) -> "ContextSplit":
        """The split in which each `size` neighbouring ranks are one, with the indices of all."""
        _, b, part = self.indices.shape
        joined = self.indices.view(-1, size, b, part).transpose(1, 2).flatten(2)
        return ContextSplit(joined.sort(-1).values)

    def within(self, size: int, index: int) -> "ContextSplit":
        """How group `index` of `size` neighbouring ranks shares out the indices of `joined`."""
        own = self.indices[index * size : (index + 1) * size]
        whole = self.joined(size).indices[index]
        found = torch.searchsorted(whole.expand(size, -1, -1).contiguous(), own.contiguous())
        return ContextSplit(found)

    @cached_property
    def _order(self) -> Tensor:
        return self.indices.transpose(0, 1).flatten(1)  # [b or 1, s]

    @cached_property
    def _inverse(self) -> Tensor:
        return self._order.argsort(1)


def gather(
    t: Shaped[Tensor, "..."], index: Int[Tensor, "#b length"], dim: int
) -> Shaped[Tensor, "..."]:
    """Entries of `t` along the sequence, which is `dim` 0 or 1; the other one is the batch."""
    if len(index) == 1:
        return t.index_select(dim, index[0])
    if dim == 0:
        index = index.t()
    rows = index.view(*index.shape, *(1,) * (t.dim() - 2)).expand(*index.shape, *t.shape[2:])
    return t.gather(dim, rows)
