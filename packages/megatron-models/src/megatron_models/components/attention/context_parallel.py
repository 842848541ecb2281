"""Attention over sequences that are cut over context-parallel ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import torch
from jaxtyping import Float, Int
from megatron_kernels import (
    Mask,
    Scores,
    attention,
    attention_backward,
    attention_forward,
)
from megatron_parallel import Axis, Mesh, ParallelLayout
from megatron_parallel.collectives import gather_sequence
from megatron_parallel.context_parallel import (
    BlockMask,
    ContextSplit,
    RingPlan,
    SequenceMask,
    all_gather_attention,
    all_to_all_attention,
    check_heads,
    gather_heads,
    hierarchical_attention,
    plan_ring,
    ring_attention,
    scatter_heads,
)
from torch import Tensor

from megatron_models.components.attention.span import Span
from megatron_models.components.dropout import ProbabilityDropout, StageDropout
from megatron_models.components.mixer import Mixer
from megatron_models.errors import ConfigError

Made = TypeVar("Made")

CP_COMM_TYPES: Final = ("p2p", "a2a", "allgather", "a2a+p2p")
"""Megatron's names: ring, scattered heads, gathered keys, and heads inside a ring."""


def check_context_parallel(
    mixers: Sequence[Mixer], num_layers: int, layout: ParallelLayout, comm: str | Sequence[str]
) -> tuple[str, ...]:
    """Returns the communication of each layer's attention, by layer number.

    Args:
        mixers: The mixers of all layers, whose heads may differ.
        num_layers: Number of layers.
        layout: The parallel sizes.
        comm: One of `CP_COMM_TYPES` for all layers, or one for each.

    Raises:
        ConfigError: A name is unknown, or the number of names is not the number of layers.
        LayoutError: The heads do not divide over the ranks. For a pool, these are all of its ranks.
    """
    ranks = layout.pool if layout.hybrid_cp else layout.cp
    given = (comm,) if isinstance(comm, str) else tuple(comm)
    if unknown := [name for name in given if name not in CP_COMM_TYPES]:
        raise ConfigError(
            f"cp_comm_type {unknown[0]!r} is not known; use one of {', '.join(CP_COMM_TYPES)}"
        )
    if len(given) not in (1, num_layers):
        raise ConfigError(
            f"{len(given)} values of cp_comm_type for {num_layers} layers; give one for all "
            "or one for each"
        )
    numbers = sorted({mixer.heads // layout.tp for mixer in mixers if mixer.heads})
    if "a2a" in given:
        for heads in numbers:
            check_heads(heads, ranks)
    if ranks > 1 and "a2a+p2p" in given:
        if layout.hierarchical_cp is None:
            raise ConfigError(
                "cp_comm_type 'a2a+p2p' needs the layout's hierarchical_cp, two sizes"
            )
        for heads in numbers:
            check_heads(heads, layout.hierarchical_cp[0])
    return given * num_layers if len(given) == 1 else given


class ContextParallel:
    """Attention of one forward pass over context-parallel ranks, shared by all layers.

    Args:
        mesh: The mesh.
        axis: The axis that cuts the micro-batch.
        comm: Communication of each layer, by layer number.
        split: Indices of the sequence that each rank holds.
        mask: Mask of the whole sequence.
        dropout: Dropout of this rank, or None.

    Raises:
        ConfigError: The mask is dense, or the mask of a block.
    """

    def __init__(
        self,
        mesh: Mesh,
        axis: Axis,
        comm: Sequence[str],
        split: ContextSplit,
        mask: Mask,
        dropout: StageDropout | None,
        backend: Callable[[str], str] = lambda _: "auto",
    ) -> None:
        if mask.dense is not None or mask.query_positions is not None:
            raise ConfigError(
                "context parallelism needs the mask of the whole sequence as plain rules, "
                "without dense and without query_positions"
            )
        self._mesh = mesh
        self.axis = axis
        self._comm, self._alike = comm, len({*comm}) == 1
        self.split = split
        self._mask = mask
        self._dropout = dropout
        self._backend = backend
        self._plans: dict[Span, _Plans] = {}

    def comm_of(self, layer: int) -> str:
        """Returns the communication of a layer.

        If all have the same, reads no number, for which compiled code would be compiled again.
        """
        return self._comm[0] if self._alike else self._comm[layer]

    def attention(
        self,
        q: Float[Tensor, "part b n d"],
        k: Float[Tensor, "part b g d"],
        v: Float[Tensor, "part b g d"],
        comm: str,
        layer: int | Tensor,
        first_head: int,
        scores: Scores,
        span: Span,
    ) -> Float[Tensor, "part b n d"]:
        """Returns attention of this rank's queries over the keys of all ranks.

        Args:
            q: Queries of this rank.
            k: Keys of this rank.
            v: Values of this rank.
            comm: Communication of the layer, see `comm_of`.
            layer: Global layer number, which dropout depends on.
            first_head: Global number of the first of the ``n`` heads, which are those of this
                tensor-parallel rank.
            scores: Scores of the ``n`` heads, as in `megatron_kernels.attention`.
            span: How far the layer's attention reaches.
        """
        axis, split = self.axis, self.split
        plans = self._plans_of(span)
        if comm == "p2p":
            blocks = self._blocks(layer, first_head, scores)
            return ring_attention(q, k, v, plans.ring, axis, blocks, sinks=scores.sinks)
        if comm == "allgather":
            own = split.indices[axis.index]
            attend = partial(self._attend, plans.gathered, layer, first_head, own, scores)
            return all_gather_attention(q, k, v, split, axis, attend)
        if comm == "a2a":
            heads = q.shape[2] // axis.size
            scores = scores.of_heads(heads * axis.index, heads)
            first_head += heads * axis.index
            attend = partial(self._attend, plans.whole, layer, first_head, None, scores)
            return all_to_all_attention(q, k, v, split, axis, attend)
        inner, outer = self._mesh.axis("cp_inner"), self._mesh.axis("cp_outer")
        within, plan = plans.hierarchy
        heads = q.shape[2] // inner.size
        scores = scores.of_heads(heads * inner.index, heads)
        blocks = self._blocks(layer, first_head + heads * inner.index, scores)
        sinks = scores.sinks
        return hierarchical_attention(q, k, v, within, plan, inner, outer, blocks, sinks=sinks)

    @property
    def index(self) -> int:
        """Coordinate of this rank on the axis that cuts the micro-batch."""
        return self.axis.index

    def keys_of_all_ranks(
        self, k: Float[Tensor, "part b g d"], span: Span
    ) -> tuple[Float[Tensor, "s b g d"], Mask]:
        """Returns the keys of all ranks, and their mask for this rank's queries.

        Args:
            k: Keys of this rank.
            span: How far the layer's attention reaches.
        """
        keys = self.split.to_sequence_order(gather_sequence(k, self.axis))
        return keys, self._plans_of(span).gathered

    def scatter_heads(self, x: Float[Tensor, "part b n d"]) -> Float[Tensor, "s b n_part d"]:
        """Returns the whole sequence in its order, for this rank's part of the heads or groups."""
        return self.split.to_sequence_order(scatter_heads(x, self.axis))

    def gather_heads(self, x: Float[Tensor, "s b n_part d"]) -> Float[Tensor, "part b n d"]:
        """Returns the inverse of `scatter_heads`."""
        return gather_heads(self.split.to_rank_order(x), self.axis)

    def _attend(
        self,
        mask: Mask,
        layer: int | Tensor,
        first_head: int,
        query_indices: Int[Tensor, "b_or_1 s"] | None,
        scores: Scores,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        drop = None
        if self._drops and self._dropout is not None:
            drop = ProbabilityDropout(self._dropout, layer, first_head, query_indices=query_indices)
        backend = self._backend(attention.name)
        return attention(q, k, v, mask, scores, dropout=drop, backend=backend)

    def _blocks(self, layer: int | Tensor, first_head: int, scores: Scores) -> "_Blocks":
        dropout = self._dropout if self._drops else None
        return _Blocks(dropout, layer, first_head, scores.without_sinks(), self._backend)

    @property
    def _drops(self) -> bool:
        return self._dropout is not None and self._dropout.global_dropout.attention > 0.0

    def _plans_of(self, span: Span) -> "_Plans":
        if span not in self._plans:
            mask = self._mask.narrowed(span.window, span.chunk)
            self._plans[span] = _Plans(self._mesh, self.axis, self.split, mask)
        return self._plans[span]


@dataclass(frozen=True, eq=False)
class _Plans:
    """What the kinds of communication need of one mask, computed for the first layer with it."""

    mesh: Mesh
    axis: Axis
    split: ContextSplit
    mask: Mask
    _made: dict[str, Any] = field(default_factory=dict, repr=False)

    def _once(self, name: str, make: Callable[[], Made]) -> Made:
        """Returns what `make` returned first.

        Before Python 3.12, compiled code cannot contain the lock of `functools.cached_property`.
        """
        if name not in self._made:
            self._made[name] = make()
        found: Made = self._made[name]
        return found

    @property
    def _rules(self) -> SequenceMask:
        mask = self.mask
        return SequenceMask(
            mask.document_ids, mask.positions, mask.causal, mask.window, mask.prefix, mask.chunk
        )

    @property
    def ring(self) -> RingPlan:
        return self._once(
            "ring", lambda: plan_ring(self._rules, self.split, self.axis.index, _lower)
        )

    @property
    def hierarchy(self) -> tuple[ContextSplit, RingPlan]:
        return self._once("hierarchy", self._plan_hierarchy)

    def _plan_hierarchy(self) -> tuple[ContextSplit, RingPlan]:
        inner, outer = self.mesh.axis("cp_inner"), self.mesh.axis("cp_outer")
        joined = self.split.joined(inner.size)
        plan = plan_ring(self._rules, joined, outer.index, _lower)
        return self.split.within(inner.size, outer.index), plan

    @property
    def whole(self) -> Mask:
        length, device = self.split.length, self.split.indices.device
        return self._once("whole", lambda: self.mask.prepare(length, length, device=device))

    @property
    def gathered(self) -> Mask:
        return self._once("gathered", self._gathered)

    def _gathered(self) -> Mask:
        indices = torch.arange(self.split.length, device=self.split.indices.device)[None]
        return _lower(self._rules.block(self.split.indices[self.axis.index], indices)).mask


@dataclass(frozen=True, eq=False)
class _Lowered:
    """A block's mask for kernels, and the indices that its dropout depends on."""

    mask: Mask
    queries: Int[Tensor, "b_or_1 s"]
    keys: Int[Tensor, "b_or_1 t"]


def _lower(block: BlockMask) -> _Lowered:
    queries, keys = block.query_indices, block.key_indices
    if block.all_allowed:  # positions remain, for biases by distance
        rest = Mask(
            positions=block.key_positions,
            query_positions=block.query_positions,
            causal=False,
        )
        return _Lowered(rest, queries, keys)
    mask = Mask(
        document_ids=block.key_document_ids,
        positions=block.key_positions,
        causal=block.causal,
        window=block.window,
        chunk=block.chunk,
        prefix=block.prefix,
        query_document_ids=block.query_document_ids,
        query_positions=block.query_positions,
        ascending=block.triangular,
    )
    return _Lowered(mask.prepare(queries.shape[1], keys.shape[1]), queries, keys)


@dataclass(frozen=True, eq=False)
class _Blocks:
    """The kernels' pair of block functions for a ring, with the dropout of one layer."""

    dropout: StageDropout | None
    layer: int | Tensor
    first_head: int
    scores: Scores
    backend: Callable[[str], str]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: _Lowered) -> tuple[Tensor, Tensor]:
        drop = self._drop(mask)
        backend = self.backend(attention_forward.name)
        return attention_forward(q, k, v, mask.mask, self.scores, dropout=drop, backend=backend)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: _Lowered,
    ) -> tuple[Tensor, Tensor, Tensor]:
        drop = self._drop(mask)
        backend = self.backend(attention_backward.name)
        return attention_backward(
            dout, q, k, v, out, lse, mask.mask, self.scores, dropout=drop, backend=backend
        )

    def _drop(self, mask: _Lowered) -> ProbabilityDropout | None:
        if self.dropout is None:
            return None
        return ProbabilityDropout(
            self.dropout,
            self.layer,
            self.first_head,
            query_indices=mask.queries,
            key_indices=mask.keys,
        )
