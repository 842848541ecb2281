"""Caches for decoding: keys and values of attention, and the state of recurrent layers.

A layer passes its new keys and values to the cache and gets a handle, which computes attention. The
storage (a dense tensor, pages, quantized values) is private to the cache. A recurrent layer reads
its state, and writes the state after the new tokens (`StateCache`).
"""

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from megatron_kernels import PLAIN_SCORES, Mask, Scores, attention
from megatron_parallel import Mesh
from torch import Tensor

from megatron_models.components.mixer import KVSpec, StateSpec, StateTensor
from megatron_models.errors import ConfigError
from megatron_models.models.model_config import ModelConfig

State = Mapping[str, Float[Tensor, "b ..."]]
"""Recurrent state of sequences by name, as a `StateSpec` describes it."""

KeysValues = tuple[Float[Tensor, "t b g d"], Float[Tensor, "t b g d"]]
"""Keys and values of tokens, for this rank's query groups."""


@runtime_checkable
class KVHandle(Protocol):
    """Keys and values that the new tokens of one layer attend to."""

    def attend(
        self,
        q: Float[Tensor, "s b n d"],
        mask: Mask,
        *,
        query_offset: int = 0,
        scores: Scores = PLAIN_SCORES,
        backend: str = "auto",
    ) -> Float[Tensor, "s b n d"]:
        """Returns attention of the new tokens, with arguments of `megatron_kernels.attention`."""
        ...


@runtime_checkable
class KVCache(Protocol):
    """The interface of a cache for a model. Layers are identified by their number in the model.

    A forward pass of ``t`` new tokens reads `length` once and calls `update` once for each layer.
    It increases `length` by ``t``.
    """

    @property
    def length(self) -> int:
        """Number of positions that every layer has seen: the index of the next token."""
        ...

    def update(
        self, layer: int, k: Float[Tensor, "t b g d"], v: Float[Tensor, "t b g d"]
    ) -> KVHandle:
        """Adds the keys and values of new tokens; returns the handle of all tokens."""
        ...


@runtime_checkable
class LatentKVCache(KVCache, Protocol):
    """A cache that also stores keys whose first channels are the values, as in latent attention."""

    def update_latent(
        self, layer: int, k: Float[Tensor, "t b g d"], value_channels: int
    ) -> KVHandle:
        """Adds the keys of new tokens; returns the handle of all tokens.

        Args:
            layer: Number of the layer in the model.
            k: Keys of the new tokens.
            value_channels: Number of the first channels of each key that are its value.
        """
        ...


@runtime_checkable
class CrossKVCache(KVCache, Protocol):
    """A cache that also stores keys and values of the encoder for cross-attention."""

    def encoder_kv(self, layer: int, new: KeysValues | None) -> KVHandle:
        """Returns the handle of the encoder's keys and values.

        Args:
            layer: Number of the layer in the model.
            new: Keys and values of an encoder's output, which the cache stores. None in later
                passes, which use the stored ones.
        """
        ...


