"""The key-value cache of a batch whose sequences differ in length."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from megatron_models import DenseKV, LatentKV, State
from megatron_parallel import to_device
from torch import Tensor


class SlotCache:
    """A cache of keys and values with one slot of equal size for each request.

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
        self._stores: dict[tuple[str, int], tuple[Tensor, ...]] = {}
        self._states: dict[int, dict[str, Tensor]] = {}
        self.begin_pass(range(slots), [0] * slots)

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the layers that the cache has keys and values of."""
        return tuple(layer for kind, layer in self._stores if kind == "own")

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that the cache has states of."""
        return tuple(self._states)

    def begin_pass(self, slots: Sequence[int], starts: Sequence[int]) -> None:
        """Assigns the rows of the next pass to slots.

        Row ``i`` belongs to ``slots[i]``, and its first new token is at ``starts[i]``.
        """
        self._all_slots = list(slots) == list(range(self._count))
        self._slots = to_device(torch.tensor(slots), self._device)
        self._starts = to_device(torch.tensor(starts), self._device)
        self._length = max(starts)
        self._all_start = not any(starts)
        self._indices: Tensor | None = None  # of the new tokens, equal for all layers

    @property
    def length(self) -> int:
        """The largest start: the most tokens that a row of the pass has before the new ones."""
        return self._length

    def update(
        self, layer: int, k: Float[Tensor, "t b g d"], v: Float[Tensor, "t b g d"]
    ) -> DenseKV:
        """Writes the new keys and values, and returns those of the rows of the pass from index 0.

        For a row that starts earlier than others, the result includes entries after its new tokens.
        """
        return DenseKV(*self._write(layer, k, v))

    def update_latent(
        self, layer: int, k: Float[Tensor, "t b g d"], value_channels: int
    ) -> LatentKV:
        """Writes keys whose first channels are the values; otherwise as `update`."""
        (keys,) = self._write(layer, k)
        return LatentKV(keys, value_channels)

    def _write(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Writes tensors of new tokens, and returns those of the rows of the pass from index 0."""
        length = len(new[0])
        if self._indices is None or len(self._indices) != length:
            steps = torch.arange(length, device=self._device)
            self._indices = self._starts + steps.unsqueeze(-1)
        stores = self._store("own", layer, new)
        for store, each in zip(stores, new, strict=True):
            store[self._indices, self._slots] = each
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
