"""Tests of text files and folders as a corpus."""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
from megatron_data import ByteTokenizer, DataError, IndexedDataset, preprocess, read_texts
from megatron_data.cli import main
from megatron_data.sources.text_files import MOST_FILES, TextFiles

TEXTS = {
    "b.txt": "second\n",
    "a.txt": "Wörter,\r\n日本\n\n",
    "deep/er/c.TXT": "fourth",
    "deep-z.txt": "third",  # "-" sorts before "/"
    "empty.txt": "",
}
IN_ORDER = ["a.txt", "b.txt", "deep-z.txt", "deep/er/c.TXT", "empty.txt"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    for name, text in TEXTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    for hidden in (".hidden.txt", ".git/x.txt"):
        (root / hidden).parent.mkdir(exist_ok=True)
        (root / hidden).write_text("never read")
    return root


def write_lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_of_text_is_a_document_a_file_in_sorted_order(
    folder: Path, tmp_path: Path
) -> None:
    wanted = [TEXTS[name] for name in IN_ORDER]
    assert list(read_texts([folder])) == wanted
    (made,) = preprocess([folder], tmp_path / "out" / "o", ByteTokenizer(), append_eod=True)
    dataset = IndexedDataset(made.prefix)
    documents = [dataset.document(number).tolist() for number in range(dataset.num_documents)]
    assert documents == [[*text.encode(), 256] if text else [] for text in wanted]
    assert made.counts.empty_documents == 1

    lines = tmp_path / "same.jsonl"
    write_lines(lines, wanted)
    preprocess([lines], tmp_path / "lines" / "o", ByteTokenizer(), append_eod=True)
    texts, same = files_of(tmp_path / "out"), files_of(tmp_path / "lines")
    for name in ("o_text_document.bin", "o_text_document.idx"):
        assert texts[name] == same[name]


def test_files_are_equal_for_any_number_of_workers_and_chunk_size(
    folder: Path, corpus: Path, tmp_path: Path
) -> None:
    found = set()
    inputs = [folder / "b.txt", corpus, folder]
    for workers, chunk_bytes in ((1, None), (1, 10), (2, 1000)):
        out = tmp_path / f"{workers}-{chunk_bytes}"
        preprocess(
            inputs,
            out / "o",
            ByteTokenizer(),
            append_eod=True,
            workers=workers,
            chunk_bytes=chunk_bytes,
        )
        pair = {name: data for name, data in files_of(out).items() if not name.endswith("json")}
        found.add(tuple(sorted(pair.items())))
    assert len(found) == 1
    texts = [TEXTS["b.txt"], *read_texts([corpus]), *read_texts([folder])]
    assert list(read_texts(inputs)) == texts


def test_a_folder_may_hold_json_lines_and_other_files_are_reported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(folder / "0.jsonl", ["from lines"])
    (folder / "picture.png").write_bytes(b"\x89PNG")
    command = ["preprocess", "--input", str(folder), "--tokenizer-type", "ByteTokenizer"]
    assert main([*command, "--output-prefix", str(tmp_path / "o")]) == 0
    printed = capsys.readouterr()
    assert "6 documents (1 empty)" in printed.out
    assert printed.err == (
        f"megatron-data: warning: ignored {folder}/picture.png: not .txt, .jsonl or .parquet\n"
    )
    assert list(read_texts([folder]))[-1] == "from lines"
    train = ["train-tokenizer", "--input", str(folder), "--vocab-size", "270"]
    assert main([*train, "--output", str(tmp_path / "tokenizer")]) == 0


def test_the_manifest_has_one_digest_for_a_folder(folder: Path, tmp_path: Path) -> None:
    """It is the digest of the output of `sha256sum`, so that a user can check it."""
    prefix = preprocess([folder, folder / "b.txt"], tmp_path / "o", ByteTokenizer())[0].prefix
    whole, single = json.loads(Path(f"{prefix}.meta.json").read_text())["sources"]
    listing = subprocess.run(
        ["sha256sum", *IN_ORDER], cwd=folder, capture_output=True, check=True
    ).stdout
    assert whole == {
        "path": str(folder),
        "files": 5,
        "bytes": sum(len(text.encode()) for text in TEXTS.values()),
        "sha256": hashlib.sha256(listing).hexdigest(),
        "json_keys": ["text"],
        "max_document_bytes": 32 << 20,
    }
    assert single["sha256"] == hashlib.sha256(b"second\n").hexdigest()


def test_a_byte_order_mark_is_removed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    assert list(read_texts([tmp_path])) == ["one"]


def test_chunks_are_bounded_in_bytes_and_files(tmp_path: Path) -> None:
    names = [f"{number:04}.txt" for number in range(MOST_FILES + 3)]
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / names[-1]).write_text("x" * 100)
    source = TextFiles(str(tmp_path), [str(tmp_path / name) for name in names])
    assert [len(chunk.files) for chunk in source.chunks()] == [1000, 3]
    assert [chunk.stored for chunk in source.chunks(10)] == [0, 100]


WRONG = [
    (b"one \xe9t\xe9", r"a\.txt: byte 4, 0xe9, is not UTF-8; .* iconv -f LATIN1 -t UTF-8"),
    (b"\xef\xbb\xbfone\xff", r"a\.txt: byte 6, 0xff, is not UTF-8"),
    ("\ufeffone".encode("utf-16-le"), r"a\.txt: byte 0, 0xff, .* iconv -f UTF-16 -t UTF-8"),
    (b"", r"no document with text under 'text' in"),
]


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_of_text_files_are_reported(tmp_path: Path, workers: int) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for content, message in WRONG if workers == 1 else WRONG[:1]:
        (folder / "a.txt").write_bytes(content)
        with pytest.raises(DataError, match=message) as raised:
            preprocess([folder], tmp_path / "out" / "o", ByteTokenizer(), workers=workers)
        assert "\n" not in str(raised.value)
        assert not list((tmp_path / "out").glob("*")), "something half-written was left"


def test_inputs_that_hold_no_text_are_refused_before_any_work(tmp_path: Path) -> None:
    def refused(message: str, *inputs: Path, keys: tuple[str, ...] = ("text",)) -> None:
        with pytest.raises(DataError, match=message):
            preprocess(inputs, tmp_path / "o", ByteTokenizer(), json_keys=keys)

    refused(r"no \.txt, \.jsonl or \.parquet file in .*, which holds nothing", tmp_path)
    (tmp_path / "a.md").write_text("text")
    refused(r"no \.txt, \.jsonl or \.parquet file in .*, which holds \S*a\.md;", tmp_path)
    (tmp_path / "b.md").write_text("text")
    refused(r"which holds \S*/a\.md and 1 more; a file of JSON lines", tmp_path)
    refused(r"a\.md:1: not JSON .*plain text is read from files named \.txt", tmp_path / "a.md")
    (tmp_path / "a.txt").touch()
    refused(r"a\.txt is empty", tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("text")
    refused("a text file has one text; --json-keys text title", tmp_path, keys=("text", "title"))
