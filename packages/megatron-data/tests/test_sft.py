"""Conversations: rendered text, loss mask and samples."""

import json
import pickle
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_data import (
    DataError,
    HuggingFaceTokenizer,
    IndexedDataset,
    IndexedDatasetBuilder,
    build_sft_datasets,
    tokenize_conversations,
)
from megatron_data.cli import main
from megatron_data.tokenizers import (
    ChatTemplate,
    ImageTemplate,
    RenderedConversation,
    TemplateLimits,
    chat,
)

pytest.importorskip("jinja2")

CHAT = [
    {"role": "system", "content": " Be kind. "},
    {"role": "user", "content": "Hi /think"},
    {"role": "assistant", "content": " Hello! "},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you."},
]
# A ChatML template without generation blocks.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# It writes only the length of earlier messages.
FORGETFUL = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content if loop.last else m.content | length }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize(
    ("prompt_format", "text", "answers"),
    [
        (
            "nemotron-h-aligned",
            "<SPECIAL_10>System\nBe kind.\n<SPECIAL_11>User\nHi /think\n<SPECIAL_11>Assistant\n"
            "Hello!\n<SPECIAL_11>User\nBye\n<SPECIAL_11>Assistant\nSee you.\n",
            ["Hello!\n", "See you.\n"],
        ),
        (
            "nemotron-nano-v2",
            "<SPECIAL_10>System\nBe kind.\n<SPECIAL_11>User\nHi\n<SPECIAL_11>Assistant\nHello!\n"
            "<SPECIAL_12>\n<SPECIAL_11>User\nBye\n<SPECIAL_11>Assistant\nSee you.\n"
            "<SPECIAL_12>\n",
            ["Hello!\n<SPECIAL_12>\n", "See you.\n<SPECIAL_12>\n"],
        ),
        ("identity", " Be kind. Hi /think Hello! ByeSee you.", [" Hello! ", "See you."]),
    ],
)
def test_megatrons_prompt_formats(prompt_format: str, text: str, answers: list[str]) -> None:
    rendered = ChatTemplate.from_prompt_format(prompt_format).render(CHAT)
    assert rendered.text == text
    assert [text[first:last] for first, last in rendered.assistant_spans] == answers


