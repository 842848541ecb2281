"""State of a batch whose sequences differ in length."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from megatron_models import DenseKV
from torch import Tensor


class SlotCache:
    """Keys and values with one slot for each request, all slots of one size.

    Every sequence lies at the beginning of its slot, whatever the lengths of the others, so its
    tokens have the places they would have alone. Before each forward pass `aim` says which slots
    its rows belong to and where their new tokens go. What lies behind a sequence's end in its slot
    is never seen: places are compared causally, and new tokens overwrite it.

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
        self._room = {"own": max_length, "source": max_source}
        self._stores: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self.aim(range(slots), [0] * slots)

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers whose keys and values are here."""
        return tuple(layer for kind, layer in self._stores if kind == "own")

    def aim(self, slots: Sequence[int], starts: Sequence[int]) -> None:
        """Lets row ``i`` of the next pass be ``slots[i]``, its first new token at ``starts[i]``."""
        self._whole = list(slots) == list(range(self._count))
        self._slots = torch.tensor(slots, device=self._device)
        self._starts = torch.tensor(starts, device=self._device)
        self._length = max(starts)
        self._places: Tensor | None = None  # of the pass's new tokens, alike for all layers

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
        if self._places is None or len(self._places) != len(k):
            self._places = self._starts + torch.arange(len(k), device=k.device).unsqueeze(-1)
        keys, values = store = self._store("own", layer, k)
        keys[self._places, self._slots] = k
        values[self._places, self._slots] = v
        return self._seen(store, self._length + len(k))

    def encoder_kv(
        self,
        layer: int,
        new: tuple[Float[Tensor, "t b g d"], Float[Tensor, "t b g d"]] | None,
    ) -> DenseKV:
        """Keep the encoder's side of the pass's rows; or return what is kept, ``max_source`` long.

        What lies behind a source's end in its slot is padding, which the mask must say.
        """
        if new is None:
            return self._seen(self._stores["source", layer], self._room["source"])
        store = self._store("source", layer, new[0])
        for kept, made in zip(store, new, strict=True):
            kept[: len(made), self._slots] = made
        return DenseKV(*new)

    def _store(self, kind: str, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Room for the keys and values of a layer, made at the first call."""
        if (kind, layer) not in self._stores:
            shape = (self._room[kind], self._count, *like.shape[2:])
            self._stores[kind, layer] = (like.new_zeros(shape), like.new_zeros(shape))
        return self._stores[kind, layer]

    def _seen(self, store: tuple[Tensor, Tensor], end: int) -> DenseKV:
        """Returns the rows of the pass up to a place."""
        keys, values = store
        if self._whole:
            return DenseKV(keys[:end], values[:end])
        return DenseKV(keys[:end, self._slots], values[:end, self._slots])
