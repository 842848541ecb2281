"""The end of a model: logits, cut along the vocabulary over tensor-parallel ranks, and losses."""

from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from megatron_parallel import Axis
from megatron_parallel.collectives import scatter_sequence
from megatron_parallel.tensor_parallel import OutputLayer, VocabularyLoss
from torch import Tensor
from torch.nn import functional


def select_tokens(
    x: Float[Tensor, "part b h"], indices: Int[Tensor, "b k"], sequence_axis: Axis | None = None
) -> Float[Tensor, "_ b h"]:
    """Returns the residual stream of selected tokens, as input of an output layer.

    Args:
        x: Stream of all tokens, or with ``sequence_axis`` this rank's part of it.
        indices: Indices of the tokens in each sequence, 0 to s - 1.
        sequence_axis: The axis that cuts the sequence, which the output layer gathers.

    Returns:
        ``[k, b, h]``; with ``sequence_axis`` of n ranks this rank's part of it,
        ``[ceil(k / n), b, h]``, padded with zeros.
    """
    rows = torch.arange(x.shape[1], device=x.device)
    if sequence_axis is None:
        return x[indices.t(), rows]
    local = indices.t() - sequence_axis.index * len(x)
    elsewhere = (local < 0) | (local >= len(x))
    partial = x[local.masked_fill(elsewhere, 0), rows]
    partial = partial.masked_fill(elsewhere.unsqueeze(-1), 0.0)
    missing = -len(partial) % sequence_axis.size
    return scatter_sequence(functional.pad(partial, (0, 0, 0, 0, 0, missing)), sequence_axis)


@runtime_checkable
class Output(Protocol):
    """An output layer, tied or untied: returns logits or a loss."""

    def __call__(
        self,
        x: Tensor,
        *,
        sequence_parallel: bool | None = None,
        loss: Callable[[Tensor, OutputLayer], Tensor] | None = None,
    ) -> Tensor:
        """Returns logits or a loss; see `megatron_parallel.ColumnParallelLinear.forward`."""


def token_losses(
    output: Output,
    x: Float[Tensor, "part b h"],
    labels: Int[Tensor, "b s"],
    vocab: int,
    loss: VocabularyLoss,
    *,
    label_smoothing: float = 0.0,
    sequence_parallel: bool | None = None,
) -> Float[Tensor, "b s"]:
    """Returns the loss of each token.

    Args:
        output: The output layer.
        x: The stream, or this rank's part of it.
        labels: Token to predict at each index; -100 marks a token without loss.
        vocab: Size of the vocabulary, without padding.
        loss: Computes the loss, with the output layer.
        label_smoothing: Share of the loss that is spread over all tokens of the vocabulary.
        sequence_parallel: Whether ``x`` is cut. Defaults to how the layer was built.
    """
    label_loss = partial(
        loss, targets=labels.t(), true_vocab=vocab, label_smoothing=label_smoothing
    )
    return output(x, sequence_parallel=sequence_parallel, loss=label_loss).t()


def mask_padding_logits(
    logits: Float[Tensor, "s b v_part"], tp: Axis, vocab: int
) -> Float[Tensor, "s b v_part"]:
    """Sets the logits of padding tokens to -inf in place; returns the logits.

    Args:
        logits: This rank's columns.
        tp: The axis that cuts the vocabulary.
        vocab: Size of the vocabulary, without padding.
    """
    true = vocab - tp.index * logits.shape[-1]
    if true < logits.shape[-1]:
        logits[..., max(true, 0) :] = -torch.inf
    return logits
