"""What all layers of one forward pass share."""

from dataclasses import dataclass

from jaxtyping import Float
from megatron_kernels import Mask
from torch import Tensor

from megatron_models.cache import KVCache
from megatron_models.layers.context_parallel import ContextParallel
from megatron_models.layers.dropout import StageDropout
from megatron_models.layers.rope import Angles


@dataclass(frozen=True, eq=False)
class Context:
    """Handed from the model through every block to attention.

    Attributes:
        mask: who may attend to whom.
        angles: cosines and sines of the rotary positions, if positions are rotary.
        cache: where keys and values are kept, when decoding.
        offset: positions in the cache before these tokens.
        dropout: what is dropped, when training with dropout.
        parallel: attention over context-parallel ranks, where there are several; the mask is then
            that of the whole sequence.
    """

    mask: Mask
    angles: Angles | None = None
    cache: KVCache | None = None
    offset: int = 0
    dropout: StageDropout | None = None
    parallel: ContextParallel | None = None

    def drop(self, x: Float[Tensor, "s b h"], layer: int, site: int) -> Float[Tensor, "s b h"]:
        """Apply hidden dropout, if there is one."""
        return x if self.dropout is None else self.dropout.hidden(x, layer, site)
