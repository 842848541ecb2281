"""Tests of parallel corpora: line i of each file is document i of its dataset."""

import gzip
import json
import re
from pathlib import Path

import pytest
from megatron_data import ByteTokenizer, DataError, IndexedDataset, preprocess, verify
from megatron_data.cli import main
from megatron_data.preprocessing import trace

KEYS = ["en", "de"]
# Characters that only `str.splitlines` treats as line ends must not shift the pairs.
ENGLISH = ["one", "", "three\u2028still three", "four\x85\x0b", " five ", "six"]
GERMAN = ["eins", "zwei", "drei", "vier", "", "sechs, länger als die anderen"]


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    """Two parallel files: one with LF and no last newline, one compressed with CR LF."""
    english, german = tmp_path / "news.en", tmp_path / "news.de.gz"
    english.write_bytes(b"\xef\xbb\xbf" + "\n".join(ENGLISH).encode())
    german.write_bytes(gzip.compress("".join(f"{line}\r\n" for line in GERMAN).encode()))
    return [english, german]


def texts_of(prefix: str) -> list[str]:
    with IndexedDataset(prefix) as dataset:
        documents = [dataset.document(number) for number in range(dataset.num_documents)]
        return [bytes(tokens.astype("uint8")).decode() for tokens in documents]


@pytest.mark.parametrize(("workers", "chunk_bytes"), [(1, None), (1, 1), (1, 14), (2, 14)])
def test_document_i_of_each_dataset_is_line_i(
    pair: list[Path], tmp_path: Path, workers: int, chunk_bytes: int | None
) -> None:
    made = preprocess(
        pair,
        tmp_path / "o",
        ByteTokenizer(),
        json_keys=KEYS,
        parallel=True,
        workers=workers,
        chunk_bytes=chunk_bytes,
    )
    assert [dataset.prefix for dataset in made] == [f"{tmp_path}/o_{key}_document" for key in KEYS]
    assert (made[0].chunks > 1) == (chunk_bytes is not None)
    assert [texts_of(dataset.prefix) for dataset in made] == [ENGLISH, GERMAN]
    assert all(verify(dataset.prefix).has_manifest for dataset in made)
    for number in range(len(ENGLISH)):
        found = trace(made[1].prefix, document=number)
        assert (found.path, found.number) == (" + ".join(map(str, pair)), number + 1)
        assert found.inexact_reason is None


def test_lines_of_json_with_two_keys_give_the_same_files(pair: list[Path], tmp_path: Path) -> None:
    lines = tmp_path / "news.jsonl"
    rows = zip(ENGLISH, GERMAN, strict=True)
    lines.write_text("".join(json.dumps({"de": de, "en": en}) + "\n" for en, de in rows))
    options = {"json_keys": KEYS, "append_eod": True}
    preprocess(pair, tmp_path / "a", ByteTokenizer(), parallel=True, **options)  # type: ignore[arg-type]
    preprocess([lines], tmp_path / "b", ByteTokenizer(), **options)  # type: ignore[arg-type]
    for key in KEYS:
        for suffix in ("bin", "idx"):
            name = f"_{key}_document.{suffix}"
            assert (tmp_path / f"a{name}").read_bytes() == (tmp_path / f"b{name}").read_bytes()


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_unequal_numbers_of_lines_are_refused_before_any_work(
    pair: list[Path], tmp_path: Path, on_error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pair[0].open("ab") as file:
        file.write(b"\nseven\neight")
    command = ["preprocess", "--parallel", "--input", *map(str, pair), "--json-keys", *KEYS]
    command += ["--tokenizer-type", "ByteTokenizer", "--on-error", on_error]
    assert main([*command, "--output-prefix", str(tmp_path / "o")]) == 1
    printed = capsys.readouterr().err
    assert f"{pair[0]} has 8 lines, {pair[1]} has 6 lines" in printed
    assert sorted(tmp_path.iterdir()) == sorted(pair)


def test_an_invalid_line_is_skipped_in_both(tmp_path: Path) -> None:
    english, german = tmp_path / "en", tmp_path / "de"
    english.write_bytes(b"a\nb\nc\nd too long\n")
    german.write_bytes(b"A\nB \xff\nC\nD\n")
    files, prefix = [english, german], tmp_path / "o"
    with pytest.raises(DataError, match=re.escape(f"{german}:2: byte 2 of the line, 0xff")):
        preprocess(files, prefix, ByteTokenizer(), json_keys=KEYS, parallel=True)
    made = preprocess(
        files,
        prefix,
        ByteTokenizer(),
        json_keys=KEYS,
        parallel=True,
        on_error="quarantine",
        max_document_bytes=8,
    )
    assert [texts_of(dataset.prefix) for dataset in made] == [["a", "c"], ["A", "C"]]
    assert made[0].skipped.kinds == {"encoding": 1, "long": 1}
    quarantine = Path(f"{prefix}.quarantine.jsonl").read_text()
    printed = [json.loads(line) for line in quarantine.splitlines()]
    assert [(row["path"], row["number"]) for row in printed] == [
        (str(german), 2),
        (str(english), 4),
    ]
    assert trace(made[1].prefix, document=1).number == 3


def test_a_run_resumes_at_a_corrected_line(tmp_path: Path) -> None:
    english, german = tmp_path / "en", tmp_path / "de"
    english.write_text("a\nb\nc\nd\n")
    german.write_bytes(b"A\nB\nC\n\xff\n")

    def run(name: str) -> int:
        made = preprocess(
            [english, german],
            tmp_path / name,
            ByteTokenizer(),
            json_keys=KEYS,
            parallel=True,
            chunk_bytes=4,
        )
        return made[1].resumed_chunks

    with pytest.raises(DataError, match="de:4"):
        run("o")
    german.write_text("A\nB\nC\nD\n")
    assert run("o") == 3
    assert run("anew") == 0
    for suffix in ("bin", "idx", "meta.json"):
        names = (tmp_path / f"{name}_de_document.{suffix}" for name in ("o", "anew"))
        assert len({path.read_bytes() for path in names}) == 1


def test_wrong_inputs_are_named(pair: list[Path], tmp_path: Path) -> None:
    def fails(inputs: list[Path], keys: list[str], message: str) -> None:
        with pytest.raises(DataError, match=message):
            preprocess(inputs, tmp_path / "o", ByteTokenizer(), json_keys=keys, parallel=True)

    fails(pair, ["text"], r"2 in --input \(.*news.en, .*\), 1 in --json-keys \(text\)")
    fails(pair[:1], ["en"], "give at least two files")
    fails([pair[0], tmp_path], KEYS, "is a folder")
    fails([pair[0], tmp_path / "gone"], KEYS, "no input file or folder at .*gone")
    pair[1].write_bytes(pair[1].read_bytes()[:-12])
    fails(pair, KEYS, r"news\.de\.gz: it is damaged or truncated")
