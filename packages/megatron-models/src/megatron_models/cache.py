"""State of tokens already seen, so that decoding computes only the new ones.

A layer hands its new keys and values to the cache and gets a handle, which attends for it. How they
are kept is the cache's alone to know: a dense tensor, pages, quantised. State of another kind (the
slots of a recurrent layer) is another protocol, which its layers ask for and a cache implements
beside this one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from megatron_kernels import Mask, attention
from megatron_parallel import Mesh
from torch import Tensor

from megatron_models.components.attention.config import AttentionConfig
from megatron_models.errors import ConfigError

KeysValues = tuple[Float[Tensor, "t b g d"], Float[Tensor, "t b g d"]]
"""Keys and values of tokens, of this rank's query groups."""


@runtime_checkable
class KVHandle(Protocol):
    """What the new tokens of one layer attend to."""

    def attend(
        self,
        q: Float[Tensor, "s b n d"],
        mask: Mask,
        *,
        query_offset: int = 0,
        sinks: Float[Tensor, " n"] | None = None,
        softcap: float = 0.0,
    ) -> Float[Tensor, "s b n d"]:
        """Returns attention of new tokens; arguments as for `megatron_kernels.attention`."""
        ...


@runtime_checkable
class KVCache(Protocol):
    """What a model asks of a cache. Layers are called by their number in the model.

    A forward pass of ``t`` new tokens reads `length` once, calls `update` once for each layer, and
    leaves `length` larger by ``t``.
    """

    @property
    def length(self) -> int:
        """Positions that every layer has seen: the absolute position of the next token."""
        ...

    def update(
        self, layer: int, k: Float[Tensor, "t b g d"], v: Float[Tensor, "t b g d"]
    ) -> KVHandle:
        """Adds the keys and values of new tokens; return the handle of all tokens, old and new."""
        ...


@runtime_checkable
class CrossKVCache(KVCache, Protocol):
    """A cache that keeps the encoder's side of cross-attention too, which is made once."""

    def encoder_kv(self, layer: int, new: KeysValues | None) -> KVHandle:
        """Returns the handle of the encoder's keys and values.

        Args:
            layer: its number in the model.
            new: of an encoder's output, to be kept; None in later passes, for those kept.
        """
        ...


@dataclass(frozen=True, eq=False)
class DenseKV:
    """A `KVHandle` of keys and values in two tensors, which may be views of a cache."""

    k: Float[Tensor, "t b g d"]
    v: Float[Tensor, "t b g d"]

    def attend(
        self,
        q: Float[Tensor, "s b n d"],
        mask: Mask,
        *,
        query_offset: int = 0,
        sinks: Float[Tensor, " n"] | None = None,
        softcap: float = 0.0,
    ) -> Float[Tensor, "s b n d"]:
        """Returns `megatron_kernels.attention` over these keys and values."""
        return attention(
            q, self.k, self.v, mask, query_offset=query_offset, sinks=sinks, softcap=softcap
        )


class StaticKVCache:
    """A cache of fixed size for one batch, allocated once; every sequence has the same length.

    Args:
        config: the model's configuration.
        mesh: the model's mesh; each tensor-parallel rank keeps its own key/value heads.
        batch_size: sequences.
        max_length: tokens there is room for, at most the model's positions.
        dtype: of keys and values.
        device: where they are kept; by default the mesh's device.
        layers: numbers of the layers it serves, ``map(int, stage.layers)`` for a pipeline stage; by
            default all. The decoder of an encoder-decoder counts from ``encoder_num_layers`` on.

    Raises:
        ConfigError: more positions than the model has, or no layer at all.
    """

    def __init__(
        self,
        config: AttentionConfig,
        mesh: Mesh,
        batch_size: int,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        layers: Iterable[int] | None = None,
    ) -> None:
        config.check_sequence_length(max_length)
        served = range(config.num_layers) if layers is None else layers
        self._rows = {layer: row for row, layer in enumerate(served)}
        if not self._rows:
            raise ConfigError("a cache for no layers cannot tell how many tokens were seen")
        groups = config.groups_on_rank(mesh.axis("tp").size)
        shape = (len(self._rows), 2, max_length, batch_size, groups, config.kv_channels)
        self._store = torch.empty(shape, dtype=dtype, device=device or mesh.device)
        self._filled = [0] * len(self._rows)
        self._encoded: dict[int, DenseKV] = {}

    @property
    def length(self) -> int:
        """Positions that every layer has seen."""
        return min(self._filled)

    @property
    def max_length(self) -> int:
        """Positions there is room for."""
        return self._store.shape[2]

    def update(
        self, layer: int, k: Float[Tensor, "t b g d"], v: Float[Tensor, "t b g d"]
    ) -> DenseKV:
        """Writes the new keys and values in place; return a handle of views of all so far.

        Raises:
            ConfigError: there is no room for them.
        """
        row = self._rows[layer]
        start = self._filled[row]
        end = start + len(k)
        if end > self.max_length:
            raise ConfigError(
                f"{end} positions do not fit in a cache of {self.max_length}; make it longer"
            )
        keys, values = self._store[row]
        keys[start:end] = k
        values[start:end] = v
        self._filled[row] = end
        return DenseKV(keys[:end], values[:end])

    def encoder_kv(self, layer: int, new: KeysValues | None) -> DenseKV:
        """Keeps the encoder's side of a layer as it is; return its handle.

        Raises:
            ConfigError: nothing is kept, and nothing new was given.
        """
        if new is not None:
            self._encoded[layer] = DenseKV(*new)
        elif layer not in self._encoded:
            raise ConfigError(
                f"layer {layer} attends to an encoder's output that the cache has not seen; give "
                "the source in the first pass"
            )
        return self._encoded[layer]

    def truncate(self, length: int) -> None:
        """Forgets all positions from ``length`` on; 0 empties the cache for another batch."""
        self._filled = [min(filled, length) for filled in self._filled]
        if length == 0:
            self._encoded.clear()
