"""State of a batch whose sequences differ in length."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from megatron_models import DenseKV
from torch import Tensor


class SlotCache:
    """Keys and values with one slot for each request, all slots of one size.

    Every sequence lies at the beginning of its slot, whatever the lengths of the others, so its
    tokens have the positions they would have alone. `begin_pass` sets the slots of the rows of the
    next forward pass and the index of their first new tokens. What lies behind the end of a
    sequence in its slot is never seen: positions are compared causally, and new tokens
    overwrite it.

    Room for a layer is made when it brings its first keys, of their heads, dtype and device; so one
    cache serves whatever layers a rank has.

    Implements the protocols ``KVCache`` and ``CrossKVCache`` of megatron-models.

    Args:
        slots: requests.
        max_length: tokens there is room for in each slot.
        max_source: likewise tokens of the text that an encoder reads, if one does.
        device: where the model is.
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
        """Numbers of the layers whose keys and values are here."""
        return tuple(layer for kind, layer in self._stores if kind == "own")

    def begin_pass(self, slots: Sequence[int], starts: Sequence[int]) -> None:
        """Lets row ``i`` of the next pass be ``slots[i]``, its first new token at ``starts[i]``."""
        self._all_slots = list(slots) == list(range(self._count))
        self._slots = torch.tensor(slots, device=self._device)
        self._starts = torch.tensor(starts, device=self._device)
        self._length = max(starts)
        self._indices: Tensor | None = None  # of the pass's new tokens, alike for all layers

    @property
    def length(self) -> int:
        """The largest start: no row of the pass has more tokens before the new ones."""
        return self._length

    def update(
        self, layer: int, k: Float[Tensor, "t b g d"], v: Float[Tensor, "t b g d"]
    ) -> DenseKV:
        """Writes the new keys and values; return those of the pass's rows from place 0 on.

        A row that starts before the others has places behind its new tokens among them.
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
        """Keep the encoder's side of the pass's rows; or return what is kept, ``max_source`` long.

        What lies behind a source's end in its slot is padding, which the mask must say.
        """
        if new is None:
            return self._slice(self._stores["source", layer], self._capacity["source"])
        store = self._store("source", layer, new[0])
        for stored, new_part in zip(store, new, strict=True):
            stored[: len(new_part), self._slots] = new_part
        return DenseKV(*new)

    def _store(self, kind: str, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Room for the keys and values of a layer, made at the first call."""
        if (kind, layer) not in self._stores:
            shape = (self._capacity[kind], self._count, *like.shape[2:])
            self._stores[kind, layer] = (like.new_zeros(shape), like.new_zeros(shape))
        return self._stores[kind, layer]

    def _slice(self, store: tuple[Tensor, Tensor], end: int) -> DenseKV:
        """Returns the rows of the pass up to a place."""
        keys, values = store
        if self._all_slots:
            return DenseKV(keys[:end], values[:end])
        return DenseKV(keys[:end, self._slots], values[:end, self._slots])
