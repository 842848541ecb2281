"""Keys and values of a batch whose sequences differ in length."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from megatron_models import CausalConfig
from megatron_parallel import Mesh
from torch import Tensor


class SlotCache:
    """A key-value cache with one slot for each request, all slots of one size.

    Every sequence lies at the beginning of its slot, whatever the lengths of the others, so its
    tokens have the places they would have alone. Before each forward pass `aim` says which slots
    its rows belong to and where their new tokens go. What lies behind a sequence's end in its slot
    is never seen: places are compared causally, and new tokens overwrite it.

    Implements the ``KVCache`` protocol of megatron-models.

    Args:
        config: the model's configuration.
        mesh: the model's mesh; each tensor-parallel rank keeps its own key/value heads.
        slots: requests.
        max_length: tokens there is room for in each slot.
        layers: global numbers of the layers kept here, those of a pipeline stage; by default all.
        dtype: of keys and values.
        device: where they are kept.
    """

    def __init__(
        self,
        config: CausalConfig,
        mesh: Mesh,
        slots: int,
        max_length: int,
        *,
        layers: Sequence[int] | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        groups = config.groups_on_rank(mesh.axis("tp").size)
        kept = range(config.num_layers) if layers is None else layers
        self._places = {layer: place for place, layer in enumerate(kept)}
        shape = (len(kept), 2, max_length, slots, groups, config.kv_channels)
        self._store = torch.zeros(shape, dtype=dtype, device=device)
        self.aim(range(slots), [0] * slots)

    def aim(self, slots: Sequence[int], starts: Sequence[int]) -> None:
        """Let row ``i`` of the next pass be ``slots[i]``, its first new token at ``starts[i]``."""
        device = self._store.device
        self._whole = list(slots) == list(range(self._store.shape[3]))
        self._slots = torch.tensor(slots, device=device)
        self._starts = torch.tensor(starts, device=device)
        self._length = max(starts)

    @property
    def length(self) -> int:
        """The largest start: no row of the pass has more tokens before the new ones."""
        return self._length

    def append(
        self, layer: int, k: Float[Tensor, "t b g d"], v: Float[Tensor, "t b g d"]
    ) -> tuple[Float[Tensor, "all b g d"], Float[Tensor, "all b g d"]]:
        """Write the new keys and values; return those of the pass's rows from place 0 on.

        A row that starts before the others has places behind its new tokens among them.
        """
        places = self._starts + torch.arange(len(k), device=k.device).unsqueeze(-1)
        end = self._length + len(k)
        keys, values = self._store[self._places[layer]]
        keys[places, self._slots] = k
        values[places, self._slots] = v
        if self._whole:
            return keys[:end], values[:end]
        return keys[:end, self._slots], values[:end, self._slots]
