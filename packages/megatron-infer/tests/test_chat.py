"""Chat in the terminal."""

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_ckpt import CheckpointStore, ModelRecord
from megatron_data import ByteTokenizer
from megatron_infer import InferError, SamplingParams, generate_tokens
from megatron_infer.cli import main
from megatron_infer.cli.chat import CHATML, PLAIN, Conversation, choose_format
from megatron_infer.engine.generate import stop_tokens
from megatron_models import GPT, record_of
from megatron_parallel import Mesh, collect_shardings, parameter_views

GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0)


class Marked(ByteTokenizer):
    """A byte tokenizer with the two marks of ChatML as single tokens."""

    vocab_size = 260
    marks = ("<|im_start|>", "<|im_end|>")

    def encode(self, text: str) -> list[int]:
        found: list[int] = []
        while text:
            mark = next((one for one in self.marks if text.startswith(one)), None)
            found.append(257 + self.marks.index(mark) if mark else ord(text[0]))
            text = text[len(mark) if mark else 1 :]
        return found


@pytest.fixture
def model(make_model: Callable[..., GPT]) -> GPT:
    return make_model(vocab_size=260, positions=64)


def conversation(model: GPT, tokenizer: Any, form: Any) -> Conversation:
    loaded = SimpleNamespace(model=model, tokenizer=tokenizer, stop_tokens=stop_tokens(tokenizer))
    return Conversation(loaded, form, GREEDY)


def test_plain_turns_are_one_text(model: GPT, capsys: pytest.CaptureFixture[str]) -> None:
    talk, tokenizer = conversation(model, ByteTokenizer(), PLAIN), ByteTokenizer()
    first = talk.reply("Call me")
    tokens = generate_tokens(model, [tokenizer.encode("Call me")], GREEDY)[0].tokens
    assert first == tokenizer.decode(list(tokens)) == capsys.readouterr().out
    whole = [*tokenizer.encode("Call me"), *tokens, *tokenizer.encode(" and")]
    expected = tokenizer.decode(list(generate_tokens(model, [whole], GREEDY)[0].tokens))
    assert talk.reply(" and") == expected
    talk.clear()
    assert talk.reply("Call me") == first


def test_marked_turns_are_closed(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = []
    tokenizer = Marked()

    def reply(model: GPT, given: list[list[int]], *args: Any, **settings: Any) -> None:
        prompts.append(given[0])
        assert settings["stop_tokens"] == {256, 258}
        settings["on_token"](0, ord("y"))

    monkeypatch.setattr("megatron_infer.engine.tokens.generate_tokens", reply)
    talk = conversation(model, tokenizer, CHATML)
    assert talk.reply("a") == "y"
    talk.reply("b")
    start, end = "<|im_start|>", "<|im_end|>"
    # The conversation is longer than 64 positions, so its start is dropped.
    text = f"{start}user\na{end}\n{start}assistant\ny{end}\n{start}user\nb{end}\n{start}assistant\n"
    assert prompts[1] == tokenizer.encode(text)[-58:]


def test_turns_that_no_longer_fit_are_dropped(
    model: GPT, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = conversation(model, ByteTokenizer(), PLAIN)
    for _ in range(10):
        assert talk.reply("twenty letters here.") or True
    with pytest.raises(InferError, match="70 tokens, but only 58 fit"):
        talk.reply("x" * 70)


def test_an_interrupted_answer_is_kept_so_far(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **settings: Any) -> None:
        settings["on_token"](0, ord("y"))
        raise KeyboardInterrupt

    talk = conversation(model, ByteTokenizer(), PLAIN)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("megatron_infer.engine.tokens.generate_tokens", interrupt)
        talk.reply("a")
    expected = generate_tokens(model, [list(b"ayb")], GREEDY)[0].tokens
    assert talk.reply("b") == ByteTokenizer().decode(list(expected))


def test_the_format_is_chosen_by_the_tokenizer() -> None:
    assert choose_format("auto", ByteTokenizer()) is PLAIN
    assert choose_format("auto", Marked()) is CHATML
    assert choose_format("plain", Marked()) is PLAIN
    with pytest.raises(InferError, match="--format plain"):
        choose_format("chatml", ByteTokenizer())


def test_the_command_answers_lines_until_the_input_ends(
    make_model: Callable[..., GPT],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model(vocab_size=257, dtype=torch.float32)
    ByteTokenizer().save(tmp_path / "tokenizer")
    CheckpointStore(tmp_path / "run").save(
        3,
        parameter_views(model, collect_shardings(model), Mesh.single()),
        model=ModelRecord(family="gpt2", **record_of(model.config)),
        files={"tokenizer": tmp_path / "tokenizer"},
    )
    lines = ["One", "", "/new", "/nonsense", "x" * 90, "One", "/quit", "never"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    options = ["--load", str(tmp_path / "run"), "--temperature", "0", "--max-new-tokens", "4"]
    assert main(["chat", *options]) == 0
    shown = capsys.readouterr()
    text = ByteTokenizer().decode(
        list(generate_tokens(model, [list(b"One")], GREEDY)[0].tokens[:4])
    )
    assert shown.out == f"{text}\n" * 2
    start, nonsense, wrong = shown.err.splitlines()
    assert "the text is continued" in start
    assert nonsense.startswith("/nonsense: /new starts a new conversation")
    assert wrong.startswith("megatron-infer: error: the line has 90 tokens, but only 44 fit")
