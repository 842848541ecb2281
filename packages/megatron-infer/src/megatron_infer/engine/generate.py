"""Text generation from text prompts."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from megatron_data import HuggingFaceTokenizer, Tokenizer

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
    stop: Collection[int] = (),
    special_tokens: bool = False,
    on_text: Callable[[int, str], object] | None = None,
) -> list[Completion]:
    """Continues several texts at once.

    A continuation ends at the tokenizer's end-of-document or end-of-text token or at one of
    ``stop``, which is not included. For a `LoadedModel` pass its ``stop_tokens`` and
    ``defaults.adds_special_tokens``.

    Args:
        model: A model on any device, or all stages of this rank, also of a model in training; as
            for `generate_tokens`.
        tokenizer: The tokenizer of the model.
        prompts: Texts of any lengths.
        params: The settings of each prompt, or one for all. To draw several continuations of one
            prompt, repeat it with different seeds.
        sources: For a model with an encoder, the encoder input of each prompt. The output starts
            with ``start_token`` and the prompt, which may be empty.
        start_token: Token that starts the output for a source (`LoadedModel.start_token`).
            Defaults to the tokenizer's begin-of-text token.
        stop: Further tokens that end a continuation. Defaults to none.
        special_tokens: Whether sources, or without them prompts, get the tokens that the tokenizer
            adds to a text (`text_edges`), such as ``<s>`` before it. Defaults to False.
        on_text: Called with the index of a prompt and each piece of text as soon as it is final.
            The pieces of a prompt concatenate to the text of its completion.

    Returns:
        One completion for each prompt.

    Raises:
        InferError: As for `generate_tokens`; or sources were given without a start token, and the
            tokenizer has no begin-of-text token.
    """
    encode = partial(encode_texts, tokenizer, special_tokens=special_tokens)
    read = None
    if sources is None:
        encoded = encode(prompts)
    else:
        encoded, read = tokenizer.encode_batch(prompts), encode(sources)
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
        stop_tokens=stop_tokens(tokenizer) | frozenset(stop),
        on_token=lambda row, token: show(row, streams[row].push(token)),
    )
    for row, stream in enumerate(streams):
        show(row, stream.finish())
    return [
        Completion(prompt, text, one.tokens, one.finish_reason)
        for prompt, text, one in zip(prompts, texts, continuations, strict=True)
    ]


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], *, special_tokens: bool
) -> list[list[int]]:
    """Returns the tokens of texts, with those that the tokenizer adds if ``special_tokens``."""
    encoded = tokenizer.encode_batch(texts)
    if not (special_tokens and isinstance(tokenizer, HuggingFaceTokenizer)):
        return encoded
    before, after = tokenizer.text_edges
    return [[*before, *tokens, *after] for tokens in encoded]


def stop_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the tokens that end a continuation: end of document and end of text."""
    ends = (tokenizer.eod_id, tokenizer.eos_id)
    return frozenset(token for token in ends if token is not None)
