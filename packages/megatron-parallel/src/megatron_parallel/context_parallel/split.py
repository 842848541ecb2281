"""Splits of a sequence over context-parallel ranks.

Under a causal mask the token with index `i` attends to `i + 1` keys, so contiguous parts are
unequal work: the last of 4 ranks would have 7 times the work of the first. The zig-zag split cuts
the sequence into `2 n` slices, and rank `r` of `n` holds slices `r` and `2 n - 1 - r`, which is
equal work for all `r`. If packed documents do not attend to each other, only a zig-zag inside each
document is balanced.
"""

from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from megatron_parallel.errors import LayoutError
from megatron_parallel.host_copy import to_device


def check_length(length: int, ranks: int) -> None:
    """Verifies that a sequence of `length` tokens can be cut over `ranks` ranks.

    Raises:
        LayoutError: The length is not a multiple of `2 * ranks`.
    """
    if length % (2 * ranks):
        below = length // (2 * ranks) * 2 * ranks
        near = f"{below} or {below + 2 * ranks}" if below else str(2 * ranks)
        raise LayoutError(
            f"a sequence of {length} tokens cannot be cut into 2 x {ranks} equal slices for "
            f"context parallelism; use a multiple of {2 * ranks}, for example {near}"
        )


@dataclass(frozen=True, eq=False)
class HostRows:
    """What the host knows of a split that depends on the data, without waiting for the device.

    Attributes:
        indices: `ContextSplit.indices`, on the host.
        document_ids: Documents of the whole sequences; neighbours with equal ids are one document.
    """

    indices: Int[Tensor, "ranks b_or_1 part"]
    document_ids: Int[Tensor, "b s"]


