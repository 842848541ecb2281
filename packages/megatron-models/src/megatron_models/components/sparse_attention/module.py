"""Sparse latent attention: an indexer scores all keys, and attention reads the best."""

import math
from dataclasses import replace
from typing import Final

import torch
from jaxtyping import Bool, Float
from megatron_kernels import Mask, attention, index_scores, rope, select_keys
from megatron_parallel.collectives import all_reduce, gather_sequence
from torch import Tensor, nn
from torch.nn import functional

from megatron_models.cache import KVHandle, LatentKV
from megatron_models.components.context import Context
from megatron_models.components.dropout_sites import ATTENTION_PROBABILITIES
from megatron_models.components.latent_attention.module import LatentAttention
from megatron_models.components.norm.module import Norm
from megatron_models.components.sparse_attention.spec import INDEXER_LOSS, SparseAttentionSpec
from megatron_models.errors import ConfigError
from megatron_models.placement import Placement

BLOCK: Final = 128
"""Queries whose keys are selected at a time, so that memory holds few rows of scores."""

Index = tuple[Float[Tensor, "s b n d"], Float[Tensor, "s b d"], Float[Tensor, "s b n"]]
"""Queries, keys and weights of heads of an indexer."""


class Indexer(nn.Module):
    """The projections of the indexer, which every tensor-parallel rank holds."""

    q: Tensor
    k: Tensor
    weights: Tensor

    def __init__(self, spec: SparseAttentionSpec, placement: Placement) -> None:
        super().__init__()
        placement.register_parameters(self, spec.indexer())
        self.k_norm = Norm(spec.index_norm, placement)
        self.tp = placement.mesh.axis("tp")
        self.rope = placement.bind(rope)

    def forward(
        self,
        x: Float[Tensor, "part b h"],
        latent: Float[Tensor, "part b r"],
        angles: tuple[Tensor, Tensor] | None,
        cut: bool,
    ) -> Index:
        """Returns queries, keys and weights of all tokens.

        Args:
            x: Tokens, or with ``cut`` this rank's part of them.
            latent: Latents of the queries, likewise.
            angles: Cosines and sines of the rotary angles, of all tokens.
            cut: Whether sequence parallelism cuts the tokens.
        """
        k, weights = self.k_norm(functional.linear(x, self.k)), functional.linear(x, self.weights)
        if cut:
            latent, k, weights = (gather_sequence(each, self.tp) for each in (latent, k, weights))
        q = torch.einsum("sbr,ndr->sbnd", latent, self.q)
        if angles is not None:  # halves, although queries and keys of attention may be pairs
            q, k = self.rope(q, *angles), self.rope(k.unsqueeze(2), *angles).squeeze(2)
        heads, width = self.q.shape[:2]
        return q, k, weights * (heads * width) ** -0.5


