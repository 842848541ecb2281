"""Who may attend to whom, as plain data over a whole sequence, cut into blocks by place."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from megatron_parallel.context_parallel.split import gather


@dataclass(frozen=True, eq=False)
class SequenceMask:
    """A query may attend to a key when every rule that is set allows it.

    Attributes:
        document_ids: `[b, s]`: only tokens of one document see each other; -1 is padding, which
            neither attends nor is attended to.
        positions: `[b, s]`: what `causal`, `window` and `prefix` compare; None for the place in the
            sequence.
        causal: A query sees keys at its own position and before.
        window: A query sees only keys less than this many positions away.
        prefix: With `causal`: keys at positions below this are seen by all; an int or `[b]`.
    """

    document_ids: Int[Tensor, "b s"] | None = None
    positions: Int[Tensor, "b s"] | None = None
    causal: bool = True
    window: int | None = None
    prefix: Int[Tensor, " b"] | int | None = None

    def block(self, queries: Int[Tensor, "#b s"], keys: Int[Tensor, "#b t"]) -> "BlockMask":
        """Returns the mask of the queries and the keys at these indices."""
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
        )


@dataclass(frozen=True, eq=False)
class BlockMask:
    """The rules of a `SequenceMask` for some queries and some keys.

    Attributes:
        query_indices: `[b or 1, s]`, in the whole sequence.
        key_indices: `[b or 1, t]`.
        query_positions: `[b or 1, s]`.
        key_positions: `[b or 1, t]`.
        query_document_ids: `[b, s]`.
        key_document_ids: `[b, t]`.
        causal: As in `SequenceMask`.
        window: As in `SequenceMask`.
        prefix: As in `SequenceMask`.
        all_allowed: Whether every query is known to see every key.
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
    all_allowed: bool = False

    def allowed(self) -> Bool[Tensor, "#b s t"]:
        """Returns the rules written out; True = may attend."""
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
        if self.query_document_ids is not None and self.key_document_ids is not None:
            ids = self.query_document_ids[:, :, None]
            allowed = allowed & (ids == self.key_document_ids[:, None, :]) & (ids >= 0)
        return allowed


def gather_rows(t: Int[Tensor, "b s"], indices: Int[Tensor, "#b n"]) -> Int[Tensor, "b n"]:
    """Entries of `t` at `indices`, which may be the same for all rows."""
    return gather(t, indices, 1)