@dataclass(frozen=True, eq=False)
class ContextSplit:
    """The indices of each rank, ascending. Each index of the sequence belongs to one rank.

    Attributes:
        indices: int64 `[ranks, b, part]`; `b` is 1 if all samples are cut alike.
        ranges: The same indices for each rank, in order, if they do not depend on the data. With
            them the host knows the split without reading `indices`.
        host: Indices and documents on the host, if `with_documents` or `per_document` got them
            there. With them `plan_ring` does not wait for the device.
    """

    indices: Int[Tensor, "ranks b part"]
    ranges: tuple[tuple[range, ...], ...] | None = None
    host: HostRows | None = None
    # Before Python 3.12, compiled code cannot contain the lock of functools.cached_property.
    _made: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def zigzag(cls, length: int, ranks: int, device: torch.device | str = "cpu") -> "ContextSplit":
        """Returns the split with slices `r` and `2 n - 1 - r` for rank `r`, as in Megatron.

        Raises:
            LayoutError: The length is not a multiple of `2 * ranks`.
        """
        check_length(length, ranks)
        slices = torch.arange(length, device=device).view(2 * ranks, -1)
        indices = torch.cat([slices[:ranks], slices[ranks:].flip(0)], 1)[:, None]
        part = length // (2 * ranks)
        starts = [(r * part, (2 * ranks - 1 - r) * part) for r in range(ranks)]
        return cls(indices, tuple(tuple(range(i, i + part) for i in pair) for pair in starts))

    def to(self, device: torch.device | str) -> "ContextSplit":
        """Returns the split on a device; the transfer may still be in progress."""
        return replace(self, indices=to_device(self.indices, device))

    def with_documents(self, document_ids: Int[Tensor, "b s"]) -> "ContextSplit":
        """Returns the split with the documents of its sequences, for masks that separate them.

        A split or documents on a device stay as they are: `plan_ring` then waits for the device.
        """
        if document_ids.device.type != "cpu" or self.indices.device.type != "cpu":
            return self
        return replace(self, host=HostRows(self.indices, document_ids))

    @classmethod
    def per_document(cls, document_ids: Int[Tensor, "b s"], ranks: int) -> "ContextSplit":
        """Returns the split with a zig-zag inside each document, without padding.

        All ranks hold the same number of tokens. The first `length mod 2n` tokens of a document,
        which have the fewest keys, do not fit into `2 n` equal slices. These tokens of all
        documents are distributed one by one, back and forth over the ranks.

        Args:
            document_ids: `[b, s]`; neighbours with equal ids are one document.
            ranks: Number of ranks.

        Raises:
            LayoutError: The length is not a multiple of `2 * ranks`.
        """
        b, length = document_ids.shape
        check_length(length, ranks)
        device, slices = document_ids.device, 2 * ranks
        indices = torch.arange(length, device=device).expand(b, -1)
        begins = torch.ones_like(document_ids, dtype=torch.bool)
        begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
        start = torch.where(begins, indices, 0).cummax(1).values
        number = begins.cumsum(1) - 1
        lengths = torch.zeros_like(indices).scatter_add_(1, number, torch.ones_like(indices))
        extent = lengths.gather(1, number)
        rest = extent % slices
        inside = indices - start - rest  # negative for tokens of the rest
        dealt = (inside < 0).cumsum(1) - 1
        own = torch.where(inside < 0, dealt % slices, inside * slices // (extent - rest).clamp(1))
        rank = torch.minimum(own, slices - 1 - own)
        order = (rank * length + indices).argsort(1)
        return cls(order.view(b, ranks, -1).transpose(0, 1)).with_documents(document_ids)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.indices.shape[0]

    @property
    def local_length(self) -> int:
        """Number of tokens of each rank."""
        return self.indices.shape[2]

    @property
    def length(self) -> int:
        """Number of tokens of the whole sequence."""
        return self.ranks * self.local_length

    def take(self, t: Shaped[Tensor, "b s *rest"], rank: int) -> Shaped[Tensor, "b part *rest"]:
        """Returns the part of a tensor over the whole sequence that `rank` holds."""
        return gather(t, self.indices[rank], 1)

    def to_sequence_order(self, t: Shaped[Tensor, "s b *rest"]) -> Shaped[Tensor, "s b *rest"]:
        """Reorders the concatenated parts of all ranks along dim 0 to the order of the sequence."""
        return gather(t, self._inverse, 0)

    def to_rank_order(self, t: Shaped[Tensor, "s b *rest"]) -> Shaped[Tensor, "s b *rest"]:
        """Returns the inverse of `to_sequence_order`."""
        return gather(t, self._order, 0)

    def joined(self, size: int) -> "ContextSplit":
        """Returns the split in which every `size` neighbouring ranks are merged into one."""
        ranges, host = self.ranges, self.host
        if host is not None:
            host = replace(host, indices=_joined(host.indices, size))
        if ranges is not None:
            groups = (ranges[i : i + size] for i in range(0, len(ranges), size))
            ranges = tuple(
                tuple(sorted(chain.from_iterable(group), key=lambda each: each.start))
                for group in groups
            )
        return ContextSplit(_joined(self.indices, size), ranges, host)

    def within(self, size: int, index: int) -> "ContextSplit":
        """Returns the split of the tokens of group `index` over its `size` neighbouring ranks.

        The groups are the merged ranks of `joined(size)`.
        """
        own = self.indices[index * size : (index + 1) * size]
        whole = self.joined(size).indices[index]
        found = torch.searchsorted(whole.expand(size, -1, -1).contiguous(), own.contiguous())
        return ContextSplit(found)

    @property
    def _order(self) -> Tensor:
        if "order" not in self._made:
            self._made["order"] = self.indices.transpose(0, 1).flatten(1)  # [b or 1, s]
        return self._made["order"]

    @property
    def _inverse(self) -> Tensor:
        if "inverse" not in self._made:
            self._made["inverse"] = self._order.argsort(1)
        return self._made["inverse"]


def _joined(indices: Tensor, size: int) -> Tensor:
    _, b, part = indices.shape
    joined = indices.view(-1, size, b, part).transpose(1, 2).flatten(2)
    return joined.sort(-1).values


def gather(
    t: Shaped[Tensor, "..."], index: Int[Tensor, "#b length"], dim: int
) -> Shaped[Tensor, "..."]:
    """Returns entries of `t` along the sequence, `dim` 0 or 1; the other dim is the batch."""
    if len(index) == 1:
        return t.index_select(dim, index[0])
    if dim == 0:
        index = index.t()
    rows = index.view(*index.shape, *(1,) * (t.dim() - 2)).expand(*index.shape, *t.shape[2:])
    return t.gather(dim, rows)
