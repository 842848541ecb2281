"""Cross-attention: a decoder's queries attend to the encoder's output."""

from functools import partial

from jaxtyping import Float
from megatron_kernels import Mask, Scores, attention
from torch import Tensor, nn

from megatron_models.cache import CrossKVCache, KeysValues
from megatron_models.components.attention.heads import gather_query_group
from megatron_models.components.attention.spec import CrossAttentionSpec, query_group_ranks
from megatron_models.components.context import Context
from megatron_models.components.dropout_sites import CROSS_ATTENTION_PROBABILITIES
from megatron_models.errors import ConfigError
from megatron_models.placement import Placement


class CrossAttention(nn.Module):
    """Cross-attention of one layer; the tensor-parallel axis cuts it by query groups.

    Queries come from the decoder's stream, keys and values from the encoder's output. Neither is
    rotated, since positions in two texts have no distance. With more ranks than groups, ranks share
    a group as in `Attention`.
    """

    def __init__(self, spec: CrossAttentionSpec, layer: int, placement: Placement) -> None:
        super().__init__()
        self.layer = layer
        self.dropout_layer: int | Tensor = layer
        self.tp = placement.mesh.axis("tp")
        self.backend = placement.backend("attention")
        self.first_head = spec.num_attention_heads // self.tp.size * self.tp.index
        self.head_size = spec.kv_channels
        self.ranks_per_group = query_group_ranks(spec, self.tp.size)
        self.scores = Scores(spec.softmax_scale or None, spec.attn_logit_softcapping)
        self.q = placement.column_parallel_linear(spec.q)
        self.kv = placement.column_parallel_linear(spec.kv)
        self.out = placement.row_parallel_linear(spec.out)

    def forward(self, x: Float[Tensor, "s b h"], context: Context) -> Float[Tensor, "s b h"]:
        """Returns the attention of the decoder's tokens to the encoder's output.

        With sequence parallelism ``x``, the encoder's output and the result are this rank's parts
        of their sequences. Queries, keys and values cover the whole sequences, for this rank's
        heads. A token that may attend to nothing gets zeros before the output projection.

        Args:
            x: The decoder's stream, normalized.
            context: State of the pass. ``encoder_output`` ``[t, b, h]`` is the encoder's output and
                ``cross_mask`` ``[b, s, t]`` its mask. With a cache the output is projected once, in
                the pass that has it.

        Raises:
            ConfigError: The context lacks the encoder's output or its mask, or its cache does not
                store the encoder's keys and values.
        """
        cut, mask = context.sequence_parallel, context.cross_mask
        new = None if context.encoder_output is None else self._project(context.encoder_output, cut)
        if mask is None or (new is None and context.cache is None):
            raise ConfigError(
                f"layer {self.layer} attends to an encoder's output, which the context lacks; "
                "set `encoder_output` and `cross_mask`"
            )
        q = self.q(x, sequence_parallel=cut)
        if context.cache is not None:
            if not isinstance(context.cache, CrossKVCache):
                raise ConfigError(
                    f"layer {self.layer} attends to an encoder's output, which a cache of type "
                    f"{type(context.cache).__name__} does not store; use a StaticKVCache"
                )
            seen = context.cache.encoder_kv(self.layer, new)
            y = seen.attend(q, mask, scores=self.scores, backend=self.backend)
        else:
            core = partial(self._attend, context, mask)
            y = context.maybe_recompute("core_attn", core, q, *(new or ()))
        result: Tensor = self.out(y.flatten(2), sequence_parallel=cut)
        return result

    def _project(self, encoded: Float[Tensor, "part b h"], cut: bool | None) -> KeysValues:
        """Returns keys and values of the encoder's whole text."""
        fused = self.kv(encoded, sequence_parallel=cut)
        if self.ranks_per_group > 1:
            fused = gather_query_group(fused, self.tp, self.ranks_per_group)
        k, v = fused.split(self.head_size, dim=-1)
        return k, v

    def _attend(self, context: Context, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        site = CROSS_ATTENTION_PROBABILITIES
        drop = context.attention_dropout(self.dropout_layer, self.first_head, site)
        return attention(q, k, v, mask, self.scores, dropout=drop, backend=self.backend)
