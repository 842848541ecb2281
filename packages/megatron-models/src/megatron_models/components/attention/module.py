"""Self-attention with query groups: projections, rotary positions and attention."""

from dataclasses import replace
from functools import partial

from jaxtyping import Float
from megatron_kernels import Scores, attention, rms_norm, rope, rope_qkv
from megatron_parallel.tensor_parallel import ColumnParallelLinear
from torch import Tensor, nn

from megatron_models.components.attention.alibi import alibi_slopes
from megatron_models.components.attention.heads import gated, gather_query_group
from megatron_models.components.attention.qk_norm import QKNorm
from megatron_models.components.attention.sinks import Sinks
from megatron_models.components.attention.spec import AttentionSpec, query_group_ranks
from megatron_models.components.attention.temperature import query_factors
from megatron_models.components.context import Context
from megatron_models.components.dropout_sites import ATTENTION_PROBABILITIES
from megatron_models.placement import Placement


class Attention(nn.Module):
    """Self-attention of one layer; the tensor-parallel axis cuts it by query groups.

    With more ranks than groups, the ranks of a group divide its rows of the fused weight, and each
    computes some of the group's query heads. As in Megatron-Core, the output of the fused
    projection is then gathered over all tensor-parallel ranks, and each rank takes its group. No
    weight is replicated or counted twice.
    """

    def __init__(self, spec: AttentionSpec, layer: int, placement: Placement) -> None:
        super().__init__()
        self.layer = layer
        self.dropout_layer: int | Tensor = layer
        self.tp = placement.mesh.axis("tp")
        self.backend = placement.backend("attention")
        self.first_head = spec.num_attention_heads // self.tp.size * self.tp.index
        self.rotation = spec.rotation
        self.head_size, self.heads_by_role = spec.kv_channels, spec.heads_by_role
        self.ranks_per_group = query_group_ranks(spec, self.tp.size)
        self.packed_rope = None
        if spec.rotation is not None:
            self.rope = placement.bind(rope)
            if spec.packs_rope(self.tp.size) and placement.fused(rope_qkv) is not None:
                self.packed_rope = placement.bind(rope_qkv)
        self.span = spec.span
        self.l2_norm = None
        if spec.qk_l2_norm:
            self.l2_norm = partial(placement.bind(rms_norm), weight=None, eps=spec.norm_epsilon)
        self.temperature = (spec.attn_temperature_scale, spec.attn_temperature_floor)
        self.clipped_rows = spec.clipped_rows
        self.scores = Scores(spec.softmax_scale or None, spec.attn_logit_softcapping)
        self.alibi_factor = 0.0
        if spec.has_alibi:
            scale = spec.softmax_scale or spec.kv_channels**-0.5
            self.alibi_factor = scale if spec.scale_alibi else 1.0
        self.qkv = placement.column_parallel_linear(spec.qkv)
        norms = spec.qk_norms()
        self.q_norm = self.k_norm = None
        if norms:
            group = self.tp.index * spec.num_query_groups // self.tp.size
            self.q_norm = QKNorm(norms["q_norm"], placement, self.first_head, 1)
            self.k_norm = QKNorm(norms["k_norm"], placement, group, self.ranks_per_group)
        self.sinks = None if spec.softmax_type == "vanilla" else Sinks(spec, placement)
        self.out = placement.row_parallel_linear(spec.out)

    @property
    def input_layer(self) -> ColumnParallelLinear:
        """The layer that alone reads the input."""
        return self.qkv

    def forward(self, x: Float[Tensor, "s b h"], context: Context) -> Float[Tensor, "s b h"]:
        """Returns the attention output of each token. Keys and values include cached tokens.

        With sequence parallelism ``x`` and the result are this rank's part of the sequence.
        Queries, keys and values cover the whole sequence, for this rank's heads. With context
        parallelism, they cover the part of the sequence of this context-parallel rank.

        `Context` carries what all layers of a pass share: mask, rotary tables, cache, dropout keys.
        """
        cut = context.sequence_parallel
        q, k, v, gate = self._project(x, cut, context)
        if self.rotation is not None and self.packed_rope is None:
            angles = context.angles[self.rotation]
            q, k = (self.rope(x, *angles, self.rotation.interleaved) for x in (q, k))
        if self.l2_norm is not None:
            q, k = self.l2_norm(q), self.l2_norm(k)
        if self.temperature[0]:
            positions = context.token_positions(q.shape[0], q.device)
            q = (q * query_factors(positions, *self.temperature, q.dtype)).to(q.dtype)
        if context.cache is not None:
            seen = context.cache.update(self.layer, k, v)
            mask = context.mask_of(self.span)
            scores = self._scores_of(q, context)
            y = seen.attend(
                q, mask, query_offset=context.offset, scores=scores, backend=self.backend
            )
            y = gated(y, *gate)
        else:
            core = partial(self._attend, context)
            y = context.maybe_recompute("core_attn", core, q, k, v, *gate)
        result: Tensor = self.out(y.flatten(2), sequence_parallel=cut)
        return result

    def _attend(self, context: Context, q: Tensor, k: Tensor, v: Tensor, *gate: Tensor) -> Tensor:
        """Returns gated attention without a cache."""
        return gated(self._over_all_keys(context, q, k, v), *gate)

    def _over_all_keys(self, context: Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns attention over the keys of all context-parallel ranks."""
        scores = self._scores_of(q, context)
        context.observe_scores(self.layer, self.first_head, q, k, self.span, scores.scale)
        if context.context_parallel is not None:
            parallel = context.context_parallel
            numbers = parallel.comm_of(self.layer), self.dropout_layer, self.first_head
            return parallel.attention(q, k, v, *numbers, scores, self.span)
        site = ATTENTION_PROBABILITIES
        drop = context.attention_dropout(self.dropout_layer, self.first_head, site)
        mask = context.mask_of(self.span)
        return attention(q, k, v, mask, scores, dropout=drop, backend=self.backend)

    def _scores_of(self, q: Tensor, context: Context) -> Scores:
        """Returns the scores of this rank's heads, which are those of ``q``."""
        scores = self.scores
        if context.score_bias is not None:
            scores = replace(scores, bias=context.score_bias)
        if self.alibi_factor:
            heads = (self.tp.size * q.shape[2], self.first_head, q.shape[2])
            slopes = alibi_slopes(*heads, device=q.device, dtype=q.dtype)
            scores = replace(scores, slopes=slopes * self.alibi_factor)
        return scores if self.sinks is None else replace(scores, sinks=self.sinks(q))

    def _project(
        self, x: Float[Tensor, "part b h"], cut: bool | None, context: Context
    ) -> tuple[
        Float[Tensor, "s b n d"],
        Float[Tensor, "s b g d"],
        Float[Tensor, "s b g d"],
        list[Float[Tensor, "s b g m d"]],
    ]:
        """Returns queries, keys, values, and the gates of the heads of each group, if any.

        Queries and keys are rotated already if one operation rotates and separates all heads.
        """
        fused = self.qkv(x, sequence_parallel=cut)
        if self.ranks_per_group > 1:
            fused = gather_query_group(fused, self.tp, self.ranks_per_group)
        fused = fused.unflatten(-1, (-1, self.head_size))
        if self.packed_rope is not None and self.rotation is not None:
            angles = context.angles[self.rotation]
            # Kernels sum the gradients of a group's heads in operations of their own.
            repeat = fused.shape[2] == 1 and context.has_all_keys
            return *self.packed_rope(fused, *angles, self.rotation.interleaved, repeat), []
        *of_heads, k, v = fused.split(self.heads_by_role, dim=3)
        if self.ranks_per_group > 1:
            number = self.tp.index % self.ranks_per_group
            of_heads = [x.chunk(self.ranks_per_group, dim=3)[number] for x in of_heads]
        q, *gate = of_heads
        q, k, v = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)
        return (
            q if self.q_norm is None else self.q_norm(q),
            k if self.k_norm is None else self.k_norm(k),
            v,
            gate,
        )
