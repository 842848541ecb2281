"""Conversations in JSON lines give the same samples as tokenized conversations."""

import gzip
import json
import logging
import pickle
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_data import (
    DataError,
    EmptySplitError,
    HuggingFaceTokenizer,
    IndexedDataset,
    build_gpt_datasets,
    build_sft_datasets,
    tokenize_conversations,
)
from megatron_data.datasets import (
    ConversationLines,
    DatasetPool,
    conversation_lines,
    is_conversation_file,
)
from megatron_data.datasets.conversation_lines import ConversationLinesDataset
from megatron_data.tokenizers import ChatTemplate, SFTTokenizer

pytest.importorskip("jinja2")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def talker(tokenizer: HuggingFaceTokenizer) -> SFTTokenizer:
    return SFTTokenizer(tokenizer, ChatTemplate(CHATML))


@pytest.fixture(scope="module")
def talks(talker: SFTTokenizer, tmp_path_factory) -> Path:
    """Returns a folder with two files of conversations and their tokenized datasets."""
    random, folder = np.random.default_rng(1), tmp_path_factory.mktemp("talks")

    def said(role: str) -> dict[str, str]:
        return {"role": role, "content": " ".join(["sea 日本"] * int(random.integers(1, 20)))}

    for name, rows in (("a", 40), ("b", 25)):
        lines = []
        for number in range(rows):
            messages: list[dict[str, str]] = []
            for _ in range(int(random.integers(1, 4))):
                messages += [{"role": "system", "content": str(number)}, said("user")]
                if random.random() < 0.8:  # otherwise there is no assistant message
                    messages.append(said("assistant"))
            white = " " * (number % 5 == 0)
            lines.append(white + json.dumps({"messages": messages}, ensure_ascii=False))
            lines += [" \t" * (number % 2)] if number % 7 == 0 else []  # blank lines
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n" * (name == "a"))
        tokenize_conversations(
            [folder / f"{name}.jsonl"], folder / name, talker.reference, talker.template
        )
    return folder


def same(first: Any, second: Any) -> bool:
    return len(first) == len(second) and all(
        first[number].keys() == second[number].keys()
        and all(
            value.dtype == second[number][key].dtype and np.array_equal(value, second[number][key])
            for key, value in first[number].items()
        )
        for number in range(len(first))
    )


@pytest.mark.parametrize("length", [24, 200])
@pytest.mark.parametrize("data", ["a", "a b", "0.3 a 0.7 b"])
def test_samples_are_those_of_tokenized_conversations(
    talks: Path, talker: SFTTokenizer, data: str, length: int, monkeypatch
) -> None:
    monkeypatch.chdir(talks)
    words = data.split()
    tokenized = [f"{word}_conversation" if word.isalpha() else word for word in words]
    lines = [f"{word}.jsonl" if word.isalpha() else word for word in words]
    options: dict[str, Any] = {"split": "6,3,1", "sizes": (90, 10, 3), "order": "compat"}
    options["sequence_length"] = length
    expected = build_sft_datasets(tokenized, **options)
    given = build_sft_datasets(lines, **options, tokenizer=talker)
    assert all(map(same, given, expected))
    mixed = build_sft_datasets([*lines[:-1], tokenized[-1]], **options, tokenizer=talker)
    assert all(map(same, mixed, expected))
    another = SFTTokenizer(talker.reference, ChatTemplate(CHATML.replace("start|", "begin|")))
    other = build_sft_datasets(lines, **options, tokenizer=another)
    assert not same(other.train, expected.train)


