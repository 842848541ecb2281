"""Tests of unreadable documents: they end the run, are skipped, or are quarantined."""

import gzip
import json
from pathlib import Path

import pytest
from megatron_data import DataError, IndexedDataset, preprocess, verify
from megatron_data.cli import main
from megatron_data.tokenizers import NullTokenizer

GOOD = [f'{{"text": "{number}"}}'.encode() for number in range(8)]
LINES = [
    GOOD[0],
    b'{"text": "\xff"}',
    GOOD[1],
    b"",
    b"{",
    b'["text"]',
    GOOD[2],
    b'{"body": "5"}',
    b'{"text": 5}',
    GOOD[3],
    b'{"text": "not a number"}',
    GOOD[4],
    b'{"text": "' + b"1 " * 300 + b'"}',
    GOOD[5],
]
KINDS = ["encoding", "json", "json", "key", "type", "tokens", "long"]
NUMBERS = [2, 5, 6, 8, 9, 11, 13]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(LINES) + b"\n")
    return path


def quarantined(prefix: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in Path(f"{prefix}.quarantine.jsonl").open()]


@pytest.mark.parametrize(("workers", "chunk_bytes"), [(1, None), (1, 1), (2, 60)])
def test_each_kind_of_fault_is_reported_with_its_place(
    corpus: Path, tmp_path: Path, workers: int, chunk_bytes: int | None
) -> None:
    (made,) = preprocess(
        [corpus],
        tmp_path / "o",
        NullTokenizer(100),
        on_error="quarantine",
        max_document_bytes=500,
        workers=workers,
        chunk_bytes=chunk_bytes,
    )
    assert IndexedDataset(made.prefix).tokens.tolist() == [0, 1, 2, 3, 4, 5]
    rows = quarantined(tmp_path / "o")
    assert [(row["kind"], row["number"]) for row in rows] == list(zip(KINDS, NUMBERS, strict=True))
    data = corpus.read_bytes()
    for row in rows:
        start, size = row["offset"], row["bytes"]
        assert isinstance(start, int) and isinstance(size, int)
        line = data[start : start + size].rstrip(b"\n")
        assert line == LINES[NUMBERS[rows.index(row)] - 1]
        assert row["path"] == str(corpus) and row["reason"]
    assert made.skipped.documents == 7
    assert made.skipped.kinds["json"] == 2
    manifest = json.loads(Path(f"{made.prefix}.meta.json").read_text())
    assert manifest["skipped"]["documents"] == 7
    verify(made.prefix)


def test_the_command_counts_what_it_skips_and_succeeds(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["preprocess", "--input", str(corpus), "--tokenizer-type", "NullTokenizer"]
    command += ["--vocab-size", "100", "--output-prefix", str(tmp_path / "o")]
    assert main(command) == 1
    assert "a.jsonl:2: byte 10 of the line" in capsys.readouterr().err
    assert main([*command, "--on-error", "skip"]) == 0
    shown = capsys.readouterr().out
    assert "6 skipped (1 not UTF-8, 2 not a JSON object, 1 without the key, " in shown
    assert not list(tmp_path.glob("*quarantine*"))
    command.append("--overwrite")
    assert main([*command, "--on-error", "quarantine", "--max-document-bytes", "99"]) == 0
    assert f"; see {tmp_path}/o.quarantine.jsonl" in capsys.readouterr().out
    assert main([*command, "--on-error", "skip"]) == 0
    assert "6 skipped" in capsys.readouterr().out
    assert not list(tmp_path.glob("*quarantine*")), "it is not of these datasets"
    assert main([*command, "--on-error", "quarantine"]) == 0
    capsys.readouterr()
    corpus.write_bytes(b"\n".join(GOOD))
    assert main([*command, "--on-error", "quarantine"]) == 0
    assert "skipped" not in capsys.readouterr().out
    assert not list(tmp_path.glob("*quarantine*")), "the one of an older run"
    assert main([*command, "--on-error", "skp"]) == 2
    assert "did you mean skip?" in capsys.readouterr().err


def test_a_document_is_skipped_in_all_datasets_or_in_none(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"a": "1", "b": "2"}\n{"a": "3"}\n{"a": "4", "b": "x"}\n{"a": "5", "b": "6"}\n'
    )
    first, second = preprocess(
        [path], tmp_path / "o", NullTokenizer(9), json_keys=["a", "b"], on_error="skip"
    )
    assert IndexedDataset(first.prefix).tokens.tolist() == [1, 5]
    assert IndexedDataset(second.prefix).tokens.tolist() == [2, 6]


def test_the_rest_of_a_damaged_file_is_one_entry(tmp_path: Path) -> None:
    whole = b"".join(b'{"text": "%d"}\n' % (number * 7919 % 10_007) for number in range(20_000))
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(whole)[:-20_000])
    after = tmp_path / "b.txt"
    after.write_text("42")
    (made,) = preprocess(
        [packed, after], tmp_path / "o", NullTokenizer(10_007), on_error="quarantine"
    )
    (row,) = quarantined(tmp_path / "o")
    assert row["kind"] == "damaged" and "the rest is lost" in str(row["reason"])
    tokens = IndexedDataset(made.prefix).tokens.tolist()
    assert tokens[:-1] == [number * 7919 % 10_007 for number in range(len(tokens) - 1)]
    assert tokens[-1] == 42 and row["number"] == len(tokens) > 1000
    with pytest.raises(DataError, match=r"a\.jsonl\.gz:\d+: it is damaged or truncated"):
        preprocess([packed, after], tmp_path / "f", NullTokenizer(10_007))


def test_text_files_and_rows_can_be_skipped(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, data in {"a": b"1", "b": b"\xff", "c": b"2 " * 99, "d": b"3", "e": b"x"}.items():
        (folder / f"{name}.txt").write_bytes(data)
    (folder / "f.txt.gz").write_bytes(gzip.compress(b"4 " * 40)[:-9])
    table = pyarrow.table({"text": ["5", None, "6 " * 99, "7"]})
    parquet.write_table(table, folder / "g.parquet")
    (made,) = preprocess(
        [folder],
        tmp_path / "o",
        NullTokenizer(9),
        on_error="quarantine",
        max_document_bytes=50,
    )
    assert IndexedDataset(made.prefix).tokens.tolist() == [1, 3, 5, 7]
    rows = quarantined(tmp_path / "o")
    names = [(Path(str(row["path"])).name, row["kind"]) for row in rows]
    assert names == [
        ("b.txt", "encoding"),
        ("c.txt", "long"),
        ("e.txt", "tokens"),
        ("f.txt.gz", "damaged"),
        ("g.parquet", "type"),
        ("g.parquet", "long"),
    ]


def test_one_line_of_a_hundred_megabytes_is_not_kept_in_memory(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(GOOD[1] + b'\n{"text": "')
        for _ in range(100):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n' + GOOD[2] + b"\n")
    tracemalloc.start()
    (made,) = preprocess(
        [path], tmp_path / "o", NullTokenizer(9), on_error="quarantine", max_document_bytes=10**6
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert IndexedDataset(made.prefix).tokens.tolist() == [1, 2]
    (row,) = quarantined(tmp_path / "o")
    assert (row["number"], row["kind"]) == (2, "long")
    assert "a document of 100,000,0" in str(row["reason"])
    assert peak < 20e6
    with pytest.raises(
        DataError, match=r"a\.jsonl:2: a document of 100,0.* bytes, more than --max"
    ):
        preprocess([path], tmp_path / "f", NullTokenizer(9), max_document_bytes=10**6)
