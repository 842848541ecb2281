"""State that all layers of one forward pass share."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Bool, Float, Int, Int64
from megatron_kernels import Mask, largest_scores
from megatron_parallel import AuxiliaryLosses, RecomputeConfig
from megatron_parallel.pipeline import PassInterleaver
from megatron_parallel.recompute import activation_checkpoint, discard_output, discard_outputs
from torch import Tensor

from megatron_models.cache import KVCache
from megatron_models.components.attention.context_parallel import ContextParallel
from megatron_models.components.attention.span import EVERYTHING, Span
from megatron_models.components.dropout import ProbabilityDropout, StageDropout
from megatron_models.components.measure import output_name, scores_name
from megatron_models.components.moe.replay import RouterReplay
from megatron_models.components.rotary.module import Angles
from megatron_models.components.rotary.spec import RotarySpec


@dataclass(frozen=True, eq=False)
class Context:
    """State that the model passes through every block to its mixers.

    Attributes:
        mask: Which tokens may attend to which.
        masks: The mask narrowed to the spans of this stage's mixers, see `mask_of`.
        angles: Cosines and sines of the rotary angles, by the rotation of a mixer.
        cache: Key/value cache, when decoding.
        offset: Number of cached positions before these tokens.
        dropout: Dropout, when training with dropout.
        context_parallel: Attention over several context-parallel ranks. ``mask`` is then the mask
            of the whole sequence.
        recompute: What the backward pass recomputes.
        padding: True for a padding token, which routers ignore. Covers the whole sequence, also
            where sequence parallelism cuts it. None if there is no padding or no mixer reads it.
        auxiliary_losses: Collects the auxiliary losses of layers, when training.
        interleaver: Lets another micro-batch compute while the tokens of experts are in flight.
        encoder_output: Output of the encoder, in a decoder: of the whole source, or this rank's
            part of it. None in passes with a cache that already has its keys and values.
        cross_mask: Which tokens of the source a token of the decoder may attend to.
        sequence_parallel: Whether this pass cuts sequences over tensor-parallel ranks. Mixers pass
            it to each parallel layer. None means as the modules were built. False when decoding,
            since a single new token cannot be cut.
        router_replay: Records or replays the experts of each token.
        expert_loads: Selections of experts by layer, as the forward pass counted them for the
            global load-balancing loss. Recomputation reads them.
        counted_layers: Layers whose routing this pass has counted for reports. A recomputation does
            not count again.
        observed: Names under which this pass has reported scores or outputs. A recomputation does
            not report again.
        score_bias: Biases of the scores of self-attention for this rank's heads, by relative
            position. None if the model has none.
        positions: Positions of this rank's tokens, ``[3, b, s]`` with three axes. None means
            ``offset`` and the following ones.
        document_ids: Document of each token of the whole sequence, -1 for padding, for layers that
            pass a state from token to token. None if there is one document, or no such layer.
        continues: Whether the first new token of a sequence is of the document of the last cached
            one. None if all are.
    """

    mask: Mask
    angles: Mapping[RotarySpec, Angles] = field(default_factory=dict)
    cache: KVCache | None = None
    offset: int = 0
    dropout: StageDropout | None = None
    context_parallel: ContextParallel | None = None
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    padding: Bool[Tensor, "s b"] | None = None
    auxiliary_losses: AuxiliaryLosses | None = None
    interleaver: PassInterleaver | None = None
    encoder_output: Float[Tensor, "t b h"] | None = None
    cross_mask: Mask | None = None
    sequence_parallel: bool | None = None
    router_replay: RouterReplay | None = None
    expert_loads: dict[int, Int[Tensor, " e"]] = field(default_factory=dict)
    counted_layers: set[int] = field(default_factory=set)
    observed: set[str] = field(default_factory=set)
    masks: Mapping[Span, Mask] = field(default_factory=dict)
    positions: Int[Tensor, "*axes b_or_1 s"] | None = None
    score_bias: Float[Tensor, "_ n s keys"] | None = None
    document_ids: Int[Tensor, "b row"] | None = None
    continues: Bool[Tensor, " b"] | None = None

    def token_positions(self, length: int, device: torch.device) -> Int[Tensor, "s b_or_1"]:
        """Returns the positions of this rank's ``length`` tokens."""
        if self.positions is not None:
            return self.positions.t()
        return torch.arange(self.offset, self.offset + length, device=device)[:, None]

    def mask_of(self, span: Span) -> Mask:
        """Returns the mask of a layer with this span.

        It is prepared only if it is among `masks`; otherwise each layer narrows `mask` by itself.
        """
        if span == EVERYTHING:
            return self.mask
        prepared = self.masks.get(span)
        return self.mask.narrowed(span.window, span.chunk) if prepared is None else prepared

    def observe_scores(
        self,
        layer: int,
        first_head: int,
        q: Float[Tensor, "s b n d"],
        k: Float[Tensor, "s b g d"],
        span: Span,
        scale: float | None,
    ) -> None:
        """Reports the largest score of each head of a layer, if a step asks for it.

        Args:
            layer: Global layer number.
            first_head: Global number of the first head.
            q: Queries of this rank.
            k: Keys of this rank.
            span: How far the layer's attention reaches.
            scale: Factor of the products. None means 1/sqrt(d).
        """
        collected = self.auxiliary_losses
        if collected is None or not collected.has_maxima:
            return  # without the layer's number, for which compiled code would be compiled again
        name = scores_name(layer)
        if not collected.has_maximum(name) or name in self.observed:
            return
        self.observed.add(name)
        with torch.no_grad():
            if self.context_parallel is None:
                mask = self.mask_of(span)
            else:
                k, mask = self.context_parallel.keys_of_all_ranks(k, span)
            collected.maximum(name, largest_scores(q, k, mask, scale), first_head)

    def observe_output(self, layer: int, x: Float[Tensor, "s b h"]) -> None:
        """Reports statistics of the output of a layer, if a step asks for them.

        They are sums of squares, zeros, numbers that are not finite, and elements; the maximum is
        that of the magnitude. Sums count an element once for each rank that has it.
        """
        collected = self.auxiliary_losses
        if collected is None or not self.observes_outputs:
            return  # without the layer's number, for which compiled code would be compiled again
        name = output_name(layer)
        if not collected.has_maximum(name) or name in self.observed:
            return
        self.observed.add(name)
        with torch.no_grad():
            finite = x.isfinite()
            values = torch.where(finite, x, 0.0)
            squares = torch.linalg.vector_norm(
                values, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)
            ).double()
            counts = (squares.square().sum(), (x == 0).sum(), (~finite).sum())
            sums = torch.stack([each.double() for each in counts])
            size = torch.full((1,), float(x.numel()), dtype=torch.float64, device=x.device)
            collected.count(name, torch.cat([sums, size]))
            collected.maximum(name, values.abs().amax()[None])

    @property
    def has_all_keys(self) -> bool:
        """Whether a pass computes all keys that its queries read: no cache or ring has others."""
        return self.cache is None and self.context_parallel is None

    @property
    def observes_outputs(self) -> bool:
        """Whether a step may ask for statistics of the outputs of layers."""
        return self.auxiliary_losses is not None and self.auxiliary_losses.has_maxima

    def hidden_dropout(
        self, x: Float[Tensor, "s b h"], layer: int | Int64[Tensor, ""], site: int
    ) -> Float[Tensor, "s b h"]:
        """Applies hidden dropout, if there is any."""
        return x if self.dropout is None else self.dropout.hidden(x, layer, site)

    @property
    def drops_hidden(self) -> bool:
        """Whether there is hidden dropout."""
        return self.dropout is not None and self.dropout.global_dropout.hidden > 0.0

    def add_with_dropout(
        self,
        x: Float[Tensor, "s b h"],
        added: Float[Tensor, "s b h"],
        layer: int,
        site: int,
        *,
        backend: str,
    ) -> Float[Tensor, "s b h"]:
        """Adds to the stream what hidden dropout leaves of a tensor, in one operation."""
        if self.dropout is None:
            return x + added
        return self.dropout.add_hidden(x, added, layer, site, backend)

    def attention_dropout(
        self, layer: int | Int64[Tensor, ""], first_head: int, site: int
    ) -> ProbabilityDropout | None:
        """Returns the dropout of attention probabilities ``[b, n, s, t]`` at a site, or None."""
        dropout = self.dropout
        if dropout is None or dropout.global_dropout.attention == 0.0:
            return None
        return ProbabilityDropout(dropout, layer, first_head, site)

    def maybe_recompute(
        self, module: str, function: Callable[..., Tensor], *inputs: Float[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        """Returns ``function(*inputs)``, checkpointed if ``module`` is recomputed."""
        if self.recompute.selects(module):
            return activation_checkpoint(function, *inputs)
        return function(*inputs)

    def maybe_discard(
        self,
        module: str,
        outputs: Sequence[Float[Tensor, "..."]],
        recompute: Callable[..., Sequence[Tensor]],
        *inputs: Float[Tensor, "..."],
    ) -> AbstractContextManager[None]:
        """Returns a context that saves ``inputs`` for ``outputs`` if ``module`` is recomputed."""
        if self.recompute.selects(module):
            return discard_outputs(outputs, recompute, *inputs)
        return nullcontext()

    def apply_norm(
        self,
        norm: Callable[[Tensor], Tensor],
        x: Float[Tensor, "s b h"],
        reader: Callable[[Tensor], Tensor],
    ) -> Float[Tensor, "s b h"]:
        """Returns ``reader(norm(x))``.

        The output of the norm is not saved if norms are recomputed.
        """
        return self.read_norm(norm, x, norm(x), reader)

    def read_norm(
        self,
        norm: Callable[[Tensor], Tensor],
        x: Float[Tensor, "s b h"],
        y: Float[Tensor, "s b h"],
        reader: Callable[[Tensor], Tensor],
    ) -> Float[Tensor, "s b h"]:
        """Returns ``reader(y)`` for ``y`` that equals ``norm(x)``, as `apply_norm` does."""
        if not self.recompute.selects("layernorm"):
            return reader(y)
        with discard_output(y, partial(norm, x)):
            return reader(y)

    def shared_tensors(self) -> list[Tensor]:
        """Returns the tensors that layers share, which count for no single layer."""
        key = None if self.dropout is None else self.dropout.global_dropout.key
        words = [] if key is None else [key.word0, key.word1]
        cross = [] if self.cross_mask is None else [self.cross_mask]
        masks = [self.mask, *self.masks.values(), *cross]
        fields = [value for mask in masks for value in vars(mask).values()]
        tables = [table for angles in self.angles.values() for table in angles]
        shared = (*tables, *fields, *words, self.encoder_output, self.score_bias, self.document_ids)
        return [t for t in shared if isinstance(t, torch.Tensor)]
