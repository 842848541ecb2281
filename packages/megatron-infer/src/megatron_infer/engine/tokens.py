"""Generation from tokens, and log-probabilities of tokens."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

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
    positions: Sequence[Int[Tensor, "3 _"]] | None = None,
    stop_tokens: frozenset[int] = frozenset(),
    on_token: Callable[[int, int], object] | None = None,
    log_probs: bool = False,
) -> list[Continuation]:
    """Continues several token sequences at once.

    Args:
        model: A model on any device, or this rank's stage or stages of a sharded model in any
            layout, such as ``trainer.task.stages`` of a training run, which is not affected. All
            ranks call this function with the same arguments. Modules keep their mode (train or
            eval).
        prompts: The token ids of each prompt, at least one. With ``sources`` they start the output.
        params: The settings of each prompt, or one for all. Equal prompts with equal seeds get
            equal continuations.
        sources: For a model with an encoder, the token ids of the encoder input of each prompt.
        positions: For a model with ``mrope``, time, height and width of the tokens of each prompt.
            Tokens after it follow its largest position, on all axes. Defaults to the indices.
        stop_tokens: The tokens that end a continuation.
        on_token: Called with the index of a prompt and each new token once it is chosen, except
            stop tokens. An exception that it raises ends the call and is propagated.
        log_probs: Whether to compute `Continuation.log_probs`. Defaults to False.

    Returns:
        One continuation for each prompt, the same on every rank of the model.

    Raises:
        InferError: A prompt is empty, leaves no position for a new token, or has a token outside
            the vocabulary; a module is not a decoding model, or a stage of this rank is missing;
            sources are missing or not supported by the model; or positions do not fit the prompts
            or the model.
        CollectiveError: Another rank of the model failed or did not call this function.
    """
    if not prompts:
        return []
    batch = Batch(
        model,
        prompts,
        params,
        sources=sources,
        positions=positions,
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
    positions: Sequence[Int[Tensor, "3 _"]] | None = None,
) -> list[tuple[float, ...]]:
    """Returns the log-probabilities of given token sequences without generating tokens.

    Args:
        model: As for `generate_tokens`.
        prompts: The token ids of each sequence, from one to the number of positions of the model.
        sources: As for `generate_tokens`.
        positions: As for `generate_tokens`.

    Returns:
        For each sequence, the natural logarithm of the probability of every token but the first,
        given all previous tokens.

    Raises:
        InferError: A sequence is empty, has more tokens than the model has positions, or has a
            token outside the vocabulary; the model cannot generate text; or positions do not fit.
        CollectiveError: Another rank of the model failed or did not call this function.
    """
    if not prompts:
        return []
    batch = Batch.scoring(model, prompts, sources=sources, positions=positions)
    with evaluating(model), torch.no_grad():
        while not batch.complete:
            batch.step()
    return batch.scores()
