"""What must hold before the first token of a batch is computed."""

from collections.abc import Sequence

from megatron_infer.engine.stages import LocalStages
from megatron_infer.errors import InferError


def check_prompt(model: LocalStages, index: int, prompt: Sequence[int], *, new_tokens: int) -> None:
    """Raises InferError if a prompt, number ``index`` of a call, cannot be continued.

    ``new_tokens`` is how many tokens there has to be room for.
    """
    if not prompt:
        raise InferError(f"prompt {index + 1} is empty: there is nothing to continue")
    if len(prompt) + new_tokens > model.positions:
        left = ", so none is left for a new token" if new_tokens else ""
        raise InferError(
            f"prompt {index + 1} has {len(prompt)} tokens and the model "
            f"{model.positions} positions{left}; shorten the prompt"
        )
    _check_vocabulary(model, f"prompt {index + 1}", prompt)


def check_sources(
    model: LocalStages, sources: Sequence[Sequence[int]] | None, prompts: Sequence[Sequence[int]]
) -> None:
    """Raises InferError if the texts for an encoder are not those that prompts and model need."""
    if sources is None:
        if model.reads_source:
            raise InferError(
                "the model generates from a text that its encoder reads: give `sources`, one for "
                "each prompt"
            )
        return
    if not model.reads_source:
        raise InferError("sources were given, and the model has no encoder: leave them out")
    if len(sources) != len(prompts):
        raise InferError(f"{len(prompts)} prompts came with {len(sources)} sources")
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
            f"{name} has token {max(tokens)}, the model's vocabulary {model.vocabulary} tokens; "
            "is it another model's tokenizer?"
        )
