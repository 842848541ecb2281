"""Text generation from text prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_data import Tokenizer

from megatron_infer.detokenize import TextStream
from megatron_infer.engine.continuation import FinishReason
from megatron_infer.engine.stages import AnyModel
from megatron_infer.engine.tokens import generate_tokens
from megatron_infer.errors import InferError
from megatron_infer.params import SamplingParams


@dataclass(frozen=True)
class Completion:
    """A prompt, the text and tokens after it, and the reason why they end (see `Continuation`)."""

    prompt: str
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason


def generate(
    model: AnyModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    sources: Sequence[str] | None = None,
    start_token: int | None = None,
    on_text: Callable[[int, str], object] | None = None,
) -> list[Completion]:
    """Continues several texts at once.

    No special token is added to a prompt unless there are sources. A continuation ends at the
    tokenizer's end-of-document or end-of-text token, which is not included.

    Args:
        model: A model on any device, or all stages of this rank, also of a model in training; as
            for `generate_tokens`.
        tokenizer: The tokenizer of the model.
        prompts: Texts of any lengths.
        params: The settings of each prompt, or one for all. To draw several continuations of one
            prompt, repeat it with different seeds.
        sources: For a model with an encoder, the encoder input of each prompt. The output starts
            with ``start_token`` and the prompt, which may be empty. No token is added to a source.
        start_token: Token that starts the output for a source (`LoadedModel.start_token`).
            Defaults to the tokenizer's begin-of-text token.
        on_text: Called with the index of a prompt and each piece of text as soon as it is final.
            The pieces of a prompt concatenate to the text of its completion.

    Returns:
        One completion for each prompt.

    Raises:
        InferError: As for `generate_tokens`; or sources were given without a start token, and the
            tokenizer has no begin-of-text token.
    """
    encoded = tokenizer.encode_batch(prompts)
    read = None
    if sources is not None:
        read = tokenizer.encode_batch(sources)
        start = tokenizer.bos_id if start_token is None else start_token
        if start is None:
            raise InferError(
                "the tokenizer has no begin-of-text token, which starts the output for a source; "
                "give start_token, or use generate_tokens with prompts that have one"
            )
        encoded = [[start, *tokens] for tokens in encoded]
    streams = [TextStream(tokenizer, context=tokens) for tokens in encoded]
    texts = [""] * len(prompts)

    def show(row: int, piece: str) -> None:
        texts[row] += piece
        if piece and on_text is not None:
            on_text(row, piece)

    continuations = generate_tokens(
        model,
        encoded,
        params,
        sources=read,
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
    """Returns the tokens that end a continuation: end of document and end of text."""
    ends = (tokenizer.eod_id, tokenizer.eos_id)
    return frozenset(token for token in ends if token is not None)