def test_a_dataset_pool_opens_and_checks_each_dataset_once(
    talks: Path, talker: SFTTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run builds its splits one by one. Only the first reads the file and checks the index."""
    calls: list[str] = []
    check, find = IndexedDataset.check, conversation_lines._find_lines
    monkeypatch.setattr(
        IndexedDataset, "check", lambda self: calls.append(self.prefix) or check(self)
    )
    monkeypatch.setattr(
        conversation_lines, "_find_lines", lambda path: calls.append(path) or find(path)
    )
    lines, prefix = str(talks / "a.jsonl"), str(talks / "a_conversation")
    once = {lines: [lines], prefix: [prefix, f"{prefix}_loss"]}
    for path, wanted in once.items():
        for pool, times in ((DatasetPool(), 1), (None, 3)):
            calls.clear()
            for sizes in ((9, 0, 0), (0, 4, 0), (0, 0, 4)):
                build_sft_datasets(
                    path, "6,3,1", sizes, order="compat", tokenizer=talker, dataset_pool=pool
                )
            assert sorted(calls) == sorted(times * wanted)
    shared = DatasetPool()
    calls.clear()
    for order in ("stateless", "packed", "compat"):
        build_gpt_datasets(prefix, "6,3,1", (9, 0, 0), 8, order=order, dataset_pool=shared)
    assert calls == [prefix]


def test_one_epoch_and_workers(talks: Path, talker: SFTTokenizer) -> None:
    train, valid, _ = build_sft_datasets(
        str(talks / "b.jsonl"), "1,0,0", sequence_length=200, order="compat", tokenizer=talker
    )
    assert train is not None and len(train) == 25 and valid is None
    assert same(pickle.loads(pickle.dumps(train)), train)
    for sample in (-1, 25):
        with pytest.raises(IndexError, match=f"sample {sample} is out of range; there are 25 samp"):
            train[sample]
    for wrong, message in (
        ({"sequence_length": 0}, "sequence length 0; give at least 1"),
        ({"sequence_length": 8, "num_samples": -1}, "num_samples -1; give at least 0"),
    ):
        with pytest.raises(DataError, match=message):
            ConversationLinesDataset(train.lines, (0, 25), **wrong)


def test_lines_may_be_longer_than_a_read(talks: Path, talker: SFTTokenizer, monkeypatch) -> None:
    whole = ConversationLines(talks / "a.jsonl", talker)
    monkeypatch.setattr("megatron_data.datasets.conversation_lines._READ_BYTES", 37)
    parts = ConversationLines(talks / "a.jsonl", talker)
    assert len(whole) == len(parts) == 40
    for number in (0, 1, 20, 39):
        assert whole.location(number) == parts.location(number)
        ids = [
            [each.ids.tolist() for each in lines.conversations(number)] for lines in (whole, parts)
        ]
        assert ids[0] == ids[1]
    text = (talks / "a.jsonl").read_text().split("\n")
    _, _, line = whole.location(39).rpartition(":")
    assert json.loads(text[int(line) - 1])["messages"][0]["content"] == "39"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[1]", r"t.jsonl:4: no conversation"),
        ("{", r"t.jsonl:4: not JSON"),
        ('{"messages": [{"role": "user", "content": 5}]}', r"t.jsonl:4: the chat template cannot"),
        ('{"messages": "\udcff"}', r"t.jsonl:4: not JSON"),
    ],
)
def test_a_wrong_line_is_named_when_it_is_read(
    talker: SFTTokenizer, tmp_path: Path, row: str, message: str
) -> None:
    good = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]}'
    path = tmp_path / "t.jsonl"
    path.write_text(f"{good}\n\n{good}\n{row}\n{good}", errors="surrogateescape")
    template = ChatTemplate("{% generation %}{{ messages[0].content + '' }}{% endgeneration %}")
    train = build_sft_datasets(
        str(path), "1,0,0", sequence_length=8, order="compat",
        tokenizer=SFTTokenizer(talker.reference, template),
    ).train  # fmt: skip
    assert train is not None and len(train) == 4
    for number in (0, 1, 3):
        assert train[number]["loss_mask"].any()
    with pytest.raises(DataError, match=message):
        train[2]


def test_truncated_lines_and_lines_without_loss_are_warned_of_once(
    talks: Path, talker: SFTTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(talks / "a.jsonl")
    train = build_sft_datasets(
        path, "1,0,0", sequence_length=40, order="compat", tokenizer=talker
    ).train
    assert train is not None
    with caplog.at_level(logging.WARNING, "megatron_data"):
        for number in range(len(train)):
            train[number]
    assert all(said.startswith(f"{path}:") for said in caplog.messages)
    wanted = (
        "no message of the role assistant",
        "truncated to 40; lines longer than a sample lose",
    )
    assert [sum(what in said for said in caplog.messages) for what in wanted] == [1, 1]
    assert len(caplog.messages) == 2
    rows = [train.lines.conversations(number) for number in range(len(train))]
    longer = [sum(len(one.ids) for one in row) > 40 for row in rows]
    for number, what in ((rows.index([]), wanted[0]), (longer.index(True), wanted[1])):
        (said,) = (each for each in caplog.messages if what in each)
        assert said.startswith(f"{train.lines.location(number)}: ")
    prefix = str(talks / "a_conversation")
    for order, what in (
        ("compat", " rows longer"),
        ("packed", " conversations longer"),
        ("stateless", ""),
    ):
        caplog.clear()
        build_sft_datasets(prefix, "1,0,0", sequence_length=40, order=order)
        assert [what in said for said in caplog.messages] == [True] * bool(what)
        caplog.clear()
        build_sft_datasets(prefix, "1,0,0", sequence_length=4000, order=order)
        assert not caplog.messages


def test_files_that_cannot_be_read_by_line_are_refused(
    talks: Path, talker: SFTTokenizer, tmp_path: Path
) -> None:
    path = str(talks / "a.jsonl")
    for order in ("packed", "stateless"):
        with pytest.raises(
            DataError, match=r"tokenize-conversations --input .* --sample-order com"
        ):
            build_sft_datasets(path, "1,0,0", order=order, tokenizer=talker)
    with pytest.raises(DataError, match="give --tokenizer-model"):
        build_sft_datasets(path, "1,0,0", order="compat")
    with pytest.raises(EmptySplitError, match=r"valid split of .*a.jsonl \(0 of 40 lines\)"):
        build_sft_datasets(path, "1000,1,0", order="compat", tokenizer=talker)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.json").write_text(" \n\n")
    (tmp_path / "folder.json").mkdir()
    for name, message in (
        ("a.jsonl.gz", "needs a local, uncompressed file"),
        ("empty.jsonl", "is empty"),
        ("blank.json", "is empty"),
        ("folder.json", "does not exist or is not a file"),
        ("nowhere.jsonl", "does not exist"),
    ):
        with pytest.raises(DataError, match=message):
            ConversationLines(tmp_path / name, talker)
    with pytest.raises(DataError, match="needs a local, uncompressed file"):
        ConversationLines("s3://bucket/a.jsonl", talker)
    assert not is_conversation_file("talks_conversation")


def test_a_template_that_writes_the_time_is_warned_of(
    talks: Path, talker: SFTTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    dated = ChatTemplate("{{ strftime_now('%d') }}" + CHATML)
    ConversationLines(talks / "a.jsonl", SFTTokenizer(talker.reference, dated))
    assert "samples depend on the day on which they are read" in caplog.text
    caplog.clear()
    ConversationLines(
        talks / "a.jsonl", SFTTokenizer(talker.reference, dated.with_time(datetime.min))
    )
    ConversationLines(f"file://{talks}/a.jsonl", talker)
    assert not caplog.records


def test_a_changed_file_is_refused(talker: SFTTokenizer, tmp_path: Path) -> None:
    row = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "?"}]}'
    path = tmp_path / "t.jsonl"
    path.write_text(f"{row}\n{row}\n")
    lines = ConversationLines(path, talker)
    assert len(lines.conversations(0)) == 1
    path.write_text(f"{row}\n{row}\n{row}\n")
    assert len(lines.conversations(0)) == 1  # cached
    with pytest.raises(
        DataError, match=r"t.jsonl changed since it was opened; start the run again"
    ):
        lines.conversations(1)
