"""The key-value cache of a batch whose sequences differ in length."""

from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Float
from megatron_kernels import Pages
from megatron_models import DenseKV, LatentKV, State
from megatron_parallel import to_device
from torch import Tensor

from megatron_infer.engine.paged import PagedKV

BLOCK_SIZE: Final = 16
"""Tokens of a block."""


class SlotCache:
    """A cache of keys and values with one slot of equal size for each request.

    A slot is a number of blocks in a row of a pool, of `BLOCK_SIZE` tokens each. Attention reads
    the blocks of the sequences of a pass in place (`PagedKV`); no step copies them.

    Every sequence starts at the beginning of its slot, so its tokens have the positions that they
    would have alone. `begin_pass` sets the slots of the rows of the next forward pass and the index
    of their first new tokens. Entries after the end of a sequence are never attended to: positions
    are compared causally, and new tokens overwrite these entries.

    Memory for a layer is allocated at its first `update`, with the shapes, dtype and device of its
    keys and values. A cache therefore works for any layers that a rank has. A recurrent layer has
    one state in each slot, which is zero for a sequence that starts.

    Implements the protocols ``KVCache``, ``LatentKVCache``, ``CrossKVCache`` and ``StateCache`` of
    megatron-models.

    Args:
        slots: The number of requests.
        max_length: The number of tokens in each slot.
        max_source: The number of encoder tokens in each slot. Defaults to 0.
        device: The device of the model.
    """

    def __init__(
        self, slots: int, max_length: int, *, max_source: int = 0, device: torch.device
    ) -> None:
        self._count, self._device = slots, device
        self._capacity = {"own": max_length, "source": max_source}
        self._blocks = -(-max_length // BLOCK_SIZE)  # of a slot
        self._pools: dict[int, tuple[Tensor, Tensor]] = {}
        self._stores: dict[tuple[str, int], tuple[Tensor, ...]] = {}
        self._states: dict[int, dict[str, Tensor]] = {}
        self.begin_pass(range(slots), [0] * slots)

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the layers that the cache has keys and values of."""
        latent = (layer for kind, layer in self._stores if kind == "own")
        return (*self._pools, *latent)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that the cache has states of."""
        return tuple(self._states)

    def begin_pass(self, slots: Sequence[int], starts: Sequence[int]) -> None:
        """Assigns the rows of the next pass to slots.

        Row ``i`` belongs to ``slots[i]``, and its first new token is at ``starts[i]``.
        """
        self._all_slots = list(slots) == list(range(self._count))
        self._rows = tuple(zip(slots, starts, strict=True))
        self._slots = to_device(torch.tensor(slots), self._device)
        self._starts = to_device(torch.tensor(starts), self._device)
        self._length = max(starts)
        self._all_start = not any(starts)
        # Of the new tokens, equal for all layers.
        self._indices: Tensor | None = None
        self._pages: Pages | None = None

    @property
    def length(self) -> int:
        """The largest start: the most tokens that a row of the pass has before the new ones."""
        return self._length

    def update(
        self, layer: int, k: Float[Tensor, "t b g d"], v: Float[Tensor, "t b g d"]
    ) -> DenseKV | PagedKV:
        """Writes the new keys and values, and returns those of the rows of the pass from index 0.

        If no row has earlier tokens, these are the new ones. For a row that starts earlier than
        others, the result includes entries after its new tokens.
        """
        if layer not in self._pools:
            blocks = self._count * self._blocks
            self._pools[layer] = (
                k.new_zeros(blocks, BLOCK_SIZE, *k.shape[2:]),
                v.new_zeros(blocks, BLOCK_SIZE, *v.shape[2:]),
            )
        pools = self._pools[layer]
        entries = self._new_indices(len(k)) + self._slots * (self._blocks * BLOCK_SIZE)
        for pool, each in zip(pools, (k, v), strict=True):
            pool.flatten(0, 1)[entries] = each
        if self._all_start:
            return DenseKV(k, v)
        if self._pages is None:
            self._pages = self._pages_of(len(k))
        return PagedKV(*pools, self._pages)

    def _pages_of(self, new: int) -> Pages:
        """Returns the blocks and lengths of the rows of the pass, with a number of new tokens."""
        columns = -(-(self._length + new) // BLOCK_SIZE)
        steps = torch.arange(columns, dtype=torch.int32, device=self._device)
        tables = (self._slots * self._blocks).to(torch.int32).unsqueeze(-1) + steps
        lengths = (self._starts + new).to(torch.int32)
        runs = tuple((slot * self._blocks, start + new) for slot, start in self._rows)
        return Pages(tables, lengths, runs)

    def _new_indices(self, length: int) -> Tensor:
        """Returns the indices of the new tokens in their slots, ``[length, rows]``."""
        if self._indices is None or len(self._indices) != length:
            steps = torch.arange(length, device=self._device)
            self._indices = self._starts + steps.unsqueeze(-1)
            self._pages = None
        return self._indices

    def update_latent(
        self, layer: int, k: Float[Tensor, "t b g d"], value_channels: int
    ) -> LatentKV:
        """Writes keys whose first channels are the values; otherwise as `update`."""
        (keys,) = self._write(layer, k)
        return LatentKV(keys, value_channels)

    def _write(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Writes tensors of new tokens, and returns those of the rows of the pass from index 0."""
        length = len(new[0])
        indices = self._new_indices(length)
        stores = self._store("own", layer, new)
        for store, each in zip(stores, new, strict=True):
            store[indices, self._slots] = each
        return self._slice(stores, self._length + length)

    def encoder_kv(
        self,
        layer: int,
        new: tuple[Float[Tensor, "t b g d"], Float[Tensor, "t b g d"]] | None,
    ) -> DenseKV:
        """Stores the encoder keys and values of the rows, or returns the stored ones.

        If ``new`` is None, it returns the stored ones with length ``max_source``. Entries after the
        end of a source are padding, which the mask must exclude.
        """
        if new is None:
            return DenseKV(*self._slice(self._stores["source", layer], self._capacity["source"]))
        stores = self._store("source", layer, new)
        for stored, new_part in zip(stores, new, strict=True):
            stored[: len(new_part), self._slots] = new_part
        return DenseKV(*new)

    def read_state(self, layer: int) -> State | None:
        """Returns the state of the rows of the pass, zero for those that start; None if all do."""
        if self._all_start:
            return None
        begun = self._starts > 0
        return {
            name: store[self._slots] * begun.view(-1, *[1] * (store.dim() - 1))
            for name, store in self._states[layer].items()
        }

    def write_state(self, layer: int, state: State, tokens: int) -> None:
        """Overwrites the state of the rows of the pass."""
        del tokens  # `begin_pass` sets where the next ones are
        stores = self._states.setdefault(layer, {})
        for name, new in state.items():
            if name not in stores:
                stores[name] = new.new_zeros(self._count, *new.shape[1:])
            stores[name][self._slots] = new

    def _store(self, kind: str, layer: int, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns the memory for the tensors of a layer, which the first call allocates."""
        if (kind, layer) not in self._stores:
            sizes = self._capacity[kind], self._count
            self._stores[kind, layer] = tuple(
                each.new_zeros(*sizes, *each.shape[2:]) for each in like
            )
        return self._stores[kind, layer]

    def _slice(self, stores: tuple[Tensor, ...], end: int) -> tuple[Tensor, ...]:
        """Returns the rows of the pass up to an index."""
        if self._all_slots:
            return tuple(store[:end] for store in stores)
        return tuple(store[:end, self._slots] for store in stores)
