"""Tests of tracing tokens to their sources, also after `merge` and `split`."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from megatron_data import (
    ByteTokenizer,
    DataError,
    IndexedDataset,
    IndexedDatasetBuilder,
    merge,
    preprocess,
    split,
    verify,
)
from megatron_data.cli import main
from megatron_data.preprocessing import trace
from megatron_data.tokenizers import NullTokenizer

LINES = [
    '{"text": "1 2"}',
    "",
    '{"text": "é"}',
    "{",
    *(f'{{"text": "{number} {number + 1} 7", "other": "x"}}' for number in range(50)),
    '{"text": ""}',
    '{"text": "8"}',
]
GOOD = [line for line in LINES if line not in ("", "{", '{"text": "é"}')]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(LINES))
    return path


def made(inputs: list[Path], output: Path, **options: object) -> str:
    settings = {"on_error": "skip", "chunk_bytes": 100, "append_eod": True, **options}
    return preprocess(inputs, output, NullTokenizer(99), **settings)[0].prefix  # type: ignore[arg-type]


def text_at(path: str, offset: int | None, size: int | None) -> str:
    data = Path(path).read_bytes()
    data = gzip.decompress(data) if path.endswith(".gz") else data
    assert offset is not None and size is not None
    return data[offset : offset + size].decode()


def holds(prefix: str, wanted: list[str]) -> None:
    """Checks that every document and token is traced to its line."""
    with IndexedDataset(prefix) as dataset:
        assert dataset.num_documents == len(wanted)
        token = 0
        for number, line in enumerate(wanted):
            found = trace(prefix, document=number)
            assert found.inexact_reason is None
            assert text_at(found.path, found.offset, found.size) == line
            assert found.first_token == token
            assert found.tokens == len(dataset.document(number))
            if found.tokens:
                assert trace(prefix, token) == trace(prefix, token + found.tokens - 1) == found
            token += found.tokens
            whole = Path(found.path).read_bytes()
            if not found.path.endswith(".gz"):
                assert whole[: found.offset].count(b"\n") + 1 == found.number


def test_every_token_leads_to_its_line(lines: Path, tmp_path: Path) -> None:
    holds(made([lines, lines], tmp_path / "o"), GOOD * 2)
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    holds(made([packed], tmp_path / "packed", workers=1), GOOD)


def test_text_files_and_rows_are_found_too(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, data in {"a": b"1", "b": b"\xff", "c": b"2 3", "d": b"x", "e": b"4"}.items():
        (folder / f"{name}.txt").write_bytes(data)
    prefix = made([folder], tmp_path / "o")
    assert [Path(trace(prefix, document=number).path).name for number in range(3)] == [
        "a.txt",
        "c.txt",
        "e.txt",
    ]
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = ["1", None, "2", "x", "3 4", *map(str, range(60))]
    parquet.write_table(pyarrow.table({"text": texts}), folder / "f.parquet")
    prefix = made([folder], tmp_path / "both")
    rows = [trace(prefix, document=number) for number in range(3, 6)]
    assert [(Path(row.path).name, row.number) for row in rows] == [
        ("f.parquet", 1),
        ("f.parquet", 3),
        ("f.parquet", 5),
    ]


def test_a_changed_or_missing_source_is_reported(lines: Path, tmp_path: Path) -> None:
    prefix = made([lines], tmp_path / "o")
    number = trace(prefix, document=20).number
    assert number is not None
    text = lines.read_text()
    lines.write_text(text.replace("16 17 7", "16 18 7"))
    found = trace(prefix, document=17)
    assert found.inexact_reason == f"{lines} has changed since" and found.number is None
    assert found.span.first <= 20 < found.span.first + found.span.units
    assert trace(prefix, document=1).inexact_reason is None, "the other chunks are as they were"
    lines.write_text(text[:300])
    assert "ends before byte" in str(trace(prefix, document=40).inexact_reason)
    lines.unlink()
    assert "no input file" in str(trace(prefix, document=1).inexact_reason)


def test_what_cannot_be_traced_is_refused(lines: Path, tmp_path: Path) -> None:
    prefix = made([lines], tmp_path / "o")
    total = len(IndexedDataset(prefix).tokens)
    for token in (-1, total):
        with pytest.raises(DataError, match=f"has tokens 0 to {total - 1}, not {token}"):
            trace(prefix, token)
    with pytest.raises(DataError, match="has documents 0 to 52, not 53"):
        trace(prefix, document=53)
    with pytest.raises(DataError, match="give either a token or a document"):
        trace(prefix)
    Path(f"{prefix}.meta.json").unlink()
    with pytest.raises(DataError, match=r"has no manifest .*o_text_document\.meta\.json"):
        trace(prefix, 0)


def test_merged_and_split_datasets_keep_their_origins(
    lines: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "b.jsonl"
    other.write_text('{"text": "5 5"}\n{"text": "6"}\n')
    first, second = made([lines], tmp_path / "a"), made([other], tmp_path / "b")
    both = GOOD + other.read_text().splitlines()
    counts = merge([first, second], tmp_path / "m")
    assert counts.documents == len(both)
    verify(tmp_path / "m")
    holds(str(tmp_path / "m"), both)
    manifest = json.loads((tmp_path / "m.meta.json").read_text())
    assert manifest["skipped"] == {"documents": 2, "kinds": {"json": 1, "tokens": 1}}
    assert [source["path"] for source in manifest["sources"]] == [str(lines), str(other)]

    names = [tmp_path / name for name in ("x", "y", "z")]
    split(tmp_path / "m", names, documents=(13, 39, 3))
    holds(str(names[0]), both[:13])
    holds(str(names[1]), both[13:52])
    holds(str(names[2]), both[52:])
    again = merge(names, tmp_path / "again")
    assert again == counts
    for suffix in ("bin", "idx"):
        whole = (tmp_path / f"m.{suffix}").read_bytes()
        assert (tmp_path / f"again.{suffix}").read_bytes() == whole
    holds(str(tmp_path / "again"), both)
    halves = split(tmp_path / "m", names[:2], shares=(0.25, 0.75))
    assert not caplog.records
    split(tmp_path / "m", names[:2], shares=(1, 3))
    assert caplog.messages == ["the shares sum to 4, not to 1; they are taken as 25.00%, 75.00%"]
    assert [half.documents for half in halves] == [14, 41]
    holds(str(names[1]), both[14:])


def test_modes_and_sentences_survive(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", "uint16", multimodal=True) as builder:
        builder.add_document([1, 2, 3], [1, 2], [0, 1])
        builder.add_document([], [])
        builder.add_document([4, 5], [1, 1], [1, 0])
        builder.finalize()
    split(tmp_path / "d", [tmp_path / "a", tmp_path / "b"], documents=(1, 2))
    part = IndexedDataset(tmp_path / "b")
    part.check()
    assert part.sequence_modes is not None
    assert part.sequence_modes.tolist() == [1, 0]
    assert part.document_indices.tolist() == [0, 0, 2]
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    for suffix in ("bin", "idx"):
        wanted = (tmp_path / f"d.{suffix}").read_bytes()
        assert (tmp_path / f"c.{suffix}").read_bytes() == wanted
    assert not list(tmp_path.glob("*.json")), "no manifest is made up"
    assert IndexedDataset(tmp_path / "c").dtype == np.uint16


def test_incompatible_datasets_and_parts_are_refused(lines: Path, tmp_path: Path) -> None:
    first = made([lines], tmp_path / "a")
    (second,) = preprocess([lines], tmp_path / "b", ByteTokenizer(), on_error="skip")
    with pytest.raises(DataError, match=r"was made with tokenizer bytes:257, .* with null:99"):
        merge([first, second.prefix], tmp_path / "m")
    with pytest.raises(DataError, match="is one of the datasets to merge"):
        merge([first], first)
    with pytest.raises(DataError, match="no dataset to merge"):
        merge([], tmp_path / "m")
    one, two = tmp_path / "x", tmp_path / "y"
    for message, outputs, options in (
        ("needs a different name", [one, one], {"shares": (1, 1)}),
        ("not that of the dataset", [one, Path(first)], {"shares": (1, 1)}),
        ("2 parts for 1 output;", [one], {"shares": (1, 1)}),
        ("a share or number of 0", [one, two], {"shares": (1, 0)}),
        ("sum to 5, but the dataset has 53", [one, two], {"documents": (2, 3)}),
        ("part 1 of 53 documents is empty", [one, two], {"shares": (0.001, 1)}),
        ("give either shares or numbers", [one], {}),
    ):
        with pytest.raises(DataError, match=message):
            split(first, outputs, **options)  # type: ignore[arg-type]
    assert not list(tmp_path.glob("[mxy].*"))


def test_the_commands(lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = made([lines], tmp_path / "o")
    assert main(["trace", prefix, "5"]) == 0
    shown = capsys.readouterr().out
    assert shown == (
        "token 5 is number 2 of document 1 (tokens 3 to 6), from\n"
        f"{lines}, line 5, bytes 34 to 64\n"
    )
    lines.write_text("")
    assert main(["trace", prefix, "--document", "0"]) == 0
    shown = capsys.readouterr().out
    # The first six lines have 98 bytes, and a chunk at most 100.
    assert f"{lines}, between line, row or file 1 and 6\n" in shown
    assert "the exact location is unknown: " in shown
    assert main(["trace", prefix]) == 2
    outputs = [str(tmp_path / "x"), str(tmp_path / "y")]
    words = ["split", prefix, "--shares", "0.5", "0.5", "--output-prefixes", *outputs]
    assert main(words) == 0
    assert main(["merge", *outputs, "--output-prefix", str(tmp_path / "m")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path}/m: 53 documents, 205 tokens"
    assert main(["verify", str(tmp_path / "m")]) == 0
