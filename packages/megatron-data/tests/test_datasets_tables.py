"""Tables of labelled texts and files of conversations: their columns, rows and lines."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron_data import DataError
from megatron_data.datasets import conversation_lines
from megatron_data.datasets.conversation_lines import ConversationLines
from megatron_data.datasets.labelled_texts import LabelledText, TextColumns, read_labelled_texts


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (((), "label"), "0 columns of texts; give one or two"),
        ((("a", "b", "c"), "d"), "3 columns of texts; give one or two"),
        ((("a", "a"), "b"), "the columns a, a, b have a name twice"),
        ((("a",), "a"), "the columns a, a have a name twice"),
        ((("0", "a"), "1"), "the columns 0, a, 1 mix numbers and names"),
    ],
)
def test_impossible_columns_are_refused_by_name(columns: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        TextColumns(*columns)
    assert TextColumns() == TextColumns(("text",), "label")
    assert TextColumns(("a", "b"), "c").all == ("a", "b", "c")


def test_a_row_has_every_column_and_a_label(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("x\ty\t 1 \n\n \nz\tw\t2\r\n")
    columns = TextColumns(("0", "1"), "2")
    assert read_labelled_texts(path, columns) == [
        LabelledText(("x", "y"), "1", f"{path}:1"),
        LabelledText(("z", "w"), "2", f"{path}:4"),
    ]
    for text, message in (
        ("x\ty\n", r"a\.tsv:1: the row has 2 columns, but column 2 .counted from 0. is needed"),
        ("x\ty\t1\nx\ty\t \n", r"a\.tsv:2: the label is empty"),
        ("\n", r"a\.tsv has no row"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read_labelled_texts(path, columns)


@pytest.mark.parametrize("read_bytes", [1, 2, 3, 5, 7, 1000])
@pytest.mark.parametrize(
    "content",
    [b"", b"a", b"a\n", b"\n\na\nbb\n \n\nccc", b"a\n \t\n", b" \n\n", b"a\nb\n\n", b" a\n  b\n"],
)
def test_lines_are_found_with_reads_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int, content: bytes
) -> None:
    monkeypatch.setattr(conversation_lines, "_READ_BYTES", read_bytes)
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    wanted = [number for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    template = SimpleNamespace(uses_time=False, now=None)
    tokenizer: Any = SimpleNamespace(eod_id=0, template=template)
    if not wanted:
        with pytest.raises(DataError, match="is empty; write one conversation per line"):
            ConversationLines(path, tokenizer)
        return
    lines = ConversationLines(path, tokenizer)
    assert [lines.location(at) for at in range(len(lines))] == [f"{path}:{n}" for n in wanted]


def test_the_last_64_lines_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("1\n" * 66)
    read: list[int] = []
    monkeypatch.setattr(ConversationLines, "_read", lambda _, number: read.append(number) or [])
    template = SimpleNamespace(uses_time=True, now=None)
    with caplog.at_level(logging.WARNING):
        lines = ConversationLines(path, SimpleNamespace(eod_id=0, template=template))  # type: ignore[arg-type]
    assert "fix the time with ChatTemplate.with_time" in caplog.text

    def reads(numbers: Iterator[int] | range) -> list[int]:
        read.clear()
        for number in numbers:
            lines.conversations(number)
        return list(read)

    assert reads(range(64)) == list(range(64))
    assert reads(range(64)) == []
    assert reads(iter([64, 0])) == [64, 0]
