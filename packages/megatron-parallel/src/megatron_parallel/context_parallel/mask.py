"""Attention masks of a whole sequence as plain data, and of blocks of it by index."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from megatron_parallel.context_parallel.split import gather


@dataclass(frozen=True, eq=False)
class SequenceMask:
    """A query may attend to a key if all rules that are set allow it.

    Attributes:
        document_ids: `[b, s]`. A query may only attend to keys of its document. -1 is padding,
            which neither attends nor is attended to.
        positions: `[b, s]`. Positions that `causal`, `window` and `prefix` compare. Defaults to
            the index in the sequence.
        causal: Whether a query may only attend to keys at its own position and before.
        window: A query may only attend to keys less than this number of positions away.
        chunk: A query may only attend to keys of its chunk; positions are cut into chunks of this
            many.
        prefix: With `causal`, all queries may attend to keys at positions below this; an int or
            `[b]`.
    """

    document_ids: Int[Tensor, "b s"] | None = None
    positions: Int[Tensor, "b s"] | None = None
    causal: bool = True
    window: int | None = None
    prefix: Int[Tensor, " b"] | int | None = None
    chunk: int | None = None

    def block(self, queries: Int[Tensor, "#b s"], keys: Int[Tensor, "#b t"]) -> "BlockMask":
        """Returns the mask for the queries and the keys at these indices."""
        ids, positions = self.document_ids, self.positions
        return BlockMask(
            query_indices=queries,
            key_indices=keys,
            query_positions=queries if positions is None else gather_rows(positions, queries),
            key_positions=keys if positions is None else gather_rows(positions, keys),
            query_document_ids=None if ids is None else gather_rows(ids, queries),
            key_document_ids=None if ids is None else gather_rows(ids, keys),
            causal=self.causal,
            window=self.window,
            prefix=self.prefix,
            chunk=self.chunk,
        )


@dataclass(frozen=True, eq=False)
class BlockMask:
    """The rules of a `SequenceMask` for some queries and some keys.

    Attributes:
        query_indices: `[b or 1, s]`, indices in the whole sequence.
        key_indices: `[b or 1, t]`, indices in the whole sequence.
        query_positions: `[b or 1, s]`.
        key_positions: `[b or 1, t]`.
        query_document_ids: `[b, s]`.
        key_document_ids: `[b, t]`.
        causal: As in `SequenceMask`.
        window: As in `SequenceMask`.
        prefix: As in `SequenceMask`.
        chunk: As in `SequenceMask`.
        all_allowed: Whether all queries are known to be allowed to attend to all keys.
        triangular: Whether queries and keys are known to be the same tokens, and a query to be
            allowed to attend to itself and the keys before it in this block, and to no others.
    """

    query_indices: Int[Tensor, "#b s"]
    key_indices: Int[Tensor, "#b t"]
    query_positions: Int[Tensor, "#b s"]
    key_positions: Int[Tensor, "#b t"]
    query_document_ids: Int[Tensor, "b s"] | None
    key_document_ids: Int[Tensor, "b t"] | None
    causal: bool
    window: int | None
    prefix: Int[Tensor, " b"] | int | None
    chunk: int | None = None
    all_allowed: bool = False
    triangular: bool = False

    def allowed(self) -> Bool[Tensor, "#b s t"]:
        """Returns the mask as a tensor; True means that the query may attend to the key."""
        query, key = self.query_positions[:, :, None], self.key_positions[:, None, :]
        allowed = torch.ones_like(query - key, dtype=torch.bool)
        if self.causal:
            allowed = key <= query
            if self.prefix is not None:
                first = self.prefix
                first = first[:, None, None] if isinstance(first, Tensor) else first
                allowed = allowed | (key < first)
        if self.window is not None:
            allowed = allowed & ((query - key).abs() < self.window)
        if self.chunk is not None:
            allowed = allowed & (query // self.chunk == key // self.chunk)
        if self.query_document_ids is not None and self.key_document_ids is not None:
            ids = self.query_document_ids[:, :, None]
            allowed = allowed & (ids == self.key_document_ids[:, None, :]) & (ids >= 0)
        return allowed


def gather_rows(t: Int[Tensor, "b s"], indices: Int[Tensor, "#b n"]) -> Int[Tensor, "b n"]:
    """Returns the entries of `t` at `indices`, which may be the same for all rows."""
    return gather(t, indices, 1)
