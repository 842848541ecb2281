"""Dropout of one forward pass: where it acts, and which key finds which mask.

| site | number | layer | of | channels |
|---|---|---|---|---|
| embedding | 0 | -1 | the embedding's sum `[s, b, h]` | hidden |
| attention probabilities | 1 | its own | `[s, b, n, t]` | head number * t + key position |
| attention output | 2 | its own | `[s, b, h]`, before it is added | hidden |
| feed-forward output | 3 | its own | `[s, b, h]`, before it is added | hidden |
| cross-attention probabilities | 4 | its own | `[s, b, n, t]` | head number * t + key position |
| cross-attention output | 5 | its own | `[s, b, h]`, before it is added | hidden |
| decoder's embedding | 6 | -1 | the embedding's sum `[s, b, h]` | hidden |

Heads, positions and layers are global numbers, so an element is kept or dropped whoever computes
it. Behind an encoder, a decoder's layers count on from the encoder's. The numbers are part of every
training curve and do not change.
"""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from megatron_parallel import Axis, DropoutKey, keyed_dropout
from torch import Tensor

from megatron_models.components.dropout_sites import ATTENTION_PROBABILITIES
from megatron_models.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Dropout:
    """What a forward pass drops. There is no state: a pass without one drops nothing.

    Attributes:
        key: of the whole sequences of the micro-batch, ``[s, b]``, also where sequence parallelism
            cuts them: the same on all tensor-parallel ranks and pipeline stages.
        hidden: probability after the embedding and after attention and feed-forward layer.
        attention: probability of attention's weights. They are then written out: only the
            reference backend of attention, whose memory grows with the square of the length,
            applies it.
        places: of each token in the sequence that it was taken from, where a row of the
            micro-batch is made of parts of several; by default rows are sequences.
        length: of those sequences.

    Raises:
        ConfigError: a probability not in ``0 <= p < 1``.
    """

    key: DropoutKey
    hidden: float = 0.0
    attention: float = 0.0
    places: Int[Tensor, "b s"] | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("hidden", self.hidden), ("attention", self.attention)):
            if not 0.0 <= value < 1.0:
                raise ConfigError(f"{name} dropout {value} is not in 0 <= p < 1")


@dataclass(frozen=True, eq=False)
class StageDropout:
    """A `Dropout` as the layers of this rank apply it; `stream` is the key of its positions."""

    given: Dropout
    stream: DropoutKey

    @classmethod
    def of(
        cls,
        given: Dropout,
        cut: Axis | None,
        places: Int[Tensor, "b_or_1 part"] | None = None,
    ) -> "StageDropout":
        """Prepares a pass in which ``cut`` cuts the sequence, if anything does.

        With context parallelism the sequence it cuts is the rank's, at ``places`` of the whole.
        """
        stream = given.key if places is None else given.key.select(places)
        return cls(given, stream if cut is None else stream.part(cut))

    def hidden(self, x: Float[Tensor, "s b h"], layer: int, site: int) -> Float[Tensor, "s b h"]:
        """Drops elements of what is added to the residual stream."""
        return keyed_dropout(x, self.given.hidden, self.stream, layer=layer, site=site)

    def probabilities(
        self,
        p: Float[Tensor, "b n s t"],
        layer: int,
        first_head: int,
        places: Int[Tensor, "b_or_1 s"] | None = None,
        keys: Int[Tensor, "b_or_1_too t"] | None = None,
        site: int = ATTENTION_PROBABILITIES,
    ) -> Float[Tensor, "b n s t"]:
        """Drops attention probabilities of heads ``first_head``, ``first_head + 1``, ...

        ``places`` of the queries and of the ``keys`` are in the whole sequence; all by default.
        """
        by_query = p.permute(2, 0, 1, 3)
        if torch.compiler.is_compiling():  # Dynamo writes results into contiguous memory only
            by_query = by_query.contiguous()
        key = self.given.key if places is None else self.given.key.select(places)
        drop = partial(keyed_dropout, p=self.given.attention, layer=layer, site=site)
        numbers = self.given.places
        if numbers is not None:  # keys are known by where they came from
            keys = numbers if keys is None else numbers.gather(1, keys.expand(len(numbers), -1))
        if keys is None:
            dropped = drop(by_query, key=key, channels=first_head * p.shape[-1])
        else:
            length = self.given.length or self.given.key.word0.shape[0]
            heads = torch.arange(first_head, first_head + p.shape[1], device=p.device) * length
            all_channels = heads[:, None] + keys[:, None, :]  # [b or 1, n, t]
            parts = len(all_channels)  # of the batch: its samples, if their keys differ
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
