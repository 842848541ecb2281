"""The key-value cache of a batch whose sequences differ in length."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from megatron_models import DenseKV
from torch import Tensor


class SlotCache:
    """A cache of keys and values with one slot of equal size for each request.

    Every sequence starts at the beginning of its slot, so its tokens have the positions that they
    would have alone. `begin_pass` sets the slots of the rows of the next forward pass and the index
    of their first new tokens. Entries after the end of a sequence are never attended to: positions
    are compared causally, and new tokens overwrite these entries.

    Memory for a layer is allocated at its first `update`, with the heads, dtype and device of its
    keys. A cache therefore works for any layers that a rank has.

    Implements the protocols ``KVCache`` and ``CrossKVCache`` of megatron-models.

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
        self._stores: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self.begin_pass(range(slots), [0] * slots)

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the layers that the cache has keys and values of."""
        return tuple(layer for kind, layer in self._stores if kind == "own")

    def begin_pass(self, slots: Sequence[int], starts: Sequence[int]) -> None:
        """Assigns the rows of the next pass to slots.

        Row ``i`` belongs to ``slots[i]``, and its first new token is at ``starts[i]``.
        """
        self._all_slots = list(slots) == list(range(self._count))
        self._slots = torch.tensor(slots, device=self._device)
        self._starts = torch.tensor(starts, device=self._device)
        self._length = max(starts)
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
        if self._indices is None or len(self._indices) != len(k):
            self._indices = self._starts + torch.arange(len(k), device=k.device).unsqueeze(-1)
        keys, values = store = self._store("own", layer, k)
        keys[self._indices, self._slots] = k
        values[self._indices, self._slots] = v
        return self._slice(store, self._length + len(k))

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
            return self._slice(self._stores["source", layer], self._capacity["source"])
        store = self._store("source", layer, new[0])
        for stored, new_part in zip(store, new, strict=True):
            stored[: len(new_part), self._slots] = new_part
        return DenseKV(*new)

    def _store(self, kind: str, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the memory for the keys and values of a layer, which the first call allocates."""
        if (kind, layer) not in self._stores:
            shape = (self._capacity[kind], self._count, *like.shape[2:])
            self._stores[kind, layer] = (like.new_zeros(shape), like.new_zeros(shape))
        return self._stores[kind, layer]

    def _slice(self, store: tuple[Tensor, Tensor], end: int) -> DenseKV:
        """Returns the rows of the pass up to an index."""
        keys, values = store
        if self._all_slots:
            return DenseKV(keys[:end], values[:end])
        return DenseKV(keys[:end, self._slots], values[:end, self._slots])
