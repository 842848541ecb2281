"""Tokens in, tokens or log-probabilities out."""

from collections.abc import Callable, Sequence

import torch

from megatron_infer.engine.batch import Batch
from megatron_infer.engine.continuation import Continuation
from megatron_infer.engine.stages import AnyModel, evaluating
from megatron_infer.params import SamplingParams


def generate_tokens(
    model: AnyModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    sources: Sequence[Sequence[int]] | None = None,
    stop_tokens: frozenset[int] = frozenset(),
    on_token: Callable[[int, int], object] | None = None,
    log_probs: bool = False,
) -> list[Continuation]:
    """Continues token sequences of any lengths, all at once.

    Args:
        model: a model on any device, or this rank's part of one that is cut, in whatever layout: a
            stage, or all stages of this rank, such as ``trainer.task.stages`` of a run that goes on
            afterwards as if nothing had been generated. All ranks call this with the same
            arguments. Modules keep the mode (train or eval) they are in.
        prompts: token numbers, at least one for each prompt. With ``sources`` they begin the text
            that is written.
        params: settings of each prompt, or one for all of them. Equal prompts with equal seeds get
            equal continuations.
        sources: for a model with an encoder, token numbers of the text it reads for each prompt.
        stop_tokens: tokens that end a continuation.
        on_token: called with the prompt's index and each new token as it is chosen, except a stop
            token. What it raises ends the call and is passed on.
        log_probs: compute `Continuation.log_probs`.

    Returns:
        One continuation for each prompt, the same on every rank of the model.

    Raises:
        InferError: an empty prompt, one that leaves no position for a new token, or a token that is
            not in the model's vocabulary; a module that does not generate, or not all stages of
            this rank; sources missing, or given to a model that reads none.
        CollectiveError: another rank of the model died, or did not call this.
    """
    if not prompts:
        return []
    batch = Batch(
        model,
        prompts,
        params,
        sources=sources,
        stop_tokens=stop_tokens,
        on_token=on_token,
        log_probs=log_probs,
    )
    with evaluating(model), torch.no_grad():
        while not batch.complete:
            batch.step()
    return batch.continuations()


def score_tokens(
    model: AnyModel,
    prompts: Sequence[Sequence[int]],
    *,
    sources: Sequence[Sequence[int]] | None = None,
) -> list[tuple[float, ...]]:
    """Returns the log-probabilities of given token sequences; nothing is generated.

    Args:
        model: as for `generate_tokens`.
        prompts: token numbers, at least one and at most the model's positions for each sequence.
        sources: as for `generate_tokens`.

    Returns:
        For each sequence the natural logarithm of the probability of every token but the first,
        given all before it.

    Raises:
        InferError: an empty sequence, one with more tokens than the model has positions, or a token
            that is not in the model's vocabulary; a model that cannot generate.
        CollectiveError: another rank of the model died, or did not call this.
    """
    if not prompts:
        return []
    batch = Batch.scoring(model, prompts, sources=sources)
    with evaluating(model), torch.no_grad():
        while not batch.complete:
            batch.step()
    return batch.scores()
