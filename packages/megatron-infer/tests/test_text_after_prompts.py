"""Text that continues a prompt, with the decoder of Llama's tokenizers (spaces, byte fallback)."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from megatron_data import HuggingFaceTokenizer
from megatron_infer import Sampler, SamplingParams, TextStream, generate
from megatron_infer.cli.chat import Conversation
from megatron_infer.conversation import TextPrompts
from megatron_infer.server.fields import GenerateRequest
from megatron_infer.server.generation import Generation
from megatron_infer.server.job import Job
from megatron_models import GPT
from tokenizers import Tokenizer, decoders, models, normalizers

A, SPACED = 256, 257  # "a" and " a"
CASES = {
    "a space before the first token": ("a", [SPACED, A], " aa"),
    "characters of several tokens": ("a 日日日日", [*"本".encode(), SPACED], "本 a"),
}


@pytest.fixture
def tokenizer() -> HuggingFaceTokenizer:
    """A tokenizer of bytes, "a" and " a"."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": A, "▁a": SPACED}
    vocabulary |= {"▁": 258, "<unk>": 259}
    made = Tokenizer(models.BPE(vocabulary, [("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return HuggingFaceTokenizer(made.to_str())


@pytest.fixture
def model(make_model: Callable[..., GPT]) -> GPT:
    return make_model(vocab_size=260)


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, list[int], str]:
    """A prompt, the tokens that every sampler chooses, and the text that follows the prompt."""
    prompt, tokens, text = request.param
    waiting = iter(tokens)
    monkeypatch.setattr(
        Sampler, "__call__", lambda _, logits, *more: torch.full((len(logits),), next(waiting))
    )
    return prompt, tokens, text


def test_pieces_follow_the_text_of_the_prompt(
    tokenizer: HuggingFaceTokenizer, case: tuple[str, list[int], str]
) -> None:
    prompt, tokens, text = case
    whole = tokenizer.encode(prompt)
    assert tokenizer.decode([*whole, *tokens]) == prompt + text
    stream = TextStream(tokenizer, context=whole)
    assert "".join(map(stream.push, tokens)) + stream.finish() == text


def test_generated_text_follows_the_prompt(
    model: GPT, tokenizer: HuggingFaceTokenizer, case: tuple[str, list[int], str]
) -> None:
    prompt, tokens, text = case
    (done,) = generate(model, tokenizer, [prompt], SamplingParams(max_new_tokens=len(tokens)))
    assert done.text == text and list(done.tokens) == tokens


def test_served_text_follows_the_prompt(
    model: GPT, tokenizer: HuggingFaceTokenizer, case: tuple[str, list[int], str]
) -> None:
    prompt, tokens, text = case
    job = Job(GenerateRequest((prompt,), tokens_to_generate=len(tokens)), "client")
    job.tokens = [tokenizer.encode(prompt)]
    generation = Generation(model.eval(), tokenizer, job, frozenset())
    with torch.no_grad():
        answer = None
        while answer is None:
            answer = generation.step()
    assert answer.text == [prompt + text]


def test_chat_prints_text_that_follows_the_prompt(
    model: GPT, tokenizer: HuggingFaceTokenizer, case: tuple[str, list[int], str]
) -> None:
    prompt, tokens, text = case
    loaded = SimpleNamespace(model=model, tokenizer=tokenizer, stop_tokens=frozenset())
    talk = Conversation(loaded, TextPrompts(tokenizer), SamplingParams(max_new_tokens=len(tokens)))
    assert talk.reply(prompt) == text
