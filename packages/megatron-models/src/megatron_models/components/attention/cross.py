"""Attention of a decoder to the encoder's output: two projections, attention, projection back."""

from functools import partial

from jaxtyping import Float
from megatron_kernels import Mask, attention
from torch import Tensor, nn

from megatron_models.cache import CrossKVCache, KeysValues
from megatron_models.components.attention.module import gather_query_group
from megatron_models.components.attention.spec import CrossAttentionSpec, query_group_ranks
from megatron_models.components.context import Context
from megatron_models.components.dropout_sites import CROSS_ATTENTION_PROBABILITIES
from megatron_models.errors import ConfigError
from megatron_models.placement import Placement


class CrossAttention(nn.Module):
    """Cross-attention of one layer; the tensor-parallel axis cuts it by query groups.

    Queries come from the decoder's stream, keys and values from the encoder's output. Neither is
    rotated: places of two texts have no distance. Where there are more ranks than groups, ranks
    share a group as in `Attention`.
    """

    def __init__(self, spec: CrossAttentionSpec, layer: int, placement: Placement) -> None:
        super().__init__()
        self.layer = layer
        self.tp = placement.mesh.axis("tp")
        self.first_head = spec.num_attention_heads // self.tp.size * self.tp.index
        self.head_size = spec.kv_channels
        self.ranks_per_group = query_group_ranks(spec, self.tp.size)
        self.softcap = spec.attn_logit_softcapping
        self.q = placement.column_parallel_linear(spec.q)
        self.kv = placement.column_parallel_linear(spec.kv)
        self.out = placement.row_parallel_linear(spec.out)

    def forward(self, x: Float[Tensor, "s b h"], context: Context) -> Float[Tensor, "s b h"]:
        """Lets every token of the decoder attend to the encoder's output as the mask allows.

        With sequence parallelism ``x``, the encoder's output and the result are this rank's parts
        of their sequences; queries, keys and values are those of all of them, for this rank's
        heads. A token that may attend nowhere gets zeros before the projection back.

        Args:
            x: the decoder's stream, normalised.
            context: what the layers of this pass share; ``encoder_output`` ``[t, b, h]`` and
                ``cross_mask`` ``[b, s, t]`` are the encoder's output and who may attend to it.
                With a cache the output is projected once, in the pass that has it.

        Raises:
            ConfigError: the context has no encoder's output, or nothing that says who may see it;
                or a cache that does not keep it.
        """
        cut, mask = context.sequence_parallel, context.cross_mask
        new = None if context.encoder_output is None else self._project(context.encoder_output, cut)
        if mask is None or (new is None and context.cache is None):
            raise ConfigError(
                f"layer {self.layer} attends to an encoder's output, and the context has none: "
                "give `encoder_output` and `cross_mask`"
            )
        q = self.q(x, sequence_parallel=cut)
        if context.cache is not None:
            if not isinstance(context.cache, CrossKVCache):
                raise ConfigError(
                    f"layer {self.layer} attends to an encoder's output, which a cache of type "
                    f"{type(context.cache).__name__} does not keep; use a StaticKVCache"
                )
            seen = context.cache.encoder_kv(self.layer, new)
            y = seen.attend(q, mask, softcap=self.softcap)
        else:
            core = partial(self._attend, context, mask)
            y = context.maybe_recompute("core_attn", core, q, *(new or ()))
        result: Tensor = self.out(y.flatten(2), sequence_parallel=cut)
        return result

    def _project(self, encoded: Float[Tensor, "part b h"], cut: bool | None) -> KeysValues:
        """Keys and values of the encoder's whole text."""
        fused = self.kv(encoded, sequence_parallel=cut)
        if self.ranks_per_group > 1:
            fused = gather_query_group(fused, self.tp, self.ranks_per_group)
        k, v = fused.split(self.head_size, dim=-1)
        return k, v

    def _attend(self, context: Context, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        site = CROSS_ATTENTION_PROBABILITIES
        drop = context.attention_dropout(self.layer, self.first_head, site)
        return attention(q, k, v, mask, dropout=drop, softcap=self.softcap)
