"""What all layers of one forward pass share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Bool, Float
from megatron_kernels import Mask
from megatron_parallel import AuxiliaryLosses, RecomputeConfig, Turns
from megatron_parallel.recompute import activation_checkpoint, discard_output
from torch import Tensor

from megatron_models.cache import KVCache
from megatron_models.components.attention.context_parallel import ContextParallel
from megatron_models.components.attention.rotary import Angles
from megatron_models.components.dropout import StageDropout


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
        recompute: what is computed again in the backward pass.
        padding: True where a token is padding, which routers leave alone; of the whole sequence
            also where sequence parallelism cuts it. None if no token is, or nobody asks.
        auxiliary_losses: takes the losses that layers have of their own, when training.
        turns: lets another micro-batch compute while experts' tokens are on their way.
        encoded: the encoder's output, of all of its text or of this rank's part, in a decoder;
            None in passes with a cache that has seen it.
        cross_mask: which of it a token of the decoder may attend to.
        sequence_parallel: whether this pass cuts sequences over tensor-parallel ranks; None as the
            modules were built. A mixer hands it to every parallel layer it calls. False when
            decoding: a single new token cannot be cut.
    """

    mask: Mask
    angles: Angles | None = None
    cache: KVCache | None = None
    offset: int = 0
    dropout: StageDropout | None = None
    parallel: ContextParallel | None = None
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    padding: Bool[Tensor, "s b"] | None = None
    auxiliary_losses: AuxiliaryLosses | None = None
    turns: Turns | None = None
    encoded: Float[Tensor, "t b h"] | None = None
    cross_mask: Mask | None = None
    sequence_parallel: bool | None = None

    def drop(self, x: Float[Tensor, "s b h"], layer: int, site: int) -> Float[Tensor, "s b h"]:
        """Applies hidden dropout, if there is one."""
        return x if self.dropout is None else self.dropout.hidden(x, layer, site)

    def probability_drop(
        self, layer: int, first_head: int, site: int
    ) -> Callable[[Tensor], Tensor] | None:
        """What drops attention's probabilities ``[b, n, s, t]`` at a site, if anything does."""
        dropout = self.dropout
        if dropout is None or dropout.given.attention == 0.0:
            return None
        return partial(dropout.probabilities, layer=layer, first_head=first_head, site=site)

    def recomputed(
        self, module: str, function: Callable[..., Tensor], *inputs: Float[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        """``function(*inputs)``; run again in the backward pass if ``module`` is to be."""
        if self.recompute.selects(module):
            return activation_checkpoint(function, *inputs)
        return function(*inputs)

    def normalised(
        self,
        norm: Callable[[Tensor], Tensor],
        x: Float[Tensor, "s b h"],
        reader: Callable[[Tensor], Tensor],
    ) -> Float[Tensor, "s b h"]:
        """``reader(norm(x))``; the norm's output is not kept if norms are computed again."""
        y = norm(x)
        if not self.recompute.selects("layernorm"):
            return reader(y)
        with discard_output(y, partial(norm, x)):
            return reader(y)

    def shared_tensors(self) -> list[Tensor]:
        """Tensors that the layers share, so that no layer keeps them by itself."""
        key = None if self.dropout is None else self.dropout.given.key
        words = [] if key is None else [key.word0, key.word1]
        masks = [self.mask] if self.cross_mask is None else [self.mask, self.cross_mask]
        fields = [value for mask in masks for value in vars(mask).values()]
        shared = (*(self.angles or ()), *fields, *words, self.encoded)
        return [t for t in shared if isinstance(t, torch.Tensor)]
