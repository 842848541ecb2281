"""Dropout of one forward pass: its sites, and the key that determines each mask.

| site | number | layer | input | channels |
|---|---|---|---|---|
| embedding | 0 | -1 | sum of the embeddings `[s, b, h]` | hidden |
| attention probabilities | 1 | its own | `[s, b, n, t]` | head number * t + key index |
| attention output | 2 | its own | `[s, b, h]`, before the residual addition | hidden |
| feed-forward output | 3 | its own | `[s, b, h]`, before the residual addition | hidden |
| cross-attention probabilities | 4 | its own | `[s, b, n, t]` | head number * t + key index |
| cross-attention output | 5 | its own | `[s, b, h]`, before the residual addition | hidden |
| decoder's embedding | 6 | -1 | sum of the embeddings `[s, b, h]` | hidden |
| noise on a router's input | 7 | its own | `[s, b, h]` | hidden |
| head of a sequence | 8 | -1 | pooled stream `[1, b, h]` | hidden |

Heads, token indices and layers are global numbers, so every layout drops the same elements. In an
encoder-decoder the layers of the decoder are numbered after those of the encoder. The numbers are
part of every training curve and do not change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Int32, Int64
from megatron_kernels import DropoutHash, DropoutSite, bias_dropout_add
from megatron_parallel import (
    Axis,
    DropoutKey,
    KeptWords,
    keyed_dropout,
)
from torch import Tensor

from megatron_models.components.dropout_sites import ATTENTION_PROBABILITIES
from megatron_models.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Dropout:
    """Dropout of a forward pass. It is stateless; a pass without a `Dropout` drops nothing.

    Attributes:
        key: Key of the whole sequences of the micro-batch, ``[s, b]``, also where sequence
            parallelism cuts them. It is the same on all tensor-parallel ranks and pipeline stages.
        hidden: Probability after the embedding, attention and the feed-forward layer.
        attention: Probability for attention weights. On a CPU the backend `tiles` of attention
            applies it, on CUDA the backend `triton`. Otherwise only the reference does, whose
            memory grows with the square of the length.
        indices: Index of each token in its sequence, where a row of the micro-batch holds parts of
            several sequences. By default each row is one sequence.
        length: Length of these sequences.

    Raises:
        ConfigError: A probability is not in ``0 <= p < 1``.
    """

    key: DropoutKey
    hidden: float = 0.0
    attention: float = 0.0
    indices: Int[Tensor, "b s"] | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("hidden", self.hidden), ("attention", self.attention)):
            if not 0.0 <= value < 1.0:
                raise ConfigError(f"{name} dropout {value} is not in 0 <= p < 1")


@runtime_checkable
class DropsByLayer(Protocol):
    """A module whose dropout or noise depends on the number of its layer.

    Attributes:
        dropout_layer: The number; a tensor, so that compiled code is the same for all layers.
    """

    dropout_layer: int | Tensor


@dataclass(frozen=True, eq=False)
class StageDropout:
    """A `Dropout` for the layers of one rank.

    Attributes:
        global_dropout: The dropout of the whole micro-batch.
        stream: Key of the tokens of the residual stream on this rank.
    """

    global_dropout: Dropout
    stream: DropoutKey

    @classmethod
    def from_dropout(
        cls,
        dropout: Dropout,
        sequence_axis: Axis | None,
        indices: Int[Tensor, "b_or_1 part"] | None = None,
    ) -> "StageDropout":
        """Returns the dropout of this rank's part of the sequence.

        Args:
            dropout: The dropout of the whole micro-batch.
            sequence_axis: The axis that cuts the residual stream along the sequence, or None.
            indices: Under context parallelism, the indices of this rank's tokens in the whole
                sequence.
        """
        stream = dropout.key if indices is None else dropout.key.select(indices)
        return cls(dropout, stream if sequence_axis is None else stream.shard(sequence_axis))

    def hidden(
        self, x: Float[Tensor, "s b h"], layer: int | Int64[Tensor, ""], site: int
    ) -> Float[Tensor, "s b h"]:
        """Drops elements of a tensor that is added to the residual stream."""
        return keyed_dropout(x, self.global_dropout.hidden, self.stream, layer=layer, site=site)

    def add_hidden(
        self,
        x: Float[Tensor, "s b h"],
        added: Float[Tensor, "s b h"],
        layer: int,
        site: int,
        backend: str,
    ) -> Float[Tensor, "s b h"]:
        """Returns ``x + hidden(added)``, as one operation with this backend."""
        numbers = DropoutKey.site_numbers(self.global_dropout.hidden, layer=layer, site=site)
        words = self.stream.word0, self.stream.word1
        return bias_dropout_add(added, None, x, *words, DropoutSite(*numbers), backend=backend)

    def probabilities(
        self,
        p: Float[Tensor, "b n s t"],
        layer: int | Int64[Tensor, ""],
        first_head: int,
        query_indices: Int[Tensor, "b_or_1 s"] | None = None,
        key_indices: Int[Tensor, "b_or_1_too t"] | None = None,
        site: int = ATTENTION_PROBABILITIES,
    ) -> Float[Tensor, "b n s t"]:
        """Drops attention probabilities.

        Args:
            p: Probabilities of the heads ``first_head``, ``first_head + 1``, ...
            layer: Global layer number.
            first_head: Global number of the first head.
            query_indices: Indices of the queries in the whole sequence. Defaults to all.
            key_indices: Indices of the keys in the whole sequence. Defaults to all.
            site: Number of the dropout site.
        """
        by_query = p.permute(2, 0, 1, 3)
        if torch.compiler.is_compiling():  # Dynamo writes results into contiguous memory only
            by_query = by_query.contiguous()
        key = self.global_dropout.key
        if query_indices is not None:
            key = key.select(query_indices)
        drop = partial(keyed_dropout, p=self.global_dropout.attention, layer=layer, site=site)
        indices = self.global_dropout.indices
        if indices is not None and key_indices is None:
            key_indices = indices
        elif indices is not None and key_indices is not None:
            key_indices = indices.gather(1, key_indices.expand(len(indices), -1))
        if key_indices is None:
            dropped = drop(by_query, key=key, channels=first_head * p.shape[-1])
        else:
            length = self.global_dropout.length or self.global_dropout.key.word0.shape[0]
            heads = torch.arange(first_head, first_head + p.shape[1], device=p.device) * length
            all_channels = heads[:, None] + key_indices[:, None, :]  # [b or 1, n, t]
            parts = len(all_channels)  # one for each sample, if their key indices differ
            dropped = torch.cat(
                [
                    drop(x, key=DropoutKey(word0, word1), channels=channels)
                    for x, word0, word1, channels in zip(
                        by_query.chunk(parts, 1),
                        key.word0.chunk(parts, 1),
                        key.word1.chunk(parts, 1),
                        all_channels,
                        strict=True,
                    )
                ],
                1,
            )
        return dropped.permute(1, 2, 0, 3)


@dataclass(frozen=True, eq=False)
class ProbabilityDropout:
    """Dropout of the attention probabilities of one layer; a `HashedDropout` of the kernels.

    Attributes:
        stage: The dropout of this rank.
        layer: Global layer number.
        first_head: Global number of the first head.
        site: Number of the dropout site.
        query_indices: As in `StageDropout.probabilities`.
        key_indices: As in `StageDropout.probabilities`.
    """

    stage: StageDropout
    layer: int | Int64[Tensor, ""]
    first_head: int
    site: int = ATTENTION_PROBABILITIES
    query_indices: Int[Tensor, "b_or_1 s"] | None = None
    key_indices: Int[Tensor, "b_or_1_too t"] | None = None

    @property
    def probability(self) -> float:
        """Probability of dropping an element."""
        return self.stage.global_dropout.attention

    def __call__(self, p: Float[Tensor, "b n s t"]) -> Float[Tensor, "b n s t"]:
        """Drops elements of all probabilities."""
        return self.stage.probabilities(
            p, self.layer, self.first_head, self.query_indices, self.key_indices, self.site
        )

    def kept(
        self, samples: slice, heads: slice, length: int
    ) -> Callable[[slice, slice], Int32[Tensor, "b n s t"]]:
        """Returns a function of queries and keys: 1 for elements `__call__` keeps, 0 for others.

        Args:
            samples: Samples of the elements.
            heads: Their heads, counted from the first head.
            length: Number of keys of the call.
        """
        dropout = self.stage.global_dropout
        key = dropout.key
        if self.query_indices is not None:
            key = key.select(self.query_indices)
        rows = [word[:, samples].t().contiguous()[:, None] for word in (key.word0, key.word1)]
        columns = self._columns(samples)
        if columns is None:
            columns = torch.arange(length, dtype=torch.int32)[None]
        else:
            length = dropout.length or len(dropout.key.word0)
        first, last = heads.start + self.first_head, heads.stop + self.first_head
        numbers = torch.arange(first, last, dtype=torch.int32) * length
        return KeptWords.of(
            numbers[:, None] + columns[:, None],
            rows[0],
            rows[1],
            self.probability,
            layer=self.layer,
            site=self.site,
        ).part

    def hash_numbers(self, keys: int) -> DropoutHash:
        """Returns what a kernel needs to compute the mask of `__call__` itself.

        Args:
            keys: Number of keys of the call.
        """
        dropout, key = self.stage.global_dropout, self.stage.global_dropout.key
        if self.query_indices is not None:
            key = key.select(self.query_indices)
        columns, length = self.key_indices, keys
        if dropout.indices is not None:
            own = dropout.indices
            columns = own if columns is None else own.gather(1, columns.expand(len(own), -1))
        if columns is not None:
            length = dropout.length or len(dropout.key.word0)
        key, numbers = key.of_site(self.probability, layer=self.layer, site=self.site)
        words = key.word0, key.word1
        return DropoutHash(*words, self.first_head, length, columns, DropoutSite(*numbers))

    def _columns(self, samples: slice) -> Int[Tensor, "b_or_1 t"] | None:
        """Returns the indices of keys in their sequences, or None if they are those of the call."""
        given, rows = self.key_indices, self.stage.global_dropout.indices
        if given is not None and len(given) > 1:
            given = given[samples]
        if rows is None:
            return given
        rows = rows[samples]
        return rows if given is None else rows.gather(1, given.expand(len(rows), -1))
