"""Tests that every source refuses documents that are too large, before they are in memory."""

import bz2
import gzip
import inspect
import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from megatron_data import (
    ByteTokenizer,
    DataError,
    HuggingFaceTokenizer,
    IndexedDataset,
    build_sft_datasets,
    preprocess,
    read_texts,
    tokenize_conversations,
)
from megatron_data.cli import main
from megatron_data.datasets import ConversationLines
from megatron_data.preprocessing import benchmark, tokenize_image_pairs, trace
from megatron_data.tokenizers import ChatTemplate, NullTokenizer, SFTTokenizer

LIMIT = 32 << 20
LONG = b'{"text": "' + b"x" * (LIMIT + 9) + b'"}'
GOOD = b'{"text": "1"}\n'
MESSAGE = "a document of 33,554,453 bytes, more than --max-document-bytes 33,554,432"


def packed_by(suffix: str) -> Callable[[bytes], bytes]:
    if suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        packed: Callable[[bytes], bytes] = zstandard.ZstdCompressor().compress
        return packed
    known: dict[str, Callable[[bytes], bytes]] = {
        "": bytes,
        ".gz": lambda data: gzip.compress(data, 1),
        ".bz2": lambda data: bz2.compress(data, 1),
    }
    return known[suffix]


@pytest.fixture
def peak() -> Iterator[Callable[[], int]]:
    """Returns the peak of used memory in bytes since the last call."""
    tracemalloc.start()

    def read() -> int:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        return most

    yield read
    tracemalloc.stop()


@pytest.mark.parametrize(
    "suffix",
    [".gz", *(pytest.param(each, marks=pytest.mark.slow) for each in ("", ".bz2", ".zst"))],
)
def test_a_long_line_is_refused_by_default(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed_by(suffix)(GOOD + LONG + b"\n" + GOOD))
    with pytest.raises(DataError, match=r"a\.jsonl\S*:2: a document of 33,554,454 bytes"):
        preprocess([path], tmp_path / "o", NullTokenizer(9))
    (made,) = preprocess([path], tmp_path / "o", NullTokenizer(9), on_error="skip")
    assert made.skipped.kinds == {"long": 1}
    with IndexedDataset(made.prefix) as dataset:
        assert dataset.tokens.tolist() == [1, 1]


@pytest.mark.parametrize(
    "function",
    [
        *(preprocess, tokenize_conversations, tokenize_image_pairs, read_texts, trace),
        *(ConversationLines, build_sft_datasets),
    ],
)
def test_the_limit_is_a_default(function: Callable[..., object]) -> None:
    assert inspect.signature(function).parameters["max_document_bytes"].default == LIMIT


def test_every_reader_has_the_limit(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    lines, text, table = (tmp_path / f"a.{end}" for end in ("jsonl", "txt", "parquet"))
    message = r"a document of 120 bytes, more than --max-document-bytes 119"
    lines.write_text(json.dumps({"text": "x" * 108}))
    text.write_text("x" * 120)
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"text": ["1", "x" * 120, "2"]}), table)
    for path, place in ((lines, ":1"), (text, ""), (table, ", row 2")):
        with pytest.raises(DataError, match=rf"{path}{place}: {message}"):
            list(read_texts([path], max_document_bytes=119))
        assert list(read_texts([path], max_document_bytes=120))
    template = ChatTemplate("a")
    talker = SFTTokenizer(tokenizer, template)
    for end in ("", "\n", "\n\n \n{}"):  # the last line may have no line end
        lines.write_text("\n{}\n" + json.dumps({"text": "x" * 108}) + end)
        with pytest.raises(DataError, match=rf"a\.jsonl:3: {message}"):
            ConversationLines(lines, talker, max_document_bytes=119)
        for longest in (120, None):
            assert len(ConversationLines(lines, talker, max_document_bytes=longest)) > 1
    lines.write_bytes(LONG)
    with pytest.raises(DataError, match=r"bytes, more than --max-document-bytes 33,554,432"):
        benchmark([lines], ByteTokenizer())


def test_the_limit_is_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LONG)
    words = ["preprocess", "--input", str(path), "--tokenizer-type", "ByteTokenizer"]
    words += ["--output-prefix", str(tmp_path / "o")]
    assert main(words) == 1
    assert f"a.jsonl:1: {MESSAGE}" in capsys.readouterr().err
    path.write_bytes(GOOD)
    assert main([*words, "--max-document-bytes", "12"]) == 1
    assert "a.jsonl:1: a document of 13 bytes, more than" in capsys.readouterr().err
    assert main([*words, "--max-document-bytes", "13"]) == 0


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_small_file_of_a_long_line_takes_little_memory(
    suffix: str, tmp_path: Path, peak: Callable[[], int]
) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed_by(suffix)(GOOD + b"x" * (64 << 20)))
    assert path.stat().st_size < 1 << 20
    peak()
    (made,) = preprocess(
        [path], tmp_path / "o", NullTokenizer(9), on_error="skip", max_document_bytes=1 << 20
    )
    assert peak() < 40 << 20
    assert made.skipped.kinds == {"long": 1}


def test_long_lines_of_parallel_files_are_not_kept(tmp_path: Path, peak: Callable[[], int]) -> None:
    english, german = tmp_path / "en.gz", tmp_path / "de"
    english.write_bytes(gzip.compress(b"a\n" + b"x" * (48 << 20) + b"\nc\n" + b"d" * 50 + b"\n", 1))
    german.write_bytes(b"A\nB\nC\nD\n")
    peak()
    first, second = preprocess(
        [english, german],
        tmp_path / "o",
        ByteTokenizer(),
        json_keys=["en", "de"],
        parallel=True,
        on_error="quarantine",
        max_document_bytes=49,
        chunk_bytes=1000,
    )
    assert peak() < 16 << 20
    records = [json.loads(line) for line in (tmp_path / "o.quarantine.jsonl").open()]
    assert [(row["number"], row["kind"], row["bytes"]) for row in records] == [
        (2, "long", None),
        (4, "long", None),
    ]
    assert "more than --max-document-bytes 49" in records[0]["reason"]
    for dataset, wanted in ((first, b"ac"), (second, b"AC")):
        with IndexedDataset(dataset.prefix) as made:
            assert bytes(made.tokens.tolist()) == wanted
    found = trace(first.prefix, document=1)
    assert (found.number, found.inexact_reason) == (3, None)


def test_a_source_in_a_manifest_is_read_within_limits(
    tmp_path: Path, peak: Callable[[], int]
) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(GOOD)
    prefix = preprocess([lines], tmp_path / "o", NullTokenizer(9))[0].prefix
    path = Path(f"{prefix}.meta.json")
    manifest = json.loads(path.read_text())
    bomb = tmp_path / "bomb.jsonl.gz"
    bomb.write_bytes(gzip.compress(b"\n" * (100 << 20), 1))
    manifest["sources"][0]["path"] = str(bomb)
    manifest["chunks"]["size"] = [100 << 20]
    path.write_text(json.dumps(manifest))
    peak()
    assert "a chunk of 104,857,600 bytes" in str(trace(prefix, document=0).inexact_reason)
    for limit in (None, 1 << 40):
        manifest["sources"][0]["max_document_bytes"] = limit
        path.write_text(json.dumps(manifest))
        assert "a chunk of 104,857,600 bytes" in str(trace(prefix, document=0).inexact_reason)
    assert peak() < 16 << 20
    assert "has changed since" in str(
        trace(prefix, document=0, max_document_bytes=1 << 40).inexact_reason
    )
