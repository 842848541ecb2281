"""Who may attend to whom, as plain data."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from megatron_kernels.errors import KernelError


@dataclass(frozen=True, eq=False)
class Mask:
    """The attention mask contract: a query may attend to a key when every rule set allows it.

    Attributes:
        document_ids: int32 `[b, t]`: only tokens of one document see each other. -1 is padding,
            which neither attends nor is attended to: its output is zero.
        positions: int32 `[b, t]`: the places that `causal`, `window` and `prefix` compare; None for
            the index in the sequence. They are needed when the keys are not in order, as under
            context parallelism. The position ids of an embedding, which may restart in every
            document, serve only together with `document_ids`.
        causal: A query sees keys at its own place and before.
        window: A query sees only keys less than this many places away, itself counted.
        prefix: With `causal`: keys at places below this number are seen by everyone (prefix
            language models); an int, or int32 `[b]`.
        query_document_ids: int32 `[b, s]`, where the queries are not a range of the keys (a block
            of ring attention); None for `document_ids` from the query offset on.
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
            raise KernelError(f"mask: window is {self.window}; use 1 (a token sees itself) up")
        if self.query_document_ids is not None and self.document_ids is None:
            raise KernelError("mask: query_document_ids is given without document_ids")
        if self.query_positions is not None and self.positions is None:
            raise KernelError("mask: query_positions is given without positions")

    @property
    def index_only(self) -> bool:
        """Whether indices alone decide: no document, position or prefix, nothing written out."""
        return self.keys_in_order and self.document_ids is None

    @property
    def keys_in_order(self) -> bool:
        """Whether, among other rules, a causal mask hides every key after the last query."""
        return (
            self.positions is None
            and self.dense is None
            and (self.prefix is None or not self.causal)
        )

    def prepare(
        self, queries: int, keys: int, query_offset: int = 0, *, device: torch.device | str = "cpu"
    ) -> "Mask":
        """Returns the same mask with `dense` written out, unless attention needs no mask tensor.

        A model calls this once per step, so that its layers do not each write out the same mask.
        """
        written, _ = self.lower(queries, keys, query_offset, device=device)
        return self if written is None else replace(self, dense=written)

    def lower(
        self, queries: int, keys: int, query_offset: int = 0, *, device: torch.device | str = "cpu"
    ) -> tuple[Bool[Tensor, "b_or_1 s t"] | None, bool]:
        """What a kernel must be told: the mask tensor, or None and whether it is plainly causal.

        No tensor is needed where indices decide and the window is at least as wide as the sequence:
        without `causal`, for one query that is the last, for queries that coincide with the keys.
        """
        wide = self.window is None or self.window >= max(keys, query_offset + queries)
        if self.index_only and wide:
            if not self.causal or (queries == 1 and keys <= query_offset + 1):
                return None, False
            if query_offset == 0 and queries == keys:
                return None, True
        return self.allowed(queries, keys, query_offset, device=device), False

    def allowed(
        self, queries: int, keys: int, query_offset: int = 0, *, device: torch.device | str = "cpu"
    ) -> Bool[Tensor, "b_or_1 s t"]:
        """Returns the rules written out: `[b or 1, queries, keys]`, True = may attend.

        Args:
            queries: Number of queries s.
            keys: Number of keys t.
            query_offset: Index of the first query among the keys.
            device: Where to make it when no tensor of the mask says.

        Raises:
            KernelError: A tensor of the mask does not cover these queries and keys.
        """
        if self.dense is not None:
            self._covers("dense", self.dense, (queries, keys), exactly=True)
            return self.dense
        allowed = self._by_position(queries, keys, query_offset, device)
        if self.document_ids is None:
            return allowed
        of_keys = self.document_ids[:, :keys]
        of_queries = self.query_document_ids
        if of_queries is None:
            of_queries = self.document_ids[:, query_offset : query_offset + queries]
        self._covers("document_ids", of_keys, (keys,))
        self._covers("document_ids of the queries", of_queries, (queries,))
        same = of_queries[:, :, None] == of_keys[:, None, :]
        return allowed & same & (of_queries >= 0)[:, :, None]

    def _by_position(
        self, queries: int, keys: int, query_offset: int, device: torch.device | str
    ) -> Tensor:
        """Returns the rules that compare places: causal, prefix and window."""
        if self.positions is None:
            of_keys = torch.arange(keys, device=device)[None]
            of_queries = torch.arange(query_offset, query_offset + queries, device=device)[None]
        else:
            of_keys = self.positions[:, :keys]
            inside = slice(query_offset, query_offset + queries)
            own = self.query_positions
            of_queries = self.positions[:, inside] if own is None else own
            self._covers("positions", of_keys, (keys,))
            self._covers("positions of the queries", of_queries, (queries,))
        key, query = of_keys[:, None, :], of_queries[:, :, None]
        if self.causal:
            allowed = key <= query
            if self.prefix is not None:
                first = self.prefix
                allowed = allowed | (
                    key < (first[:, None, None] if isinstance(first, Tensor) else first)
                )
        else:
            allowed = torch.ones_like(key, dtype=torch.bool).expand(-1, queries, -1)
        if self.window is not None:
            allowed = allowed & ((query - key).abs() < self.window)
        return allowed

    @staticmethod
    def _covers(name: str, tensor: Tensor, size: tuple[int, ...], exactly: bool = False) -> None:
        if tuple(tensor.shape[1:]) != size:
            given, wanted = list(tensor.shape[1:]), list(size)
            fit = "is" if exactly else "covers only"
            raise KernelError(f"mask: {name} {fit} {given}, this attention needs {wanted}")
