"""The end of a model: logits, cut along the vocabulary over tensor-parallel ranks, and losses."""

from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from megatron_parallel import Axis
from megatron_parallel.collectives import scatter_sequence
from megatron_parallel.tensor_parallel import OutputLayer, VocabularyLoss, bound_logits
from torch import Tensor
from torch.nn import functional

from megatron_models.components.embedding.spec import OutputConfig
from megatron_models.errors import ConfigError


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
    config: OutputConfig,
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
        config: Size of the vocabulary, and what is done with the logits.
        loss: Computes the loss, with the output layer.
        label_smoothing: Share of the loss that is spread over all tokens of the vocabulary.
        sequence_parallel: Whether ``x`` is cut. Defaults to how the layer was built.
    """
    label_loss = partial(
        loss,
        targets=labels.t(),
        true_vocab=config.vocab_size,
        label_smoothing=label_smoothing,
        softcap=config.final_logit_softcapping,
    )
    return output(_scaled(x, config), sequence_parallel=sequence_parallel, loss=label_loss).t()


def output_logits(
    output: Output,
    x: Float[Tensor, "part b h"],
    config: OutputConfig,
    tp: Axis,
    logits_at: Int[Tensor, "b k"] | None = None,
    *,
    is_cut: bool,
    head: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, "_ b v_part"]:
    """Returns the logits, those of padding tokens -inf.

    Args:
        output: The output layer.
        x: The stream, or this rank's part of it.
        config: Size of the vocabulary, and what is done with the logits.
        tp: The axis that cuts the vocabulary.
        logits_at: Indices of the tokens whose logits are computed, ``k`` for each sequence.
            Defaults to all.
        is_cut: Whether ``tp`` cuts the sequence of ``x``.
        head: Layers before the output layer, which read the stream. Defaults to none.
    """
    if logits_at is not None:
        x = select_tokens(x, logits_at, tp if is_cut else None)
    x = x if head is None else head(x)
    found = output(_scaled(x, config), sequence_parallel=is_cut)
    bounded = bound_logits(found, config.final_logit_softcapping).to(found.dtype)
    logits = mask_padding_logits(bounded, tp, config.vocab_size)
    return logits if logits_at is None else logits[: logits_at.shape[1]]


def check_labels(labels: Tensor | None, logits_at: Tensor | None) -> None:
    """Refuses labels together with a selection of tokens.

    Raises:
        ConfigError: Both are given.
    """
    if labels is not None and logits_at is not None:
        raise ConfigError("labels and logits_at exclude each other: a loss needs all tokens")


def _scaled(x: Tensor, config: OutputConfig) -> Tensor:
    """Returns the stream divided as the logits are, which are the larger tensor."""
    return x if config.logits_scaling == 1.0 else x / config.logits_scaling


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
