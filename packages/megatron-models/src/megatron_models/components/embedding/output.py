"""The end of a model: logits of the vocabulary, cut over tensor-parallel ranks, and losses."""

import torch
from jaxtyping import Float, Int
from megatron_parallel import Axis, scatter_sequence
from megatron_parallel.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor
from torch.nn import functional


def stream_at(
    x: Float[Tensor, "part b h"], places: Int[Tensor, "b k"], sequence_axis: Axis | None = None
) -> Float[Tensor, "_ b h"]:
    """Return the residual stream at some places only, as input of an output layer.

    Args:
        x: the stream of all tokens, or with ``sequence_axis`` this rank's part of it.
        places: which tokens of each sequence, 0 to s - 1.
        sequence_axis: the ranks that the sequence is cut over, which the output layer gathers.

    Returns:
        ``[k, b, h]``; or with ``sequence_axis`` of n ranks this rank's part of it,
        ``[ceil(k / n), b, h]``, with zeros behind the last place.
    """
    rows = torch.arange(x.shape[1], device=x.device)
    if sequence_axis is None:
        return x[places.t(), rows]
    local = places.t() - sequence_axis.index * len(x)
    elsewhere = (local < 0) | (local >= len(x))
    partial = x[local.masked_fill(elsewhere, 0), rows]
    partial = partial.masked_fill(elsewhere.unsqueeze(-1), 0.0)
    missing = -len(partial) % sequence_axis.size
    return scatter_sequence(functional.pad(partial, (0, 0, 0, 0, 0, missing)), sequence_axis)


def losses_or_logits(
    logits: Float[Tensor, "s b v_part"],
    labels: Int[Tensor, "b s"] | None,
    tp: Axis,
    vocab: int,
    label_smoothing: float = 0.0,
) -> Float[Tensor, "..."]:
    """The loss of each token ``[b, s]``; without labels the logits, padding tokens at -inf.

    Args:
        logits: this rank's columns; those of padding tokens are overwritten, without labels.
        labels: the token to predict at each place; -100 marks a place without loss.
        tp: the axis that cuts the vocabulary.
        vocab: true tokens of it.
        label_smoothing: share of the loss that all tokens of the vocabulary have in common.
    """
    if labels is not None:
        losses = vocab_parallel_cross_entropy(
            logits, labels.t(), tp, vocab, label_smoothing=label_smoothing
        )
        return losses.t()
    true = vocab - tp.index * logits.shape[-1]
    if true < logits.shape[-1]:
        logits[..., max(true, 0) :] = -torch.inf
    return logits