@runtime_checkable
class StateCache(KVCache, Protocol):
    """A cache that also stores the state of recurrent layers, one state for each sequence.

    A state stands for all tokens of a sequence so far. It cannot be cut back to fewer tokens, and
    sequences with a common prefix share it only if both have exactly its tokens.
    """

    def read_state(self, layer: int) -> State | None:
        """Returns the state of the sequences of this pass before their new tokens.

        It is zero for a sequence without earlier tokens. None means that no sequence has any.

        Args:
            layer: Number of the layer in the model.
        """
        ...

    def write_state(self, layer: int, state: State, tokens: int) -> None:
        """Stores the state after the new tokens.

        Args:
            layer: Number of the layer in the model.
            state: State of each sequence of this pass.
            tokens: Number of new tokens, including padding.
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
        scores: Scores = PLAIN_SCORES,
        backend: str = "auto",
    ) -> Float[Tensor, "s b n d"]:
        """Returns `megatron_kernels.attention` over these keys and values."""
        return attention(q, self.k, self.v, mask, scores, query_offset, backend=backend)


@dataclass(frozen=True, eq=False)
class LatentKV:
    """A `KVHandle` of keys whose first channels are the values."""

    k: Float[Tensor, "t b g d"]
    value_channels: int

    def attend(
        self,
        q: Float[Tensor, "s b n d"],
        mask: Mask,
        *,
        query_offset: int = 0,
        scores: Scores = PLAIN_SCORES,
        backend: str = "auto",
    ) -> Float[Tensor, "s b n dv"]:
        """Returns `megatron_kernels.attention` over these keys and values.

        Whole keys are the values and the other channels of the result are dropped, since fused
        kernels need keys and values of equal width.
        """
        y = attention(q, self.k, self.k, mask, scores, query_offset, backend=backend)
        return y[..., : self.value_channels]


class StaticKVCache:
    """A cache of fixed size for one batch, allocated once. All sequences have the same length.

    Each layer has the memory that its mixer describes (`Mixer.cached`).

    Args:
        config: The model's configuration.
        mesh: The model's mesh. Each tensor-parallel rank stores its own key/value heads.
        batch_size: Number of sequences.
        max_length: Capacity in tokens, at most the model's number of positions.
        dtype: Dtype of keys, values and states; of a precise state at least float32.
        device: Device of the memory. Defaults to the mesh's device.
        layers: Numbers of the cached layers, ``map(int, stage.layers)`` for a pipeline stage.
            Layers that cache nothing are skipped. Defaults to all. The decoder of an
            encoder-decoder counts from ``encoder_num_layers`` on.

    Raises:
        ConfigError: There are more positions than the model has, a layer does not exist, or no
            layer caches anything.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        batch_size: int,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        layers: Iterable[int] | None = None,
    ) -> None:
        config.embedding.check_sequence_length(max_length)
        known = config.cached(mesh.axis("tp").size)
        wanted = list(known if layers is None else layers)
        if not wanted:
            raise ConfigError("a cache needs at least one layer; layers is empty")
        if unknown := [layer for layer in wanted if not 0 <= layer < config.depth]:
            raise ConfigError(
                f"the model has no layer {unknown[0]}; use layers of {reprlib.repr(list(known))}"
            )
        served = [layer for layer in wanted if layer in known]
        if not served:
            raise ConfigError(
                f"layer {wanted[0]} caches nothing; use layers of {reprlib.repr(list(known))}"
            )
        self._max_length = max_length
        where = device or mesh.device

        def store(spec: KVSpec, channels: int) -> Tensor:
            return torch.empty(
                max_length, batch_size, spec.groups, channels, dtype=dtype, device=where
            )

        def state(tensor: StateTensor) -> Tensor:
            wide = torch.promote_types(dtype, torch.float32) if tensor.precise else dtype
            return torch.empty(batch_size, *tensor.shape, dtype=wide, device=where)

        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._states: dict[int, dict[str, Tensor]] = {}
        for layer in served:
            spec = known[layer]
            if isinstance(spec, StateSpec):
                self._states[layer] = {name: state(tensor) for name, tensor in spec.tensors}
                continue
            self._keys[layer] = store(spec, spec.key_channels)
            if not spec.values_in_keys:
                self._values[layer] = store(spec, spec.value_channels)
        self._filled = dict.fromkeys(served, 0)
        self._encoded: dict[int, DenseKV] = {}

    @property
    def length(self) -> int:
        """Number of positions that every layer has seen."""
        return min(self._filled.values())

    @property
    def max_length(self) -> int:
        """Capacity in positions."""
        return self._max_length

    def update(
        self, layer: int, k: Float[Tensor, "t b g d"], v: Float[Tensor, "t b g d"]
    ) -> DenseKV:
        """Writes the new keys and values in place; returns a handle of views of all so far.

        Raises:
            ConfigError: The cache has no room for them.
        """
        new = self._next(layer, len(k))
        self._keys[layer][new] = k
        self._values[layer][new] = v
        return DenseKV(self._keys[layer][: new.stop], self._values[layer][: new.stop])

    def update_latent(
        self, layer: int, k: Float[Tensor, "t b g d"], value_channels: int
    ) -> LatentKV:
        """Writes the new keys in place; returns a handle of views, as `LatentKVCache` describes.

        Raises:
            ConfigError: The cache has no room for them.
        """
        new = self._next(layer, len(k))
        self._keys[layer][new] = k
        return LatentKV(self._keys[layer][: new.stop], value_channels)

    def read_state(self, layer: int) -> State | None:
        """Returns the state of a layer, or None before the first tokens."""
        return self._states[layer] if self._filled[layer] else None

    def write_state(self, layer: int, state: State, tokens: int) -> None:
        """Overwrites the state of a layer, as `StateCache` describes.

        Raises:
            ConfigError: The tokens are more than the positions of the cache.
        """
        self._next(layer, tokens)
        for name, stored in self._states[layer].items():
            stored.copy_(state[name])

    def _next(self, layer: int, count: int) -> slice:
        """Returns the indices of a layer's next ``count`` tokens, and counts them."""
        start = self._filled[layer]
        end = start + count
        if end > self.max_length:
            raise ConfigError(
                f"{end} positions do not fit in a cache of {self.max_length}; increase max_length"
            )
        self._filled[layer] = end
        return slice(start, end)

    def encoder_kv(self, layer: int, new: KeysValues | None) -> DenseKV:
        """Returns the handle of the encoder's keys and values, after storing ``new`` if given.

        Raises:
            ConfigError: Nothing is stored and ``new`` is None.
        """
        if new is not None:
            self._encoded[layer] = DenseKV(*new)
        elif layer not in self._encoded:
            raise ConfigError(
                f"layer {layer} attends to an encoder's output that the cache does not hold; pass "
                "the source in the first pass"
            )
        return self._encoded[layer]

    def truncate(self, length: int) -> None:
        """Removes all positions from ``length`` on; 0 empties the cache for another batch.

        Raises:
            ConfigError: A layer has a state of more tokens, which cannot be cut back.
        """
        seen = max((self._filled[layer] for layer in self._states), default=0)
        if 0 < length < seen:
            raise ConfigError(
                f"the state of a recurrent layer stands for {seen} tokens and cannot be cut back "
                f"to {length}; use 0 and decode the sequence again"
            )
        self._filled = {layer: min(filled, length) for layer, filled in self._filled.items()}
        if length == 0:
            self._encoded.clear()
