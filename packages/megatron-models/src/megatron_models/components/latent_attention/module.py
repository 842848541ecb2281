"""Multi-latent attention: latents, projections by head, rotary positions, attention."""

from functools import partial

import torch
from jaxtyping import Float
from megatron_kernels import Scores, attention, rope
from megatron_parallel.collectives import copy_to_axis, gather_sequence
from megatron_parallel.tensor_parallel import product_weights
from torch import Tensor, nn

from megatron_models.cache import KVHandle, LatentKVCache
from megatron_models.components.attention.span import EVERYTHING
from megatron_models.components.context import Context
from megatron_models.components.dropout_sites import ATTENTION_PROBABILITIES
from megatron_models.components.latent_attention.spec import LatentAttentionSpec
from megatron_models.components.norm.module import Norm
from megatron_models.errors import ConfigError
from megatron_models.placement import Placement


class LatentAttention(nn.Module):
    """Multi-latent attention of one layer; the tensor-parallel axis cuts it by heads.

    Every rank computes the latents of its tokens: of all tokens, or with sequence parallelism of
    its part, which the projections up gather. The rotated key is shared by the heads of all ranks,
    so its gradient is summed over them.

    Without a cache, and in the first pass of one, keys and values of each head are computed. Later
    passes compute in the absorbed form (DeepSeek-AI 2024, appendix C): a head's score with a key
    ``W c`` is that of ``W^T q`` with the latent ``c``, and its output is the projection of the
    weighted latents. No keys or values of old tokens are computed again.
    """

    def __init__(self, spec: LatentAttentionSpec, layer: int, placement: Placement) -> None:
        super().__init__()
        self.layer = layer
        self.dropout_layer: int | Tensor = layer
        self.tp = placement.mesh.axis("tp")
        self.backend = placement.backend("attention")
        self.sequence_parallel = placement.sequence_parallel
        self.first_head = spec.num_attention_heads // self.tp.size * self.tp.index
        self.rotation = spec.rotation
        if spec.rotation is not None:
            self.rope = placement.bind(rope)
        self.query_sizes = [spec.qk_head_dim, spec.qk_pos_emb_head_dim]
        self.key_value_sizes = [spec.qk_head_dim, spec.v_head_dim]
        self.latent_sizes = [spec.kv_lora_rank, spec.qk_pos_emb_head_dim]
        self.clipped_rows = spec.clipped_rows
        self.scores = Scores(spec.latent_softmax_scale, spec.attn_logit_softcapping)
        self.q_name = spec.q_name
        self.q_down = None if spec.q_down is None else placement.replicated_linear(spec.q_down)
        self.q_norm = None if spec.q_norm is None else Norm(spec.q_norm, placement)
        self.add_module(self.q_name, placement.column_parallel_linear(spec.q))
        self.kv_down = placement.replicated_linear(spec.kv_down)
        self.kv_norm = None if spec.kv_norm is None else Norm(spec.kv_norm, placement)
        self.kv_up = placement.column_parallel_linear(spec.kv_up)
        self.out = placement.row_parallel_linear(spec.out)

    def forward(self, x: Float[Tensor, "s b h"], context: Context) -> Float[Tensor, "s b h"]:
        """Returns the attention output of each token, as `Attention.forward` does.

        Raises:
            ConfigError: The cache of the context cannot store latents.
        """
        cut = context.sequence_parallel
        cut = self.sequence_parallel if cut is None else cut
        query_latent = self._query_latent(x)
        q = self._queries(query_latent, context, cut)
        latent, shared_key = self._latents(x, context, cut)
        index = self._selectors(x, query_latent, context, cut)
        seen = None
        if context.cache is not None:
            seen = self._cached(context, latent, shared_key, *index)
        if seen is not None and context.offset > 0:
            y = self._absorbed(q, seen, context, *index)
        else:
            k, v = self._keys_values(latent, shared_key, cut)

            def project(query: Tensor, latent: Tensor, key: Tensor) -> tuple[Tensor, ...]:
                return self._queries(query, context, cut), *self._keys_values(latent, key, cut)

            with context.maybe_discard(
                "mla_up_proj", (q, k, v), project, query_latent, latent, shared_key
            ):
                core = partial(self._attend, context)
                y = context.maybe_recompute("core_attn", core, q, k, v, *index)
        result: Tensor = self.out(y.flatten(2), sequence_parallel=cut)
        return result

    def _selectors(
        self, x: Float[Tensor, "part b h"], latent: Tensor, context: Context, cut: bool
    ) -> tuple[Tensor, ...]:
        """Returns what selects keys, for a subclass; nothing if all are read.

        Args:
            x: Tokens of this rank.
            latent: Latents of their queries.
            context: State of the pass.
            cut: Whether sequence parallelism cuts the tokens.
        """
        return ()

    def _query_latent(self, x: Float[Tensor, "part b h"]) -> Float[Tensor, "part b r"]:
        """Returns the latents of queries, or ``x`` if queries have none."""
        if self.q_down is not None:
            x = self.q_down(x)
        return x if self.q_norm is None else self.q_norm(x)

    def _queries(
        self, latent: Float[Tensor, "part b r"], context: Context, cut: bool
    ) -> Float[Tensor, "s b n d"]:
        """Returns the queries of this rank's heads."""
        q = getattr(self, self.q_name)(latent, sequence_parallel=cut)
        plain, rotated = q.split(self.query_sizes, dim=-1)
        return torch.cat((plain, self._rotate(rotated, context)), -1)

    def _latents(
        self, x: Float[Tensor, "part b h"], context: Context, cut: bool
    ) -> tuple[Float[Tensor, "part b r"], Float[Tensor, "s b 1 e"]]:
        """Returns the latents of this rank's tokens, and the rotated keys of all tokens."""
        latent, shared_key = self.kv_down(x).split(self.latent_sizes, dim=-1)
        # A copy: what is saved of a view would keep the channels of the shared key in memory too.
        latent = latent.contiguous()
        if self.kv_norm is not None:
            latent = self.kv_norm(latent)
        enter = gather_sequence if cut else copy_to_axis
        shared_key = enter(shared_key, self.tp).unsqueeze(2)
        return latent, self._rotate(shared_key, context)

    def _rotate(self, x: Float[Tensor, "s b n d"], context: Context) -> Float[Tensor, "s b n d"]:
        if self.rotation is None:
            return x
        rotated: Tensor = self.rope(x, *context.angles[self.rotation], self.rotation.interleaved)
        return rotated

    def _keys_values(
        self, latent: Float[Tensor, "part b r"], shared_key: Float[Tensor, "s b 1 e"], cut: bool
    ) -> tuple[Float[Tensor, "s b n d"], Float[Tensor, "s b n dv"]]:
        """Returns keys and values of this rank's heads."""
        up = self.kv_up(latent, sequence_parallel=cut)
        k, v = up.split(self.key_value_sizes, dim=-1)
        k = torch.cat((k, shared_key.expand(-1, -1, k.shape[2], -1)), -1)
        # A copy: a view of the values would keep the keys without rotation in memory too.
        return k, v.contiguous()

    def _attend(self, context: Context, q: Tensor, k: Tensor, v: Tensor, *index: Tensor) -> Tensor:
        """Returns attention without a cache, over the keys of all context-parallel ranks."""
        scale = self.scores.scale
        context.observe_scores(self.layer, self.first_head, q, k, EVERYTHING, scale)
        if context.context_parallel is not None:
            parallel = context.context_parallel
            numbers = parallel.comm_of(self.layer), self.dropout_layer, self.first_head
            return parallel.attention(q, k, v, *numbers, self.scores, EVERYTHING)
        site = ATTENTION_PROBABILITIES
        drop = context.attention_dropout(self.dropout_layer, self.first_head, site)
        return attention(q, k, v, context.mask, self.scores, dropout=drop, backend=self.backend)

    def _cached(
        self,
        context: Context,
        latent: Float[Tensor, "s b r"],
        shared_key: Float[Tensor, "s b 1 e"],
        *index: Tensor,
    ) -> KVHandle:
        """Adds the latents and rotated keys of new tokens to the cache; returns those of all."""
        if not isinstance(context.cache, LatentKVCache):
            raise ConfigError(
                f"layer {self.layer} caches latents, which a cache of type "
                f"{type(context.cache).__name__} does not store; use a StaticKVCache"
            )
        keys = torch.cat((latent.unsqueeze(2), shared_key), -1)
        return context.cache.update_latent(self.layer, keys, latent.shape[-1])

    def _absorbed(
        self, q: Float[Tensor, "s b n d"], seen: KVHandle, context: Context, *index: Tensor
    ) -> Float[Tensor, "s b n dv"]:
        """Returns attention over cached latents."""
        weight = self.kv_up.product.merged_weight(product_weights(self.kv_up))
        of_keys, of_values = torch.split(weight, self.key_value_sizes, dim=1)
        plain, rotated = torch.split(q, self.query_sizes, dim=-1)
        q = torch.cat((torch.einsum("sbnd,ndr->sbnr", plain, of_keys), rotated), -1)
        y = seen.attend(
            q,
            context.mask,
            query_offset=context.offset,
            scores=self.scores,
            backend=self.backend,
        )
        return torch.einsum("sbnr,ndr->sbnd", y, of_values)
