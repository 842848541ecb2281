"""Checks of the input of a batch before the first token is computed."""

from collections.abc import Sequence

from megatron_infer.engine.stages import LocalStages
from megatron_infer.errors import InferError


def check_prompt(model: LocalStages, index: int, prompt: Sequence[int], *, new_tokens: int) -> None:
    """Raises InferError if a prompt cannot be continued.

    ``index`` is the index of the prompt in the call; ``new_tokens`` is the number of tokens to
    leave room for.
    """
    if not prompt:
        raise InferError(f"prompt {index + 1} is empty; a prompt needs at least one token")
    if len(prompt) + new_tokens > model.positions:
        left = ", which leaves none for a new token" if new_tokens else ""
        raise InferError(
            f"prompt {index + 1} has {len(prompt)} tokens and the model has "
            f"{model.positions} positions{left}; shorten the prompt"
        )
    _check_vocabulary(model, f"prompt {index + 1}", prompt)


def check_sources(
    model: LocalStages, sources: Sequence[Sequence[int]] | None, prompts: Sequence[Sequence[int]]
) -> None:
    """Raises InferError if the encoder inputs do not match the prompts and the model."""
    if sources is None:
        if model.reads_source:
            raise InferError(
                "the model has an encoder and needs its input; give `sources`, one for each prompt"
            )
        return
    if not model.reads_source:
        raise InferError("the model has no encoder; leave out `sources`")
    if len(sources) != len(prompts):
        raise InferError(
            f"got {len(prompts)} prompts but {len(sources)} sources; give one for each prompt"
        )
    for index, source in enumerate(sources):
        if not 0 < len(source) <= model.positions:
            raise InferError(
                f"source {index + 1} has {len(source)} tokens; the model takes 1 to "
                f"{model.positions}"
            )
        _check_vocabulary(model, f"source {index + 1}", source)


def _check_vocabulary(model: LocalStages, name: str, tokens: Sequence[int]) -> None:
    if not 0 <= min(tokens) <= max(tokens) < model.vocabulary:
        raise InferError(
            f"{name} has token {max(tokens)}, but the vocabulary of the model has "
            f"{model.vocabulary} tokens; use token ids 0 to {model.vocabulary - 1}, as the "
            "tokenizer of this model does"
        )
