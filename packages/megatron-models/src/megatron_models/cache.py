"""Keys and values of tokens already seen, so that decoding computes only the new ones."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from megatron_parallel import Mesh
from torch import Tensor

from megatron_models.components.attention.config import AttentionConfig
from megatron_models.errors import ConfigError


@runtime_checkable
class KVCache(Protocol):
    """What a model asks of a cache. Layers are called by their global number.

    A forward pass of ``t`` new tokens reads `length` once, calls `append` once for each layer, and
    leaves `length` larger by ``t``.
    """

    @property
    def length(self) -> int:
        """Positions that every layer has seen: the absolute position of the next token."""
        ...

    def append(
        self, layer: int, k: Float[Tensor, "t b g d"], v: Float[Tensor, "t b g d"]
    ) -> tuple[Float[Tensor, "all b g d"], Float[Tensor, "all b g d"]]:
        """Add the keys and values of new tokens; return those of all tokens, old and new."""
        ...


class StaticKVCache:
    """A cache of fixed size for one batch, allocated once; every sequence has the same length.

    Args:
        config: the model's configuration.
        mesh: the model's mesh; each tensor-parallel rank keeps its own key/value heads.
        batch_size: sequences.
        max_length: tokens there is room for, at most the model's positions.
        dtype: of keys and values.
        device: where they are kept; by default the mesh's device.
        layers: global numbers of the layers it serves, ``map(int, stage.layers)`` for a pipeline
            stage; by default all.

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

    @property
    def length(self) -> int:
        """Positions that every layer has seen."""
        return min(self._filled)

    @property
    def max_length(self) -> int:
        """Positions there is room for."""
        return self._store.shape[2]

    def append(
        self, layer: int, k: Float[Tensor, "t b g d"], v: Float[Tensor, "t b g d"]
    ) -> tuple[Float[Tensor, "all b g d"], Float[Tensor, "all b g d"]]:
        """Write the new keys and values in place; return views of all so far."""
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
        return keys[:end], values[:end]

    def truncate(self, length: int) -> None:
        """Forget all positions from ``length`` on; 0 empties the cache for another batch."""
        self._filled = [min(filled, length) for filled in self._filled]
