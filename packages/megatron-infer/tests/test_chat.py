"""Chat in the terminal."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_ckpt import CheckpointStore, ModelRecord
from megatron_data import ByteTokenizer, DataError, Tokenizer, load_tokenizer, train_bpe
from megatron_infer import InferError, SamplingParams, generate_tokens
from megatron_infer.cli import main
from megatron_infer.cli.chat import Conversation
from megatron_infer.conversation import CHATML, ChatFormat, TextPrompts, choose_prompts
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


def conversation(model: GPT, tokenizer: Any, wanted: ChatFormat = "auto") -> Conversation:
    loaded: Any = SimpleNamespace(
        model=model, tokenizer=tokenizer, stop_tokens=stop_tokens(tokenizer)
    )
    return Conversation(loaded, choose_prompts(tokenizer, wanted), GREEDY)


def test_plain_turns_are_one_text(model: GPT, capsys: pytest.CaptureFixture[str]) -> None:
    talk, tokenizer = conversation(model, ByteTokenizer()), ByteTokenizer()
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
    talk = conversation(model, tokenizer)
    assert talk.reply("a") == "y"
    talk.reply("b")
    start, end = "<|im_start|>", "<|im_end|>"
    text = f"{start}user\na{end}\n{start}assistant\ny{end}\n{start}user\nb{end}\n{start}assistant\n"
    assert prompts[1] == tokenizer.encode(text)
    # The conversation has more than 58 tokens, so its first turn is dropped.
    talk.reply("c" * 12)
    text = f"{start}user\nb{end}\n{start}assistant\ny{end}\n{start}user\n{'c' * 12}{end}\n"
    assert prompts[2] == tokenizer.encode(text + f"{start}assistant\n")
    with pytest.raises(InferError, match="65 tokens, but only 58 fit"):
        talk.reply("c" * 46)
    talk.clear()
    talk.reply("d")
    assert prompts[3] == tokenizer.encode(f"{start}user\nd{end}\n{start}assistant\n")


def test_turns_that_no_longer_fit_are_dropped(
    model: GPT, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = conversation(model, ByteTokenizer())
    for _ in range(10):
        assert talk.reply("twenty letters here.") or True
    with pytest.raises(InferError, match="70 tokens, but only 58 fit"):
        talk.reply("x" * 70)


def test_an_interrupted_answer_is_kept_so_far(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **settings: Any) -> None:
        settings["on_token"](0, ord("y"))
        raise KeyboardInterrupt

    talk = conversation(model, ByteTokenizer())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("megatron_infer.engine.tokens.generate_tokens", interrupt)
        talk.reply("a")
    expected = generate_tokens(model, [list(b"ayb")], GREEDY)[0].tokens
    assert talk.reply("b") == ByteTokenizer().decode(list(expected))


def test_the_bytes_of_an_incomplete_character_are_shown_at_the_end_of_an_answer(
    model: GPT, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(*args: Any, **settings: Any) -> None:
        for token in "é".encode() + "日".encode()[:1]:
            settings["on_token"](0, token)

    monkeypatch.setattr("megatron_infer.engine.tokens.generate_tokens", answer)
    assert conversation(model, ByteTokenizer()).reply("a") == "é\ufffd"
    assert capsys.readouterr().out == "é\ufffd"


@pytest.mark.parametrize(("most", "room"), [(1, 63), (31, 33), (32, 32), (33, 32), (1000, 32)])
def test_an_answer_has_room_for_its_tokens_or_half_of_the_positions(
    model: GPT, most: int, room: int
) -> None:
    loaded: Any = SimpleNamespace(model=model, tokenizer=ByteTokenizer())
    params = SamplingParams(max_new_tokens=most)
    talk = Conversation(loaded, choose_prompts(ByteTokenizer()), params)
    with pytest.raises(InferError, match=f"the line has 64 tokens, but only {room} fit"):
        talk.reply("x" * 64)


def test_a_text_keeps_its_last_tokens_and_starts_with_those_of_the_tokenizer() -> None:
    prompts = TextPrompts(ByteTokenizer(), start=[7])
    assert prompts.prompt("ab", 3) == [7, 97, 98]
    assert prompts.prompt("cd", 4) == [97, 98, 99, 100]
    assert prompts.prompt("xyz", 3) == [120, 121, 122]  # a line that fills the room
    with pytest.raises(InferError, match="4 tokens, but only 3 fit"):
        prompts.prompt("wxyz", 3)
    prompts.answered([5], "")
    assert prompts.prompt("a", 9) == [120, 121, 122, 5, 97]
    prompts.clear()
    with pytest.raises(InferError, match="3 tokens, but only 2 fit"):
        prompts.prompt("ab", 2)  # with the first token
    assert prompts.prompt("a", 2) == [7, 97]


def test_a_conversation_that_is_too_long_begins_with_the_user() -> None:
    prompts = choose_prompts(Marked())
    prompts.prompt("a", 99)
    prompts.answered([], "y")
    whole = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\ny<|im_end|>\n"
    last = Marked().encode("<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n")
    room = len(Marked().encode(whole)) + len(last)
    with pytest.raises(InferError, match=f"only {len(last) - 1} fit"):
        prompts.prompt("b", len(last) - 1)
    assert choose_prompts(Marked()).prompt("b", len(last)) == last
    assert prompts.prompt("b", room - 1) == last  # without the answer, too
    fits = choose_prompts(Marked())
    fits.prompt("a", 99)
    fits.answered([], "y")
    assert fits.prompt("b", room) == [*Marked().encode(whole), *last]


def test_the_format_is_chosen_by_the_tokenizer(tmp_path: Path) -> None:
    for plain in (ByteTokenizer(), train_bpe(["a"], 257)):
        assert isinstance(choose_prompts(plain), TextPrompts)
    assert "no chat template, and turns are marked" in choose_prompts(Marked()).description
    assert isinstance(choose_prompts(Marked(), "plain"), TextPrompts)
    with pytest.raises(InferError, match="--format plain"):
        choose_prompts(ByteTokenizer(), "chatml")
    with pytest.raises(InferError, match=r"has no chat template; give one with --chat-template"):
        choose_prompts(Marked(), "template")
    with pytest.raises(InferError, match=r"only one of --chat-template and --format plain"):
        choose_prompts(Marked(), "plain", "a.jinja")
    with pytest.raises(DataError, match="a Marked has no chat template"):
        (tmp_path / "a.jinja").write_text(CHATML)
        choose_prompts(Marked(), "auto", str(tmp_path / "a.jinja"))


def with_template(source: str, eos: str, folder: Path) -> Tokenizer:
    """Returns a tokenizer of bytes with special tokens and a template."""
    bytes_of_text = train_bpe(["a"], 257)
    tokens = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|end|>", "<|return|>"]
    bytes_of_text.with_special_tokens(tokens).save(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    (folder / "chat_template.jinja").write_text(source)
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    ("source", "eos", "prompt", "ends"),
    [
        ("<|im_start|>system\nKind.<|im_end|>\n" + CHATML, "<|endoftext|>",
         "<|im_start|>system\nKind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
         "<|im_start|>assistant\n", {"<|im_end|>"}),
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}!", "<|endoftext|>",
         "<|user|>Hi!", {"<|user|>"}),
        ("{% for m in messages %}{{ m.content }}{% endfor %}!", "<|endoftext|>", "Hi!", set()),
        ("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}", "<|endoftext|>",
         "<|user|>Hi", {"<|user|>"}),
        ("{% for m in messages %}{{ m.content }}<|{{ 'return' if loop.last else 'end' }}|>"
         "{% endfor %}", "<|return|>", "Hi<|return|>", {"<|return|>"}),
    ],
)  # fmt: skip
def test_the_template_of_the_tokenizer_is_used(
    source: str, eos: str, prompt: str, ends: set[str], tmp_path: Path
) -> None:
    tokenizer: Any = with_template(source, eos, tmp_path)
    prompts = choose_prompts(tokenizer)
    assert prompts.description == "turns are written by the tokenizer's chat template"
    marked = choose_prompts(tokenizer, "chatml")  # other formats may be asked for
    assert marked.description == "turns are marked as in ChatML"
    assert {tokenizer.token(number) for number in marked.stop_tokens} == {"<|im_end|>"}
    assert isinstance(choose_prompts(tokenizer, "plain"), TextPrompts)
    assert prompts.prompt("Hi", 99) == tokenizer.encode(prompt)
    assert {tokenizer.token(number) for number in prompts.stop_tokens} == ends
    file = tmp_path / "other.jinja"
    file.write_text("{{ messages[-1].content }}{{ eos_token }}")
    assert choose_prompts(tokenizer, "auto", str(file)).prompt("Hi", 9) == (
        tokenizer.encode("Hi" + eos)
    )


def test_a_template_that_refuses_a_line_changes_nothing(tmp_path: Path) -> None:
    source = "{% if messages[-1].content == 'no' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    tokenizer = with_template(source, "<|im_end|>", tmp_path)
    prompts, same = choose_prompts(tokenizer), choose_prompts(tokenizer)
    with pytest.raises(InferError, match="the chat template refuses the messages: no"):
        prompts.prompt("no", 99)
    assert prompts.prompt("yes", 99) == same.prompt("yes", 99)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(DataError, match="not a chat template"):
        choose_prompts(load_tokenizer(tmp_path))


def test_a_template_may_write_the_last_message_alone(tmp_path: Path) -> None:
    tokenizer = with_template("<|user|>{{ messages[-1].content }}", "<|endoftext|>", tmp_path)
    prompts = choose_prompts(tokenizer)
    prompts.prompt("a", 99)
    prompts.answered([5], "an answer")
    assert prompts.prompt("b", 99) == tokenizer.encode("<|user|>b")


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
    lines = ["One", "", "/new", "/nonsense", "x" * 90, "One", " /new ", "/a b", "/quit", "never"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    options = ["--load", str(tmp_path / "run"), "--temperature", "0", "--max-new-tokens", "4"]
    assert main(["chat", *options]) == 0
    shown = capsys.readouterr()
    text, other = (
        ByteTokenizer().decode(list(generate_tokens(model, [prompt], GREEDY)[0].tokens[:4]))
        for prompt in (list(b"One"), list(b"/a b"))
    )
    assert shown.out == f"{text}\n{text}\n{other}\n"
    start, nonsense, wrong = shown.err.splitlines()
    assert "the text is continued" in start
    assert nonsense.startswith("/nonsense: /new starts a new conversation")
    assert wrong.startswith("megatron-infer: error: the line has 90 tokens, but only 44 fit")