class SparseAttention(LatentAttention):
    """Sparse latent attention of one layer; the tensor-parallel axis cuts it by heads.

    All ranks select the same keys. With a cache, the keys of the indexer follow the rotated keys.

    Raises:
        ConfigError: The layout cannot cut sparse attention.
    """

    def __init__(self, spec: SparseAttentionSpec, layer: int, placement: Placement) -> None:
        spec.check_layout(placement.mesh.layout)
        super().__init__(spec, layer, placement)
        self.count, self.layers = spec.dsa_indexer_topk, spec.num_layers
        self.scale = spec.latent_softmax_scale
        self.coefficient = spec.dsa_indexer_loss_coeff
        self.sparse_loss = spec.dsa_indexer_use_sparse_loss
        self.indexer = Indexer(spec, placement)
        self.index_scores = placement.bind(index_scores)

    def _selectors(
        self, x: Float[Tensor, "part b h"], latent: Tensor, context: Context, cut: bool
    ) -> Index:
        """Returns what selects keys; its gradients do not reach the tokens."""
        angles = None if self.rotation is None else context.angles[self.rotation]
        index: Index = self.indexer(x.detach(), latent.detach(), angles, cut)
        return index

    def _cached(
        self, context: Context, latent: Tensor, shared_key: Tensor, *index: Tensor
    ) -> KVHandle:
        rotated = torch.cat((shared_key, index[1].unsqueeze(2)), -1)
        return super()._cached(context, latent, rotated)

    def _absorbed(
        self, q: Float[Tensor, "s b n d"], seen: KVHandle, context: Context, *index: Tensor
    ) -> Float[Tensor, "s b n dv"]:
        """Returns attention over cached latents, those that the indexer selects."""
        if not isinstance(seen, LatentKV):
            raise ConfigError(
                f"layer {self.layer} reads cached keys of its indexer, which a handle of type "
                f"{type(seen).__name__} does not show; use a StaticKVCache"
            )
        indexed, _, weights = index
        width = indexed.shape[-1]
        keys = seen.k[:, :, 0, -width:]
        allowed = context.mask.allowed(len(q), len(keys), context.offset, device=q.device)
        selected = select_keys(self.index_scores(indexed, keys, weights), allowed, self.count)
        unread = replace(seen, k=seen.k[..., :-width])
        own = replace(context, mask=Mask(dense=selected))
        return super()._absorbed(q, unread, own)

    def _attend(self, context: Context, q: Tensor, k: Tensor, v: Tensor, *index: Tensor) -> Tensor:
        """Returns attention to the selected keys, block by block of queries."""
        site = ATTENTION_PROBABILITIES
        drop = context.attention_dropout(self.dropout_layer, self.first_head, site)
        indexed, keys, weights = index
        trains = torch.is_grad_enabled() and indexed.requires_grad
        collected = context.auxiliary_losses if trains and self.coefficient else None
        size = BLOCK if drop is None else len(q)  # dropout masks are those of all queries
        outputs, losses = [], []
        for start in range(0, len(q), size):
            rows = slice(start, start + size)
            allowed = allowed_rows(context.mask, rows, len(q), len(k), q.device)
            with torch.set_grad_enabled(collected is not None):
                scores = self.index_scores(indexed[rows], keys, weights[rows])
            selected = select_keys(scores, allowed, self.count)
            mask = Mask(dense=selected)
            outputs.append(
                attention(q[rows], k, v, mask, self.scores, dropout=drop, backend=self.backend)
            )
            if collected is not None:
                compared = selected if self.sparse_loss else allowed.expand_as(selected)
                target = self._probabilities(q[rows], k, compared)
                losses.append(divergence(target, scores, compared))
        y = torch.cat(outputs)
        if collected is not None:
            # All ranks compute the same loss, and have an equal share of it and of its gradient.
            share = torch.stack(losses).sum() / (self.layers * self.tp.size)
            return collected.attach(
                y, INDEXER_LOSS, share, self.coefficient * self.layers, replicated=()
            )
        # Gradients of zero, so that every parameter takes part in the backward pass.
        if not trains:
            return y
        nothing = torch.stack([0 * each.sum() for each in index]).sum()
        return y + nothing.to(y.dtype)

    @torch.no_grad()
    def _probabilities(
        self, q: Float[Tensor, "c b n d"], k: Float[Tensor, "t b n d"], compared: Tensor
    ) -> Float[Tensor, "b c t"]:
        """Returns the mean probabilities of attention over the heads of all ranks."""
        total = torch.zeros((), device=q.device)
        for head in range(q.shape[2]):
            scores = _products(q[:, :, head], k[:, :, head]) * self.scale
            if self.scores.softcap:
                scores = self.scores.softcap * torch.tanh(scores / self.scores.softcap)
            scores = scores.masked_fill(~compared, -math.inf)
            total = total + torch.softmax(scores, -1).nan_to_num()
        return all_reduce(total, self.tp, purpose=INDEXER_LOSS) / (q.shape[2] * self.tp.size)


def allowed_rows(
    mask: Mask, rows: slice, queries: int, keys: int, device: torch.device
) -> Bool[Tensor, "b_or_1 c t"]:
    """Returns which keys some of the queries may attend to."""
    start, end, _ = rows.indices(queries)
    own_queries = mask.query_positions is not None or mask.query_document_ids is not None
    if mask.dense is not None or own_queries:
        return mask.allowed(queries, keys, device=device)[:, start:end]
    return mask.allowed(end - start, keys, start, device=device)


def divergence(
    target: Float[Tensor, "b c t"], scores: Float[Tensor, "b c t"], compared: Bool[Tensor, "b c t"]
) -> Float[Tensor, ""]:
    """Returns the sum over queries of the KL divergence of the scores' softmax from a target.

    Args:
        target: Probabilities, zero for keys that are not compared.
        scores: Scores of the indexer.
        compared: Keys that take part. A query without any adds nothing.
    """
    masked = scores.masked_fill(~compared, torch.finfo(scores.dtype).min)
    logs = torch.log_softmax(masked, -1).masked_fill(~compared, 0)
    return (torch.xlogy(target, target) - target * logs).sum()


def _products(q: Float[Tensor, "c b d"], k: Float[Tensor, "t b d"]) -> Float[Tensor, "b c t"]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.einsum("cbd,tbd->bct", q.to(wide), k.to(wide))
