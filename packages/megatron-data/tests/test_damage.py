"""Damaged, swapped and foreign files are detected and named."""

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_data import (
    ByteTokenizer,
    DataError,
    IndexedDataset,
    IndexedDatasetBuilder,
    build_gpt_datasets,
    merge,
    preprocess,
    read_texts,
    split,
    verify,
)
from megatron_data import files as files_module
from megatron_data.cli import main
from megatron_data.datasets.builders import OrderName
from megatron_data.errors import add_path_to_errors
from megatron_data.indexed import summarize
from megatron_data.indexed.format import HEADER, MAGIC
from megatron_data.preprocessing import trace


@pytest.fixture
def made(corpus: Path, tmp_path: Path) -> str:
    return preprocess([corpus], tmp_path / "o", ByteTokenizer(), append_eod=True)[0].prefix


@pytest.fixture
def other(tmp_path: Path) -> str:
    """Returns the prefix of a dataset of another corpus."""
    path = tmp_path / "other.jsonl"
    path.write_text('{"text": "another corpus"}\n' * 5)
    return preprocess([path], tmp_path / "other", ByteTokenizer())[0].prefix


def altered(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        file.write(data)


DAMAGE: dict[str, tuple[Callable[[Path, Path, str], object], str]] = {
    "the .bin is cut": (
        lambda data, index, other: os.truncate(data, data.stat().st_size - 2),
        "one of them is truncated",
    ),
    "the .bin is longer": (
        lambda data, index, other: data.open("ab").write(b"\0\0"),
        "one of them is truncated or belongs to another",
    ),
    "the .idx is cut": (
        lambda data, index, other: os.truncate(index, 100),
        "damaged or truncated",
    ),
    "the .idx is another's": (
        lambda data, index, other: shutil.copy(f"{other}.idx", index),
        "belongs to another dataset",
    ),
    "the .idx is a .bin": (
        lambda data, index, other: shutil.copy(data, index),
        "is not the index of an indexed dataset",
    ),
    "the token type is another": (
        lambda data, index, other: altered(index, 17, b"\x04"),
        "the index describes",
    ),
    "the token type is none": (
        lambda data, index, other: altered(index, 17, b"\x63"),
        "has token type 99",
    ),
    "the token type has the same size": (
        lambda data, index, other: altered(index, 17, b"\x03"),
        r"\.idx differs from its manifest",
    ),
    "a bit of a length is flipped": (
        lambda data, index, other: altered(index, 34, b"\x00"),
        "the pointer of sequence 1 is not the sum of the lengths before it",
    ),
    "a bit of the .bin is flipped": (
        lambda data, index, other: altered(data, 1000, b"\xff"),
        r"\.bin differs from its manifest: same size, different content \(1 of ",
    ),
    "both are another's": (
        lambda data, index, other: [
            shutil.copy(f"{other}{end}", path) for end, path in ((".bin", data), (".idx", index))
        ],
        "its manifest has",
    ),
    "the manifest is cut": (
        lambda data, index, other: os.truncate(f"{str(data)[:-4]}.meta.json", 300),
        r"meta\.json is not JSON",
    ),
    "the manifest is another's": (
        lambda data, index, other: shutil.copy(f"{other}.meta.json", f"{str(data)[:-4]}.meta.json"),
        "its manifest has",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_named_in_one_line(
    name: str, made: str, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = DAMAGE[name]
    verify(made)
    damage(Path(f"{made}.bin"), Path(f"{made}.idx"), other)
    with pytest.raises(DataError, match=message) as raised:
        verify(made)
    assert "\n" not in str(raised.value)
    assert main(["verify", made]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def parts_of(content: object, place: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Returns the path of every value of a JSON document, except inside long lists."""
    found = [place] if place else []
    if isinstance(content, dict):
        for key, value in content.items():
            found += parts_of(value, (*place, key))
    elif isinstance(content, list) and content:
        found += parts_of(content[0], (*place, 0))
    return found


@pytest.mark.parametrize("what", ["missing", "another kind"])
def test_every_fault_of_a_manifest_is_reported_in_one_line(
    what: str, made: str, tmp_path: Path
) -> None:
    path = Path(f"{made}.meta.json")
    whole = json.loads(path.read_text())
    places = parts_of(whole)
    assert len(places) > 40
    uses: tuple[Callable[[str], object], ...] = (
        verify,
        lambda prefix: trace(prefix, 5),
        lambda prefix: merge([prefix], tmp_path / "merged"),
    )
    refused = 0
    for place in places:
        content = inner = json.loads(json.dumps(whole))
        for key in place[:-1]:
            inner = inner[key]
        if what == "missing":
            del inner[place[-1]]
        else:
            inner[place[-1]] = [[None]] if isinstance(inner[place[-1]], dict) else {"x": None}
        path.write_text(json.dumps(content))
        for use in uses:
            try:
                use(made)
            except DataError as error:
                assert "\n" not in str(error)
                refused += 1
    assert refused > 15


def header(code: int, sequences: int, bounds: int) -> bytes:
    return HEADER.pack(MAGIC, 1, code, sequences, bounds)


@settings(max_examples=300, deadline=None)
@given(
    code=st.integers(0, 255),
    sequences=st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1)),
    bounds=st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1)),
    numbers=st.lists(st.one_of(st.integers(-9, 9), st.integers(-(2**31), 2**31 - 1)), max_size=40),
    cut=st.integers(0, 3),
    tokens=st.binary(max_size=24),
)
def test_no_index_crashes_the_reader(
    code: int,
    sequences: int,
    bounds: int,
    numbers: list[int],
    cut: int,
    tokens: bytes,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Any header and content is either refused or read within the .bin."""
    folder = tmp_path_factory.mktemp("fuzz", numbered=True)
    body = struct.pack(f"<{len(numbers)}i", *numbers)
    (folder / "d.idx").write_bytes((header(code, sequences, bounds) + body)[: -cut or None])
    (folder / "d.bin").write_bytes(tokens)
    try:
        with IndexedDataset(folder / "d") as dataset:
            for number in range(len(dataset)):
                dataset.get(number).sum()
            for number in range(dataset.num_documents):
                dataset.document(number).sum()
            dataset.check()
    except (DataError, IndexError):
        pass
    finally:
        shutil.rmtree(folder)


def test_an_error_on_a_full_disk_names_the_file(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After a failure of any write, no partial output exists, and a later run succeeds."""
    wanted = tmp_path / "wanted"
    preprocess([corpus], wanted / "o", ByteTokenizer())
    whole = {path.name: path.read_bytes() for path in wanted.iterdir()}
    write = files_module.AtomicFile.write
    command = ["preprocess", "--input", str(corpus), "--tokenizer-type", "ByteTokenizer"]
    for failing in range(12):
        left = [failing]

        def full(self: files_module.AtomicFile, data: object, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                with add_path_to_errors(self.path):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(self, data)  # type: ignore[arg-type]

        monkeypatch.setattr(files_module.AtomicFile, "write", full)
        folder = tmp_path / f"{failing}"
        status = main([*command, "--output-prefix", str(folder / "o")])
        monkeypatch.setattr(files_module.AtomicFile, "write", write)
        error = capsys.readouterr().err
        if status == 0:
            assert failing > 5
            break
        assert status == 1 and error.count("\n") == 1
        assert error.endswith(f": {os.strerror(errno.ENOSPC)}\n") and str(folder) in error
        for path in folder.glob("o_*"):
            assert path.read_bytes() == whole[path.name]
        assert main([*command, "--output-prefix", str(folder / "o")]) == 0
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
        capsys.readouterr()
    else:
        pytest.fail("more writes than were tried")


def test_missing_tokens_are_never_invented(tmp_path: Path) -> None:
    """Megatron returns uninitialised memory for the missing part of a .bin."""
    with IndexedDatasetBuilder(tmp_path / "d", "uint16") as builder:
        builder.add_document(np.arange(100), [50, 50])
        builder.finalize()
    os.truncate(tmp_path / "d.bin", 150)
    with pytest.raises(DataError, match=r"describes 200 bytes, but the \.bin has 150"):
        IndexedDataset(tmp_path / "d")


@pytest.mark.parametrize("order", ["stateless", "packed", "compat"])
@pytest.mark.parametrize("what", ["length", "two lengths", "pointer", "document"])
def test_training_refuses_an_index_that_is_damaged_in_its_middle(
    what: str, order: OrderName, write_dataset: Callable[..., str]
) -> None:
    prefix = write_dataset([[number] * 9 for number in range(100)])
    lengths, pointers = HEADER.size, HEADER.size + 4 * 100
    bounds = pointers + 8 * 100
    place, data, message = {
        "length": (
            lengths + 4 * 50,
            struct.pack("<i", -9),
            r"sequence 50 has length -9 \(docu",
        ),
        "two lengths": (
            lengths + 4 * 50,
            struct.pack("<2i", 8, 10),
            r"the pointer of sequence 51 is not the sum of .* \(document 51\)",
        ),
        "pointer": (pointers + 8 * 50, struct.pack("<q", 0), r"the pointer of sequence 50 is not"),
        "document": (bounds + 8 * 50, struct.pack("<q", 99), "document 50 ends before it begins"),
    }[what]
    altered(Path(f"{prefix}.idx"), place, data)
    IndexedDataset(prefix)  # reads only the ends of the index
    with pytest.raises(DataError, match=rf"d\.idx is damaged: {message}.*; copy it again"):
        build_gpt_datasets(prefix, "1,0,0", (20, 0, 0), 16, order=order)


def test_flipped_bits_of_parquet_are_found_by_page_checksums(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No damaged page is read. Files without checksums are named in a warning and the manifest."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"text": [f"text {number} of many" for number in range(900)]})
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path, row_group_size=300, write_page_checksum=True)
    whole, metadata = path.read_bytes(), parquet.read_metadata(path)
    wanted, found = list(read_texts([path])), 0
    random = np.random.default_rng(0)
    for group in range(3):
        column = metadata.row_group(group).column(0)
        begin, size = column.dictionary_page_offset, column.total_compressed_size
        for place in random.integers(begin + 40, begin + size, 20).tolist():
            damaged = bytearray(whole)
            damaged[place] ^= 1 << int(random.integers(8))
            path.write_bytes(damaged)
            try:
                texts = list(read_texts([path]))
            except DataError as error:
                found += 1
                assert f"a.parquet, row 1: row group {group} is damaged" in str(error)
                assert "\n" not in str(error)
            else:  # in the header of a page
                assert texts == wanted
    assert found > 50
    made = []
    for checksums in (True, False):
        parquet.write_table(table, path, write_page_checksum=checksums)
        assert list(read_texts([path])) == wanted
        (dataset,) = preprocess([path], tmp_path / f"o{checksums}", ByteTokenizer())
        manifest = json.loads(Path(f"{dataset.prefix}.meta.json").read_text())
        assert manifest["sources"][0]["page_checksums"] is checksums
        made.append([line for line in caplog.messages if "no page checksums" in line])
    assert made[0] == []
    assert len(made[1]) == 1 and made[1][0].startswith(f"{path}: no page checksums")


def test_a_damaged_index_is_not_copied_or_summarized(
    write_dataset: Callable[..., str], tmp_path: Path
) -> None:
    """All of the index is checked, although the constructor reads its ends alone."""
    prefix = write_dataset([[number] * 9 for number in range(10)])
    altered(Path(f"{prefix}.idx"), HEADER.size + 4 * 5, struct.pack("<2i", 8, 10))
    before = sorted(tmp_path.iterdir())
    for use in (
        lambda: merge([prefix], tmp_path / "m"),
        lambda: split(prefix, [tmp_path / "a", tmp_path / "b"], documents=(5, 5)),
        lambda: summarize(IndexedDataset(prefix)),
    ):
        with pytest.raises(DataError, match=r"the pointer of sequence 6 is not the sum"):
            use()
        assert sorted(tmp_path.iterdir()) == before


def test_a_dataset_without_a_manifest_replaces_one_with_a_manifest(
    made: str, write_dataset: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = write_dataset([[1], [2]], "plain")
    for name in "mab":
        merge([made], tmp_path / name)
    assert len(list(tmp_path.glob("[mab].meta.json"))) == 3
    merge([plain, plain], tmp_path / "m")
    assert caplog.messages == [f"{plain} has no manifest, so none is written for {tmp_path / 'm'}"]
    split(plain, [tmp_path / "a", tmp_path / "b"], documents=(1, 1))
    assert not list(tmp_path.glob("[mab].meta.json"))
    for name, documents in (("m", 4), ("a", 1), ("b", 1)):
        assert verify(tmp_path / name).counts.documents == documents
