"""The end of a model: logits of the vocabulary, cut over tensor-parallel ranks, and losses."""

import torch
from jaxtyping import Float, Int
from megatron_parallel import Axis
from megatron_parallel.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor


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
