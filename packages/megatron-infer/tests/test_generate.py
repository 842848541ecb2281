from collections.abc import Callable

import pytest
import tokenizers
import torch
from megatron_data import ByteTokenizer, HuggingFaceTokenizer
from megatron_infer import InferError, Sampler, SamplingParams, generate, generate_tokens
from megatron_models import GPT

PROMPTS = ["The whale", "naïve", "日本"]


@pytest.fixture
def model(make_model: Callable[..., GPT]) -> GPT:
    return make_model(vocab_size=257)


def test_texts_are_the_decoded_tokens_and_pieces_concatenate(model: GPT) -> None:
    tokenizer, params = ByteTokenizer(), SamplingParams(max_new_tokens=20, seed=1)
    pieces = [""] * len(PROMPTS)

    def add(row: int, piece: str) -> None:
        assert piece
        pieces[row] += piece

    completions = generate(model, tokenizer, PROMPTS, params, on_text=add)
    tokens = generate_tokens(
        model, tokenizer.encode_batch(PROMPTS), params, stop_tokens=frozenset([256])
    )
    assert [one.tokens for one in completions] == [one.tokens for one in tokens]
    assert [one.text for one in completions] == pieces
    assert pieces == [tokenizer.decode(one.tokens) for one in tokens]
    assert [one.prompt for one in completions] == PROMPTS


def test_a_document_ends_at_the_tokenizers_token(model: GPT) -> None:
    class Ends(ByteTokenizer):
        eod_id = eos_id = None

    greedy = SamplingParams(max_new_tokens=8, temperature=0.0)
    free = generate(model, Ends(), ["The whale"], greedy)[0]
    assert free.finish_reason == "length"
    Ends.eod_id = free.tokens[3]
    ended = generate(model, Ends(), ["The whale"], greedy)[0]
    assert ended.finish_reason == "stop"
    assert ended.tokens == free.tokens[: free.tokens.index(Ends.eod_id)]


def test_an_empty_text_is_refused(model: GPT) -> None:
    with pytest.raises(InferError, match="prompt 1 is empty"):
        generate(model, ByteTokenizer(), [""], SamplingParams())


def test_tokens_that_the_tokenizer_adds_are_left_out_unless_asked_for(model: GPT) -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={one: i for i, one in enumerate(alphabet)}, merges=[])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    tokenizer = HuggingFaceTokenizer(made.to_str())
    params = SamplingParams(max_new_tokens=8, temperature=0.0)
    plain, marked = generate_tokens(
        model, [tokenizer.encode("ab"), [256, *tokenizer.encode("ab")]], params
    )
    assert plain.tokens != marked.tokens
    assert generate(model, tokenizer, ["ab"], params)[0].tokens == plain.tokens
    found = generate(model, tokenizer, ["ab"], params, special_tokens=True)
    assert found[0].tokens == marked.tokens


def test_any_of_several_tokens_ends_a_text(model: GPT) -> None:
    greedy = SamplingParams(max_new_tokens=8, temperature=0.0)
    free = generate(model, ByteTokenizer(), ["The whale"], greedy)[0]
    for stop in free.tokens:
        ended = generate(model, ByteTokenizer(), ["The whale"], greedy, stop=[999, stop])[0]
        assert ended.tokens == free.tokens[: free.tokens.index(stop)]
        assert ended.finish_reason == "stop"


def test_the_bytes_of_an_incomplete_character_end_a_text(
    model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = iter([[ord("a"), ord("x")], [0xC3, ord("y")]])  # 0xC3 begins a character of two
    monkeypatch.setattr(Sampler, "__call__", lambda *_: torch.tensor(next(waiting)))
    pieces: list[tuple[int, str]] = []
    params = SamplingParams(max_new_tokens=2)
    one, other = generate(
        model, ByteTokenizer(), ["1", "2"], params, on_text=lambda *piece: pieces.append(piece)
    )
    assert (one.text, other.text) == ("a\ufffd", "xy")
    assert pieces == [(0, "a"), (1, "x"), (1, "y"), (0, "\ufffd")]


def test_a_tokenizer_that_adds_no_tokens_may_be_asked_for_them(model: GPT) -> None:
    greedy = SamplingParams(max_new_tokens=3, temperature=0.0)
    plain, asked = (
        generate(model, ByteTokenizer(), ["ab"], greedy, special_tokens=special)
        for special in (False, True)
    )
    assert plain == asked
