"""Text in, text out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_data import Tokenizer
from megatron_models import CausalModel

from megatron_infer.detokenize import TextStream
from megatron_infer.engine.batch import FinishReason, generate_tokens
from megatron_infer.params import SamplingParams


@dataclass(frozen=True)
class Completion:
    """A prompt, the text and tokens that follow it, and why they end (see `Continuation`)."""

    prompt: str
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason


def generate(
    model: CausalModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    on_text: Callable[[int, str], object] | None = None,
) -> list[Completion]:
    """Continue texts, all at once.

    No special token is added to a prompt. A continuation ends at the tokenizer's end-of-document or
    end-of-text token, which is not part of it.

    Args:
        model: a model on any device, also one that is being trained.
        tokenizer: of the model.
        prompts: texts of any lengths.
        params: settings of each prompt, or one for all of them. To draw several continuations of
            one prompt, repeat it with different seeds.
        on_text: called with the prompt's index and each piece of text as soon as it is certain; the
            pieces of a prompt add up to its completion's text.

    Returns:
        One completion for each prompt.

    Raises:
        InferError: as for `generate_tokens`.
    """
    encoded = tokenizer.encode_batch(prompts)
    streams = [TextStream(tokenizer, before=tokens) for tokens in encoded]
    texts = [""] * len(prompts)

    def show(row: int, piece: str) -> None:
        texts[row] += piece
        if piece and on_text is not None:
            on_text(row, piece)

    continuations = generate_tokens(
        model,
        encoded,
        params,
        stop_tokens=stop_tokens(tokenizer),
        on_token=lambda row, token: show(row, streams[row].push(token)),
    )
    for row, stream in enumerate(streams):
        show(row, stream.finish())
    return [
        Completion(prompt, text, one.tokens, one.finish_reason)
        for prompt, text, one in zip(prompts, texts, continuations, strict=True)
    ]


def stop_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end a continuation: end of document and end of text."""
    ends = (tokenizer.eod_id, tokenizer.eos_id)
    return frozenset(token for token in ends if token is not None)
