"""Who may attend to whom, as plain data."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from megatron_kernels.errors import KernelError


@dataclass(frozen=True, eq=False)
class Mask:
    """The attention mask contract. A query may attend to a key when every rule that is set allows it.

    Attributes:
        document_ids: int32 `[b, t]`: only tokens of one document see each other. -1 is padding, which
            neither attends nor is attended to: its output is zero.
        positions: int32 `[b, t]`: the places that `causal`, `window` and `prefix` compare; None for
            the index in the sequence. They are needed when the keys are not in order, as under
            context parallelism. The position ids of an embedding, which may restart in every
            document, serve only together with `document_ids`.
        causal: A query sees keys at its own place and before.
        window: A query sees only keys less than this many places away, itself counted.
        prefix: With `causal`: keys at places below this number are seen by everyone (prefix language
            models); an int, or int32 `[b]`.
        query_document_ids: int32 `[b, s]`, where the queries are not a range of the keys (a block of
            ring attention); None for `document_ids` from the query offset on.
        query_positions: int32 `[b, s]`, likewise.
        dense: bool `[b or 1, s, t]`, True = may attend: the rules written out, from `prepare`.
    """

    document_ids: Int[Tensor, "b t"] | None = None
    positions: Int[Tensor, "b t"] | None = None
    causal: bool = True
    window: int | None = None
    prefix: Int[Tensor, " b"] | int | None = None
    query_document_ids: Int[Tensor, "b s"] | None = None
    query_positions: Int[Tensor, "b s"] | None = None
    dense: Bool[Tensor, "b_or_1 s t"] | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise KernelError(
                f"mask: window is {self.window}; a token at least sees itself, use 1 up"
            )
        for query, key in (
            ("query_document_ids", "document_ids"),
            ("query_positions", "positions"),
        ):
            if getattr(self, query) is not None and getattr(self, key) is None:
                raise KernelError(f"mask: {query} is given without {key}")

    @property
    def by_index(self) -> bool:
        """Whether the rules follow from indices alone: no document, position or prefix is given."""
        return (
            self.document_ids is None
            and self.positions is None
            and self.dense is None
            and (self.prefix is None or not self.causal)
        )

    def limits(self, keys: int) -> bool:
        """Whether the window excludes anything among this many keys that are in order."""
        return self.window is not None and self.window < keys

    def prepare(
        self, queries: int, keys: int, query_offset: int = 0, *, device: torch.device | str = "cpu"
    ) -> "Mask":
        """The same mask with `dense` written out, unless attention needs no mask tensor.

        A model calls this once per step, so that its layers do not each write out the same mask.
        """
        if self.dense is not None or (self.by_index and not self.limits(keys)):
            return self
        return replace(self, dense=self.allowed(queries, keys, query_offset, device=device))

    def allowed(
        self, queries: int, keys: int, query_offset: int = 0, *, device: torch.device | str = "cpu"
    ) -> Bool[Tensor, "b_or_1 s t"]:
        """The rules written out: `[b or 1, queries, keys]`, True = may attend.

        Args:
            queries: Number of queries s.
            keys: Number of keys t.
            query_offset: Index of the first query among the keys.
            device: Where to make it when no tensor of the mask says.
        """
        if self.dense is not None:
            return self.dense[:, :queries, :keys]
        inside = slice(query_offset, query_offset + queries)
        if self.positions is None:
            key_place = torch.arange(keys, device=device)[None, None, :]
            query_place = torch.arange(query_offset, query_offset + queries, device=device)
            query_place = query_place[None, :, None]
        else:
            own = (
                self.positions[:, inside] if self.query_positions is None else self.query_positions
            )
            key_place, query_place = self.positions[:, None, :keys], own[:, :, None]
        if self.causal:
            allowed = key_place <= query_place
            if self.prefix is not None:
                first = self.prefix
                allowed = allowed | (
                    key_place < (first[:, None, None] if isinstance(first, Tensor) else first)
                )
        else:
            allowed = (key_place == key_place).expand(-1, queries, -1)
        if self.window is not None:
            allowed = allowed & ((query_place - key_place).abs() < self.window)
        if self.document_ids is not None:
            ids = self.document_ids
            own = ids[:, inside] if self.query_document_ids is None else self.query_document_ids
            same = (own[:, :, None] == ids[:, None, :keys]) & (own >= 0)[:, :, None]
            allowed = allowed & same
        return allowed