def test_a_template_without_generation_blocks_is_rendered_turn_by_turn() -> None:
    template = pickle.loads(pickle.dumps(ChatTemplate(CHATML)))
    text, answers = template.render(CHAT)
    assert [text[first:last] for first, last in answers] == [
        " Hello! <|im_end|>\n",
        "See you.<|im_end|>\n",
    ]


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        (
            FORGETFUL,
            CHAT,
            "writes message 3 differently without .* put {% generation %}",
        ),
        ("{{ raise_exception('no system') }}", CHAT, "refuses the messages: no system"),
        ("{{ messages[0].__class__.__mro__ }}", CHAT, "unsafe|refuses"),
        ("{{ messages[0].content + 1 }}", CHAT, "cannot render the messages"),
        ("{{ messages[0].content.index('#') }}", CHAT, "cannot render the messages: substring"),
        ("{{ 1 // 0 }}", CHAT, "cannot render the messages: .*division"),
        ("{% for %}", CHAT, "not a chat template: line 1"),
        ("{{ messages[0].content }}{% set x %}{% generation %}{% endgeneration %}{% endset %}",
         [{"role": "assistant", "content": "".join(map(chr, range(0xFDD0, 0xFDEF)))}],
         "contain U\\+FDD0 to U\\+FDEF"),
    ],
)  # fmt: skip
def test_templates_with_unclear_answers_are_refused(
    source: str, messages: list[dict[str, str]], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        ChatTemplate(source).render(messages)


def test_a_conversation_has_one_time_that_can_be_fixed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time does not advance while a conversation is rendered, as in transformers."""
    ticks = iter(range(99))

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Clock":
            return cls(2026, 1, 2, 3, 4, next(ticks))

    monkeypatch.setattr(chat, "datetime", Clock)
    source = "{{ strftime_now('%Y-%m-%d %S') }}{% for m in messages %}|{{ m.content }}{% endfor %}"
    template = ChatTemplate(source)
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert template.render(said) == RenderedConversation("2026-01-02 00|a|b", [(15, 17)])
    assert template.render(said).text.startswith("2026-01-02 01|")
    fixed = pickle.loads(pickle.dumps(template.with_time(datetime(1999, 12, 31))))
    assert fixed.render(said).text.startswith("1999-12-31 00|")
    assert ImageTemplate(fixed).render(said).text.startswith("1999-12-31 00|")
    assert (template.uses_time, ChatTemplate("{{ messages }}").uses_time) == (True, False)
    long = ChatTemplate("{{ strftime_now('%A' * 999) }}", limits=TemplateLimits(characters=9999))
    with pytest.raises(DataError, match="a text of more than 9,999 characters"):
        long.render(said)


def test_a_turn_that_is_rendered_differently_later_is_allowed_with_loss_all() -> None:
    template = ChatTemplate(FORGETFUL)
    assert template.render(CHAT, return_assistant_spans=False).assistant_spans == []
    with pytest.raises(DataError, match="writes message 3 differently"):
        template.render(CHAT)


def test_a_template_is_loaded_from_the_folder_of_a_tokenizer(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({
        "bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None,
        "chat_template": [{"name": "tools", "template": "x"},
                          {"name": "default", "template": "{{ bos_token }}{{ eos_token }}"}],
    }))  # fmt: skip
    assert ChatTemplate.load(tmp_path).render(CHAT[:1]).text == "<s></s>"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}!")
    assert ChatTemplate.load(tmp_path).render(CHAT[:1]).text == "<s>!"
    assert ChatTemplate.load(tmp_path / "chat_template.jinja").render(CHAT[:1]).text == "!"
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text("{}")
    with pytest.raises(DataError, match=r"has no chat template.*nemotron-h-aligned"):
        ChatTemplate.load(tmp_path)
    with pytest.raises(DataError, match="no prompt format 'chatmel'"):
        ChatTemplate.from_prompt_format("chatmel")


@pytest.fixture(scope="module")
def talks() -> list[dict[str, Any]]:
    """Returns rows of one to three conversations with one to three turns each."""
    random = np.random.default_rng(0)

    def said() -> str:
        return " ".join(random.choice(["the", "whale", "sea", "日本"], random.integers(1, 12)))

    rows = []
    for number in range(60):
        messages = []
        for _ in range(int(random.integers(1, 4))):
            messages.append({"role": "system", "content": f"{number}"})
            for _ in range(int(random.integers(1, 4))):
                messages += [{"role": "user", "content": said()}]
                messages += [{"role": "assistant", "content": said()}]
        rows.append({"messages": messages, "source": "made up"})
    return rows


@pytest.fixture(scope="module")
def chat_prefix(talks, tokenizer: HuggingFaceTokenizer, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("talks")
    write(folder / "talks.jsonl", talks)
    report = tokenize_conversations(
        [folder / "talks.jsonl"], folder / "talks", tokenizer, ChatTemplate(CHATML)
    )
    systems = sum(m["role"] == "system" for row in talks for m in row["messages"])
    assert (report.rows, report.conversations) == (60, systems)
    return str(folder / "talks_conversation")


def write(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def test_the_loss_includes_only_assistant_messages(
    chat_prefix: str, talks, tokenizer: HuggingFaceTokenizer
) -> None:
    with IndexedDataset(chat_prefix) as texts, IndexedDataset(chat_prefix + "_loss") as masks:
        assert texts.document_indices.tolist() == masks.document_indices.tolist()
        assert texts.num_documents == 60
        said, expected = [], []
        for number in range(len(texts)):
            tokens, mask = texts.get(number), masks.get(number)
            assert tokens[-1] == tokenizer.eod_id and mask[-1] == 1
            runs = np.split(tokens, np.flatnonzero(np.diff(mask)) + 1)
            said += [tokenizer.decode(run.tolist()) for run in runs[int(mask[0] == 0) :: 2]]
        for row in talks:
            for number, message in enumerate(row["messages"]):
                if message["role"] == "assistant":
                    following = row["messages"][number + 1 : number + 2]
                    last = not following or following[0]["role"] == "system"
                    end = tokenizer.decode([tokenizer.eod_id]) if last else ""
                    expected.append(f"{message['content']}<|im_end|>\n{end}")
        assert said == expected


@pytest.mark.parametrize("order", ["packed", "stateless", "compat"])
def test_conversations_of_a_sample_do_not_attend_to_each_other(
    chat_prefix: str, order: str
) -> None:
    length = 1024
    train = build_sft_datasets(chat_prefix, "1,0,0", (None, 0, 0), length, order=order).train
    assert train is not None
    seen: list[tuple[int, ...]] = []
    with IndexedDataset(chat_prefix) as texts, IndexedDataset(chat_prefix + "_loss") as masks:
        wholes = {tuple(texts.get(n).tolist()): masks.get(n) for n in range(len(texts))}
        for number in range(len(train)):
            sample = train[number]
            assert {key: value.shape for key, value in sample.items()} == {
                **dict.fromkeys(
                    ("tokens", "labels", "loss_mask", "positions", "document_ids"), (length,)
                ),
                "cu_seqlens": (length + 1,),
                "max_seqlen": (),
                "sample_ids": (),
            }
            bounds = sample["cu_seqlens"].tolist()
            assert bounds[0] == 0 and bounds[-1] == length and bounds == sorted(bounds)
            begins = sorted({*bounds} - {length})
            assert np.flatnonzero(sample["positions"] == 0)[: len(begins)].tolist() == begins
            for first, last in zip(begins, [*begins[1:], length], strict=True):
                ids = sample["document_ids"][first:last]
                assert len(set(ids.tolist())) == 1
                if ids[0] < 0:  # padding
                    assert not sample["loss_mask"][first:].any()
                    continue
                text = (*sample["tokens"][first:last].tolist(), int(sample["labels"][last - 1]))
                whole = next((t for t in (text, text[:-1]) if t in wholes), None)
                if whole is None:  # only the stateless order splits conversations
                    assert order == "stateless" or train.order.truncated
                    continue
                seen.append(whole)
                counted = sample["loss_mask"][first : first + len(whole) - 1]
                np.testing.assert_array_equal(counted, wholes[whole][1:])
                if len(whole) < len(text):
                    assert sample["loss_mask"][last - 1] == 0
    if order != "stateless":
        assert sorted(seen) == sorted(wholes)
        if order == "packed":
            assert train.order.packing.report().split_documents == 0
    else:
        assert len(seen) > len(wholes) // 2


def test_a_sample_by_hand(write_dataset) -> None:
    """Even with loss="all", the first token of the next conversation is not a label."""
    prefix = write_dataset([[1, 2, 3], [4, 5]], "d")
    write_dataset([[1, 1, 1], [1, 1]], "d_loss", "uint8")
    train = build_sft_datasets(prefix, "1,0,0", sequence_length=6).train
    assert train is not None and len(train) == 1
    sample = {key: value.tolist() for key, value in train[0].items()}
    assert sample == {
        "tokens": [1, 2, 3, 4, 5, 0],
        "labels": [2, 3, 4, 5, 0, 0],
        "loss_mask": [1, 1, 0, 1, 0, 0],
        "positions": [0, 1, 2, 0, 1, 0],
        "document_ids": [0, 0, 0, 1, 1, -1],
        "cu_seqlens": [0, 3, 5, 6, 6, 6, 6],
        "max_seqlen": 3,
        "sample_ids": 0,
    }


def test_rows_are_truncated_as_in_megatron(chat_prefix: str) -> None:
    length = 40
    train = build_sft_datasets(chat_prefix, "1,0,0", (130, 0, 0), length, order="compat").train
    assert train is not None and len(train) == 130
    with IndexedDataset(chat_prefix) as texts:
        rows = [texts.document(number) for number in range(texts.num_documents)]
        assert train.order.truncated == sum(len(row) > length for row in rows)
        for number in range(130):
            row = rows[number % 60]
            kept = row if len(row) <= length else row[:length]
            np.testing.assert_array_equal(train[number]["tokens"][: len(kept)], kept)
            assert not train[number]["loss_mask"][len(kept) - 1 :].any()


def test_every_lost_token_is_counted(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    long = {"role": "assistant", "content": "whale " * 400}
    rows = [
        {"messages": CHAT},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
        {"messages": [CHAT[1], long]},
        {"messages": CHAT[:2]},
        {"messages": [{"role": "user", "content": "whale " * 400}, CHAT[2]]},
    ]
    write(tmp_path / "t.jsonl", rows)
    template = ChatTemplate(CHATML)
    for over_length, kept, left_out in (("truncate", 3, (1, 0, 2)), ("drop", 2, (0, 2, 1))):
        report = tokenize_conversations(
            [tmp_path / "t.jsonl"], tmp_path / "t", tokenizer, template,
            max_tokens=300, over_length=over_length,
        )  # fmt: skip
        assert (report.rows, report.conversations) == (5, kept)
        assert (report.truncated, report.dropped, report.without_loss) == left_out
        with IndexedDataset(tmp_path / "t_conversation") as texts:
            assert texts.num_documents == 5
            assert len(texts.tokens) == report.tokens
            assert texts.sequence_lengths.max() <= 300
    everything = tokenize_conversations(
        [tmp_path / "t.jsonl"], tmp_path / "t", tokenizer, template, loss="all"
    )
    assert everything.loss_tokens == everything.tokens - everything.conversations
    assert everything.conversations == 5


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[1]", "t.jsonl:2: a list, not an object"),
        ('{"text": "Hi"}', "t.jsonl:2: no conversation; a line must be like"),
        ("{", "t.jsonl:2: not JSON"),
        ('{"messages": ["Hi"]}', "t.jsonl:2: message 1 is not like"),
        ('{"messages": [{"role": "user", "content": 5}]}', "t.jsonl:2: .* cannot render"),
    ],
)
def test_a_wrong_row_is_named(
    row: str, message: str, tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": CHAT}) + f"\n{row}\n")
    template = ChatTemplate("{{ messages[0].content + '' }}{% generation %}{% endgeneration %}")
    with pytest.raises(DataError, match=message):
        tokenize_conversations([tmp_path / "t.jsonl"], tmp_path / "t", tokenizer, template)
    assert not list(tmp_path.glob("t_*"))


@pytest.mark.parametrize("choice", ["folder", "format", "file"])
def test_the_command(
    choice: str,
    tokenizer: HuggingFaceTokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    monkeypatch.chdir(tmp_path)
    write(Path("t.jsonl"), [{"messages": CHAT}])
    tokenizer.save("tokenizer")
    Path("other.jinja").write_text(CHATML)
    command = "tokenize-conversations --input t.jsonl --output-prefix t --tokenizer-model tokenizer"
    if choice == "format":
        command += " --sft-tokenizer-prompt-format nemotron-h-aligned"
    elif choice == "file":
        command += " --chat-template other.jinja"
        assert main([*command.split(), "--sft-tokenizer-prompt-format", "identity"]) == 2
        assert "give only one of" in capsys.readouterr().err
    else:
        assert main(command.split()) == 1
        assert "tokenizer has no chat template" in capsys.readouterr().err
        Path("tokenizer/chat_template.jinja").write_text(CHATML)
    assert main(command.split()) == 0
    assert "t_conversation: 1 conversation of 1 row, " in capsys.readouterr().out
    with IndexedDataset("t_conversation") as texts:
        said = tokenizer.decode(texts.get(0).tolist())
    assert ("<SPECIAL_11>" in said) == (choice == "format")
    assert main([*command.split(), "--max-tokens", "3", "--overwrite"]) == 1
    assert "with a token that the loss counts" in capsys.readouterr().err


def test_a_mask_of_other_conversations_is_refused(write_dataset) -> None:
    prefix = write_dataset([[1, 2, 3]], "a")
    write_dataset([[1, 1]], "a_loss", "uint8")
    with pytest.raises(DataError, match="the loss mask does not belong to the conversations"):
        build_sft_datasets(prefix, "1,0,0", sequence_length=8)


def test_new_tokens_never_exist_beside_an_old_mask(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "t.jsonl", [{"messages": CHAT}])
    arguments = [tmp_path / "t.jsonl"], tmp_path / "t", tokenizer, ChatTemplate(CHATML)
    tokenize_conversations(*arguments)
    finalize = IndexedDatasetBuilder.finalize

    def stop_at_the_mask(builder: IndexedDatasetBuilder) -> object:
        if builder.prefix.endswith("_loss"):
            raise KeyboardInterrupt
        return finalize(builder)

    monkeypatch.setattr(IndexedDatasetBuilder, "finalize", stop_at_the_mask)
    with pytest.raises(KeyboardInterrupt):
        tokenize_conversations(*arguments, loss="all")
    with pytest.raises(DataError, match=r"t_conversation_loss\.idx"):
        build_sft_datasets(str(tmp_path / "t_conversation"), "1,0,0", sequence_length=8)
