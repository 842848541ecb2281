"""The attention mask as plain data."""

from dataclasses import dataclass, replace
from typing import Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from megatron_kernels.errors import KernelError

_PAIRS_OF_A_CALL: Final = 1000
"""Pairs of tokens, for all heads, that a CPU computes in the time that starting a call takes."""


@dataclass(frozen=True, eq=False)
class Mask:
    """An attention mask: a query may attend to a key if all given rules allow it.

    Attributes:
        document_ids: int32 `[b, t]`. Only tokens of the same document attend to each other. -1 is
            padding, which neither attends nor is attended to; its output is zero.
        positions: int32 `[b, t]`, the positions that `causal`, `window` and `prefix` compare. None
            means the index in the sequence. Needed if the keys are not in order, as under context
            parallelism. Position ids that restart in every document need `document_ids` too.
        causal: Whether a query attends only to keys at its own position and before.
        window: A query attends only to keys less than this many positions away, its own included.
        chunk: A query attends only to keys of its own chunk: positions are cut into chunks of this
            many (Llama 4's chunked attention).
        prefix: With `causal`: all queries attend to keys at positions below this number (prefix
            language models). An int, or int32 `[b]`.
        query_document_ids: int32 `[b, s]`, if the queries are not a range of the keys (a block of
            ring attention). None means `document_ids` from the query offset on.
        query_positions: int32 `[b, s]`, likewise for `positions`.
        dense: bool `[b or 1, queries, keys]`, True = may attend: the rules as a tensor, from
            `prepare`. While a model generates, `document_ids` may describe more keys than these.
        ascending: Whether queries and keys are known to be the same tokens with ascending
            `positions`, so that `causal` alone needs no tensor.
        prepared: Whether `prepare` made `dense` from the other rules. Kernels that compute rules
            themselves then do not read it.
        runs: The lengths of the documents of each row in order, padding as a negative length: what
            the host knows of `document_ids`, from `prepare`.
    """

    document_ids: Int[Tensor, "b t"] | None = None
    positions: Int[Tensor, "b t"] | None = None
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    prefix: Int[Tensor, " b"] | int | None = None
    query_document_ids: Int[Tensor, "b s"] | None = None
    query_positions: Int[Tensor, "b s"] | None = None
    dense: Bool[Tensor, "b_or_1 queries keys"] | None = None
    ascending: bool = False
    prepared: bool = False
    runs: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise KernelError(f"mask: window is {self.window}; use at least 1 (the token itself)")
        if self.chunk is not None and self.chunk < 1:
            raise KernelError(f"mask: chunk is {self.chunk}; use at least 1 (the token itself)")
        if self.query_document_ids is not None and self.document_ids is None:
            raise KernelError("mask: query_document_ids needs document_ids")
        if self.query_positions is not None and self.positions is None:
            raise KernelError("mask: query_positions needs positions")

    @property
    def index_only(self) -> bool:
        """Whether only `causal` and `window` limit attention, by the index in the sequence."""
        return self.keys_in_order and self.document_ids is None and self.chunk is None

    @property
    def keys_in_order(self) -> bool:
        """Whether a causal mask hides every key after the last query, besides other rules."""
        return (
            self.positions is None
            and self.dense is None
            and (self.prefix is None or not self.causal)
        )

    @property
    def _unlimited(self) -> bool:
        """Whether no rule but `causal` limits attention."""
        return (
            self.document_ids is None
            and self.dense is None
            and self.window is None
            and self.chunk is None
            and (self.prefix is None or not self.causal)
        )

    @property
    def has_rules(self) -> bool:
        """Whether the rules determine the mask: without `dense`, or as what `prepare` wrote out."""
        return self.dense is None or self.prepared

    @property
    def compares_positions(self) -> bool:
        """Whether a rule compares `positions`, which are not known to be in order."""
        if self.positions is None or not self.has_rules:
            return False
        if self._unlimited:
            return self.causal and not self.ascending
        return self.causal or self.window is not None or self.chunk is not None

    def narrowed(self, window: int | None = None, chunk: int | None = None) -> "Mask":
        """Returns the mask with further limits; the narrower of two windows counts.

        Raises:
            KernelError: The mask is dense, or has chunks of another size.
        """
        if window is None and chunk is None:
            return self
        if self.dense is not None:
            raise KernelError(
                "mask: a dense mask cannot be narrowed to a window or chunks; pass it as rules"
            )
        if None not in (chunk, self.chunk) and chunk != self.chunk:
            raise KernelError(f"mask: chunk is {self.chunk} and would become {chunk}; use one size")
        windows = [each for each in (window, self.window) if each is not None]
        own = self.chunk if chunk is None else chunk
        return replace(self, window=min(windows, default=None), chunk=own)

    def documents_alone(self, queries: int, keys: int, query_offset: int) -> bool:
        """Returns whether `runs` is known and `causal` and `window` alone limit each document."""
        rules = (
            self.positions,
            self.query_positions,
            self.query_document_ids,
            self.dense,
            self.chunk,
        )
        return (
            self.runs is not None
            and query_offset == 0
            and queries == keys == sum(map(abs, self.runs[0]))
            and all(rule is None for rule in rules)
            and (self.prefix is None or not self.causal)
        )

    def prepare(
        self,
        queries: int,
        keys: int,
        query_offset: int = 0,
        *,
        device: torch.device | str = "cpu",
        read_lengths: bool = False,
    ) -> "Mask":
        """Returns the same mask with `dense` filled in, unless attention needs no mask tensor.

        A model calls this once per step, so that its layers share one tensor. Packed documents on a
        CPU get `runs` instead, with which attention computes document by document.

        Args:
            queries: Number of queries s.
            keys: Number of keys t.
            query_offset: Index of the first query among the keys.
            device: Device of the tensor.
            read_lengths: Whether packed documents on a device get `runs` too, which waits for the
                device once. A backend that takes all documents in one call needs them.
        """
        runs = self._runs(queries, keys, query_offset, read_lengths)
        if runs is not None:
            return replace(self, runs=runs)
        written, _ = self.lower(queries, keys, query_offset, device=device)
        if written is None:
            return self
        return replace(self, dense=written, prepared=self.has_rules)

    def _runs(
        self, queries: int, keys: int, query_offset: int, read_lengths: bool
    ) -> tuple[tuple[int, ...], ...] | None:
        """Returns the lengths of documents if the host has them and few calls compute them.

        With ``read_lengths`` they are read from a device, and their number does not matter.
        """
        ids = self.document_ids
        given = self.positions, self.query_document_ids, self.dense, self.chunk
        if (
            torch.compiler.is_compiling()
            or type(ids) is not Tensor  # an imagined tensor has no values
            or not (ids.device.type == "cpu" or read_lengths)
            or any(rule is not None for rule in given)
            or (self.prefix is not None and self.causal)
            or not (queries == keys == ids.shape[1] and query_offset == 0)
        ):
            return None
        ids = ids.cpu()
        changes = ids[:, 1:] != ids[:, :-1]
        calls = len(ids) + int(changes.sum())
        if calls * _PAIRS_OF_A_CALL > ids.numel() * keys and not read_lengths:
            return None
        found = []
        for row, changed in zip(ids, changes, strict=True):
            starts = [0, *(changed.nonzero().flatten() + 1).tolist()]
            numbers = row[starts].tolist()
            documents = [number for number in numbers if number >= 0]
            if len({*documents}) < len(documents):
                return None  # a document in several places
            ends = [*starts[1:], keys]
            found.append(
                tuple(
                    end - start if number >= 0 else start - end
                    for number, start, end in zip(numbers, starts, ends, strict=True)
                )
            )
        return tuple(found)

    def lower(
        self, queries: int, keys: int, query_offset: int = 0, *, device: torch.device | str = "cpu"
    ) -> tuple[Bool[Tensor, "b_or_1 s t"] | None, bool]:
        """Returns the mask tensor for a kernel, or None, and whether None means causal.

        No tensor is needed if the rules depend on indices alone and window and chunk are at least
        as wide as the sequence: without `causal`, for a single query after all keys, and for
        queries that are the keys. Positions that no rule compares, or that ascend, need none.
        """
        if self._unlimited:
            if not self.causal:
                return None, False
            if self.ascending:
                return None, True
        end = max(keys, query_offset + queries)
        if self.positions is None and self.chunk is not None and self.chunk >= end:
            return replace(self, chunk=None).lower(queries, keys, query_offset, device=device)
        wide = self.window is None or self.window >= end
        if self.index_only and wide:
            if not self.causal or (queries == 1 and keys <= query_offset + 1):
                return None, False
            if query_offset == 0 and queries == keys:
                return None, True
        return self.allowed(queries, keys, query_offset, device=device), False

    def allowed(
        self, queries: int, keys: int, query_offset: int = 0, *, device: torch.device | str = "cpu"
    ) -> Bool[Tensor, "b_or_1 s t"]:
        """Returns the rules as a tensor `[b or 1, queries, keys]`, True = may attend.

        Args:
            queries: Number of queries s.
            keys: Number of keys t.
            query_offset: Index of the first query among the keys.
            device: Device of the result if the mask has no tensor.

        Raises:
            KernelError: A tensor of the mask does not cover these queries and keys.
        """
        if self.dense is not None:
            self._covers("dense", self.dense, (queries, keys))
            return self.dense
        allowed = self._by_position(queries, keys, query_offset, device)
        documents = self.documents_of(queries, keys, query_offset)
        if documents is None:
            return allowed
        of_queries, of_keys = documents
        same = of_queries[:, :, None] == of_keys[:, None, :]
        return allowed & same & (of_queries >= 0)[:, :, None]

    def documents_of(
        self, queries: int, keys: int, query_offset: int = 0
    ) -> tuple[Int[Tensor, "b s"], Int[Tensor, "b t"]] | None:
        """Returns the documents of the queries and of the keys, or None if no rule compares them.

        Arguments and errors are those of `allowed`.
        """
        if self.document_ids is None:
            return None
        of_keys = self.document_ids[:, :keys]
        of_queries = self.query_document_ids
        if of_queries is None:
            of_queries = self.document_ids[:, query_offset : query_offset + queries]
        self._covers("document_ids", of_keys, (keys,))
        self._covers("document_ids of the queries", of_queries, (queries,))
        return of_queries, of_keys

    def positions_of(
        self, queries: int, keys: int, query_offset: int = 0
    ) -> tuple[Int[Tensor, "b s"], Int[Tensor, "b t"]] | None:
        """Returns the positions of the queries and of the keys, or None if they are the indices.

        Arguments and errors are those of `allowed`.
        """
        if self.positions is None:
            return None
        of_keys = self.positions[:, :keys]
        of_queries = self.query_positions
        if of_queries is None:
            of_queries = self.positions[:, query_offset : query_offset + queries]
        self._covers("positions", of_keys, (keys,))
        self._covers("positions of the queries", of_queries, (queries,))
        return of_queries, of_keys

    def _by_position(
        self, queries: int, keys: int, query_offset: int, device: torch.device | str
    ) -> Tensor:
        """Returns the rules that compare positions: causal, prefix, window and chunk."""
        query, key = self._positions(queries, keys, query_offset, device)
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
        if self.chunk is not None:
            allowed = allowed & (query // self.chunk == key // self.chunk)
        return allowed

    def distance(
        self, queries: int, keys: int, query_offset: int = 0, *, device: torch.device | str = "cpu"
    ) -> Int[Tensor, "b_or_1 s t"]:
        """Returns the distance of each query and key in positions, at least 0.

        Arguments and errors are those of `allowed`.
        """
        return self.relative_positions(queries, keys, query_offset, device=device).abs()

    def relative_positions(
        self, queries: int, keys: int, query_offset: int = 0, *, device: torch.device | str = "cpu"
    ) -> Int[Tensor, "b_or_1 s t"]:
        """Returns the position of each key minus that of the query.

        Arguments and errors are those of `allowed`.
        """
        query, key = self._positions(queries, keys, query_offset, device)
        return key - query

    def _positions(
        self, queries: int, keys: int, query_offset: int, device: torch.device | str
    ) -> tuple[Tensor, Tensor]:
        """Returns positions `[b or 1, s, 1]` of queries and `[b or 1, 1, t]` of keys."""
        known = self.positions_of(queries, keys, query_offset)
        if known is None:
            of_keys = torch.arange(keys, device=device)[None]
            of_queries = torch.arange(query_offset, query_offset + queries, device=device)[None]
        else:
            of_queries, of_keys = known
        return of_queries[:, :, None], of_keys[:, None, :]

    @staticmethod
    def _covers(name: str, tensor: Tensor, size: tuple[int, ...]) -> None:
        if tuple(tensor.shape[1:]) != size:
            actual, needed = list(tensor.shape[1:]), list(size)
            raise KernelError(
                f"mask: {name} is of size {actual}, but this attention needs {needed}; build the "
                "mask for the same queries and keys"
            )
