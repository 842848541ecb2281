"""Heads of whole sequences: pooling over tokens on all ranks, pooler, and output layer."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from megatron_kernels import Mask
from megatron_parallel import keyed_dropout
from megatron_parallel.collectives import copy_to_axis, reduce_from_axis
from torch import Tensor, nn
from torch.nn import functional

from megatron_models.components.context import Context
from megatron_models.components.dropout_sites import EMBEDDING_LAYER, SEQUENCE_HEAD
from megatron_models.components.heads.spec import Pooling, SequenceHeadSpec
from megatron_models.errors import ConfigError
from megatron_models.placement import Placement


class SequenceHead(nn.Module):
    """Maps the stream of each sequence to one vector.

    Every rank gets the vectors of all sequences of the micro-batch.
    """

    def __init__(self, spec: SequenceHeadSpec, placement: Placement) -> None:
        super().__init__()
        whole = replace(placement, sequence_parallel=False)
        self.sequence_axis = placement.mesh.axis("tp") if placement.sequence_parallel else None
        self.pooling, self.normalizes, self.drops = spec.pooling, spec.normalizes, spec.drops
        self.pooler = None if spec.pooler is None else whole.replicated_linear(spec.pooler)
        self.out = None if spec.out is None else whole.replicated_linear(spec.out)

    def forward(
        self, x: Float[Tensor, "part b h"], mask: Mask, context: Context
    ) -> Float[Tensor, "b n"]:
        """Returns the output of each sequence, or its pooled vector if there is no output layer.

        With context parallelism all ranks have the same result, but a loss of it must count on one
        of them alone: gradients are summed over the ranks.

        Args:
            x: Stream of all tokens, or of this rank's part of them.
            mask: Mask of the whole sequences; document -1 is padding, which is not read.
            context: State of the pass.

        Raises:
            ConfigError: The pass decodes with a cache.
        """
        pooled = self.pool(x, mask, context)
        if self.pooler is not None:
            pooled = torch.tanh(self.pooler(pooled))
        if self.drops and context.dropout is not None:
            drop = context.dropout.global_dropout
            key = drop.key.narrow(0, 1)
            site = {"layer": EMBEDDING_LAYER, "site": SEQUENCE_HEAD}
            pooled = keyed_dropout(pooled[None], drop.hidden, key, **site)[0]
        found = pooled if self.out is None else self.out(pooled)
        return functional.normalize(found, dim=-1) if self.normalizes else found

    def pool(
        self, x: Float[Tensor, "part b h"], mask: Mask, context: Context
    ) -> Float[Tensor, "b h"]:
        """Returns the pooled stream of each sequence, with the arguments of `forward`."""
        if context.cache is not None:
            raise ConfigError(
                "a head of whole sequences does not decode; call the model without cache"
            )
        axis = None if context.sequence_parallel is False else self.sequence_axis
        parallel = context.context_parallel
        length = len(x) * (1 if axis is None else axis.size)
        if parallel is None:
            indices = torch.arange(length, device=x.device)[None]
        else:
            length *= parallel.split.ranks
            indices = parallel.split.indices[parallel.axis.index].to(x.device)
        if axis is not None:
            indices = indices.chunk(axis.size, 1)[axis.index]
        ids = mask.document_ids
        weights = pooling_weights(self.pooling, indices, length, ids).to(x.device)
        wide = torch.promote_types(x.dtype, torch.float32)
        pooled = (x.to(wide) * weights.to(wide)[..., None]).sum(0)
        if axis is not None:
            pooled = reduce_from_axis(pooled, axis)
        if parallel is not None:
            # Sums gradients too: only one rank counts a loss, and all ranks have tokens.
            pooled = copy_to_axis(reduce_from_axis(pooled, parallel.axis), parallel.axis)
        return pooled.to(x.dtype)


def pooling_weights(
    pooling: Pooling,
    indices: Int[Tensor, "b_or_1 part"],
    length: int,
    document_ids: Int[Tensor, "b s"] | None,
) -> Float[Tensor, "part _"]:
    """Returns the weight of each token in its sequence's vector, in float64.

    Args:
        pooling: Which tokens are read.
        indices: Indices of this rank's tokens in the sequences.
        length: Length of the sequences.
        document_ids: -1 for padding. None means that there is none. Sequences of padding alone
            have the vector 0.
    """
    if pooling == "first":
        return (indices == 0).double().t()
    if document_ids is None:
        if pooling == "last":
            return (indices == length - 1).double().t()
        return torch.full_like(indices, 1 / length, dtype=torch.float64).t()
    tokens = document_ids >= 0
    if pooling == "last":
        order = torch.arange(length, device=tokens.device)
        last = order.where(tokens, -1).amax(1, keepdim=True)
        return (indices == last).double().t()
    own = tokens.gather(1, indices.expand(len(tokens), -1))
    return (own / tokens.sum(1, keepdim=True).clamp(min=1).double()).t()


def sentence_embeddings(
    stream: Float[Tensor, "s b h"],
    document_ids: Int[Tensor, "b s"] | None = None,
    *,
    pooling: Pooling = "mean",
    normalize: bool = True,
) -> Float[Tensor, "b h"]:
    """Returns one vector for each text, from the stream of a whole encoder (`EncoderOutput`).

    The defaults are those of MiniLM: the mean over tokens, divided by its Euclidean norm (Reimers
    and Gurevych 2019, "Sentence-BERT").

    Args:
        stream: Output of the last layer, on one rank or gathered.
        document_ids: -1 for padding, which is not read. Defaults to no padding.
        pooling: Which tokens are read.
        normalize: Whether vectors have length 1. Defaults to True.
    """
    indices = torch.arange(len(stream), device=stream.device)[None]
    weights = pooling_weights(pooling, indices, len(stream), document_ids)
    wide = torch.promote_types(stream.dtype, torch.float32)
    pooled = (stream.to(wide) * weights.to(stream.device, wide)[..., None]).sum(0)
    found = functional.normalize(pooled, dim=-1) if normalize else pooled
    return found.to(stream.dtype)
