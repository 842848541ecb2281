"""Tests that compressed files, Parquet, patterns and URLs give the documents of a plain file."""

import bz2
import errno
import gzip
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_data import ByteTokenizer, DataError, preprocess, read_texts
from megatron_data.sources.json_lines import JsonLines, LinesChunk
from megatron_data.sources.opening import open_sources
from megatron_data.sources.parquet import Parquet, RowsChunk
from megatron_data.sources.parquet_checksums import has_page_checksums
from megatron_data.sources.protocol import BrokenChunk, Fault, Span
from megatron_data.sources.streams import Stream

zstandard = pytest.importorskip("zstandard")
pyarrow = pytest.importorskip("pyarrow")
fsspec = pytest.importorskip("fsspec")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = [f"Document {number}, naïve 日本.\n" * (number % 7) for number in range(60)]
LINES = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXTS).encode()


def zstd(data: bytes) -> bytes:
    """Compresses data as two frames."""
    half = len(data) // 2
    return b"".join(zstandard.compress(part) for part in (data[:half], data[half:]))


PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data[:100]) + gzip.compress(data[100:]),
    ".bz2": lambda data: bz2.compress(data[:100]) + bz2.compress(data[100:]),
    ".zst": zstd,
}


def write_table(path: Path, texts: Sequence[object], **options: Any) -> Path:
    table = pyarrow.table({"id": range(len(texts)), "text": texts})
    parquet.write_table(table, path, **options)
    return path


def tokens_of(path: str | Path, output: Path, **options: Any) -> bytes:
    (made,) = preprocess([path], output, ByteTokenizer(), append_eod=True, **options)
    return Path(f"{made.prefix}.bin").read_bytes() + Path(f"{made.prefix}.idx").read_bytes()


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain.jsonl"
    path.write_bytes(LINES)
    return path


@pytest.mark.parametrize("suffix", PACK)
def test_compressed_files_give_the_documents_of_the_plain_file(
    suffix: str, plain: Path, tmp_path: Path
) -> None:
    packed = tmp_path / f"a.jsonl{suffix}"
    packed.write_bytes(PACK[suffix](LINES))
    wanted = tokens_of(plain, tmp_path / "plain")
    assert tokens_of(packed, tmp_path / "packed", chunk_bytes=1000) == wanted
    manifest = json.loads((tmp_path / "packed_text_document.meta.json").read_text())
    (source,) = manifest["sources"]
    assert source["bytes"] == packed.stat().st_size
    assert source["lines"] == 60
    text = tmp_path / f"a.txt{suffix}"
    text.write_bytes(PACK[suffix](b"one document\n" * 100))
    assert list(read_texts([text])) == ["one document\n" * 100]
    source_of_lines = JsonLines(str(packed))
    for chunk in list(source_of_lines.chunks(1000)):
        assert isinstance(chunk, LinesChunk)
        assert source_of_lines.chunk_at(chunk.span).data == chunk.data


def test_rows_of_parquet_are_the_documents(plain: Path, tmp_path: Path) -> None:
    table = write_table(tmp_path / "a.parquet", TEXTS, row_group_size=7)
    wanted = tokens_of(plain, tmp_path / "plain")
    assert tokens_of(table, tmp_path / "rows", chunk_bytes=500) == wanted
    assert tokens_of(table, tmp_path / "two", chunk_bytes=500, workers=2) == wanted
    source = Parquet(str(table), ("text",))
    chunks = list(source.chunks(500))
    assert len(chunks) > 5
    for chunk in chunks:
        assert isinstance(chunk, RowsChunk)
        assert source.chunk_at(chunk.span).digest == chunk.digest
    lists = write_table(tmp_path / "lists.parquet", [["a", "b"], ["c"]])
    assert list(read_texts([lists])) == ["a", "b", "c"]


def test_errors_of_tables_are_reported(plain: Path, tmp_path: Path) -> None:
    table = write_table(tmp_path / "a.parquet", ["a", None, "c"])
    with pytest.raises(DataError, match=r"a\.parquet, row 2: 'text' holds null"):
        tokens_of(table, tmp_path / "o")
    with pytest.raises(
        DataError, match=r"a\.parquet, row 1: no column 'body' \(columns here: 'id'"
    ):
        list(read_texts([table], "body"))
    whole = write_table(tmp_path / "b.parquet", TEXTS * 50, row_group_size=500).read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"b\.parquet, row 1: it is not a Parquet file, or damaged"):
        tokens_of(tmp_path / "b.parquet", tmp_path / "o")
    plain.rename(tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"c\.parquet, row 1: it is not a Parquet file") as raised:
        tokens_of(tmp_path / "c.parquet", tmp_path / "o")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("suffix", PACK)
def test_a_truncated_file_gives_its_complete_lines_and_a_fault(suffix: str, tmp_path: Path) -> None:
    lines = b"".join(b'{"text": "%d"}\n' % (number * 7919 % 10_007) for number in range(20_000))
    packed = tmp_path / f"a.jsonl{suffix}"
    whole = PACK[suffix](lines)
    packed.write_bytes(whole[: len(whole) * 3 // 4])
    chunks = list(JsonLines(str(packed)).chunks(10_000))
    good, last = chunks[:-1], chunks[-1]
    data = b"".join(chunk.data for chunk in good if isinstance(chunk, LinesChunk))
    # bzip2 returns no data of an incomplete block
    assert lines.startswith(data) and data.endswith(b"\n") and (data or suffix == ".bz2")
    assert isinstance(last, BrokenChunk)
    fault = last.problem
    assert (last.span, last.stored) == ((len(data), 0, data.count(b"\n") + 1, 1), 0)
    assert (fault.offset, fault.number) == (len(data), data.count(b"\n") + 1)
    assert "damaged or truncated" in str(fault) and str(fault).startswith(
        f"{packed}:{fault.number}"
    )


def test_flipped_bits_in_a_compressed_file_are_reported(tmp_path: Path) -> None:
    for suffix, pack in PACK.items():
        data = bytearray(pack(LINES * 30))
        data[len(data) // 2] ^= 0xFF
        packed = tmp_path / f"a.jsonl{suffix}"
        packed.write_bytes(data)
        with pytest.raises(DataError, match=r"a\.jsonl.*:\d+: ") as raised:
            tokens_of(packed, tmp_path / "o")
        assert "\n" not in str(raised.value)


def test_zstandard_frames_of_every_form_are_decompressed_in_few_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames with and without checksum, size and content, small blocks, and skippable frames."""
    random = np.random.default_rng(0)
    texts = [random.integers(97, 123, size, np.uint8).tobytes() for size in (1, 300, 400_000, 9)]
    texts += [b"", b"y" * 3_000_000]
    frames = [b"\x5a\x2a\x4d\x18" + (700_000).to_bytes(4, "little") + bytes(700_000)]
    for number, text in enumerate(texts):
        compressor = zstandard.ZstdCompressor(
            write_checksum=number % 2 == 0, write_content_size=number % 3 == 0
        )
        frames.append(compressor.compress(text))
    stream = zstandard.ZstdCompressor().compressobj()
    for _ in range(40):
        frames.append(stream.compress(b"z" * 50) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    frames.append(stream.flush())
    path = tmp_path / "a.zst"
    path.write_bytes(b"".join(frames))
    steps: list[int] = []

    class Counting:
        def decompressobj(self) -> "Counting":
            self._inner = zstd_decompressor().decompressobj()
            return self

        def decompress(self, data: bytes) -> bytes:
            steps.append(len(data))
            return bytes(self._inner.decompress(data))

    zstd_decompressor = zstandard.ZstdDecompressor
    monkeypatch.setattr(zstandard, "ZstdDecompressor", Counting)
    with Stream(str(path)) as opened:
        assert opened.read(1 << 30) == b"".join(texts) + b"z" * 2000
        assert opened.damage is None
    packed = sum(steps)
    assert packed == path.stat().st_size - 700_008
    assert len(steps) < 40, "a header and some blocks at once, not 512 bytes"
    for cut in (path.stat().st_size - 2, 3, 700_008 + 2):
        (tmp_path / "b.zst").write_bytes(path.read_bytes()[:cut])
        with Stream(str(tmp_path / "b.zst")) as opened:
            while opened.read(1 << 20):
                pass
            assert "the last frame is incomplete" in str(opened.damage)


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        (b"\x28\xb5", "the last frame is incomplete"),
        (b"\x28\xb5\x2f\xfe" + bytes(20), "a frame of zstandard is expected"),
        (b"\x60\x2a\x4d\x18" + bytes(20), "a frame of zstandard is expected"),  # 16 are skippable
        (b"\x5f\x2a\x4d\x18\x04\0\0\0abc", "the last frame is incomplete"),
        (b"\x5f\x2a\x4d\x18\x03\0\0\0abc\x28", "the last frame is incomplete"),
        (b"\x28\xb5\x2f\xfd\x00\x58" + (131_073 << 3 | 1).to_bytes(3, "little") + bytes(140_000),
         "a block has 131,073 bytes, more than zstandard allows"),
    ],
)  # fmt: skip
def test_what_follows_a_frame_of_zstandard_may_be_damaged(
    rest: bytes, reason: str, tmp_path: Path
) -> None:
    """Magic numbers and the largest block are those of RFC 8878."""
    (tmp_path / "a.zst").write_bytes(zstandard.compress(b"text") + rest)
    with Stream(str(tmp_path / "a.zst")) as opened:
        assert opened.read(4) == b"text"
        assert opened.read(1) == b"" and opened.ended
        assert opened.damage == (
            f"it is damaged or truncated ({reason}), the rest is lost; copy it again"
        )


@pytest.mark.parametrize("flag", range(4), ids=lambda flag: f"size in {(1, 2, 4, 8)[flag]} bytes")
def test_the_header_of_a_frame_has_fields_of_several_sizes(tmp_path: Path, flag: int) -> None:
    """RFC 8878, section 3.1.1.1: descriptor, window, id of a dictionary (0: none), size."""
    text = bytes(range(200)) * (1 if flag == 0 else 2)
    for single in (0, 1):
        for dictionary in range(4):
            size = len(text).to_bytes(9, "little")[: (single, 2, 4, 8)[flag]]
            if flag == 1:  # stored less 256
                size = (len(text) - 256).to_bytes(2, "little")
            frame = b"".join([
                b"\x28\xb5\x2f\xfd",
                bytes([flag << 6 | single << 5 | dictionary]),
                b"" if single else b"\x00",
                bytes((0, 1, 2, 4)[dictionary]),
                size,
                (len(text) << 3 | 1).to_bytes(3, "little") + text,  # the only block, uncompressed
            ])  # fmt: skip
            path = tmp_path / "a.zst"
            path.write_bytes(frame * 2)
            with Stream(str(path)) as stream:
                assert stream.read(1 << 20) == text * 2
                assert stream.damage is None


def test_folders_include_compressed_files(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "all"
    folder.mkdir()
    (folder / "b.txt.gz").write_bytes(gzip.compress(b"text"))
    (folder / "c.JSONL.zst").write_bytes(zstd(b'{"text": "lines"}'))
    write_table(folder / "a.parquet", ["rows"])
    (folder / "a.txt").write_text("first")
    assert list(read_texts([folder])) == ["first", "text", "rows", "lines"]


def test_patterns_stand_for_what_they_match_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/c.txt", "odd[1].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(read_texts([tmp_path / "?.txt"])) == ["a.txt", "b.txt"]
    assert list(read_texts([tmp_path / "**" / "c.txt"])) == ["deep/c.txt"]
    assert list(read_texts([tmp_path / "odd[1].txt"])) == ["odd[1].txt"], "a name before a pattern"
    with pytest.raises(DataError, match=r"no file matches .*\*\.jsonl"):
        open_sources([tmp_path / "*.jsonl"], ("text",))


def test_urls_are_read_through_fsspec(plain: Path, tmp_path: Path) -> None:
    wanted = tokens_of(plain, tmp_path / "plain")
    assert tokens_of(f"file://{plain}", tmp_path / "file") == wanted
    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/deep/b.jsonl.gz", gzip.compress(LINES))
    memory.pipe("/corpus/a.txt", b"a text")
    memory.pipe("/corpus/.hidden/x.txt", b"never read")
    try:
        url = "memory://corpus/deep/b.jsonl.gz"
        assert tokens_of(url, tmp_path / "memory", chunk_bytes=1000) == wanted
        assert list(read_texts(["memory://corpus"])) == ["a text", *TEXTS]
        assert list(read_texts(["memory://corpus/*.txt"])) == ["a text"]
        with pytest.raises(DataError, match="no input file or folder at memory://corpus/none"):
            open_sources(["memory://corpus/none"], ("text",))
        with pytest.raises(DataError, match=r"^'nope://x': the scheme 'nope' is not supp"):
            open_sources(["nope://x"], ("text",))
    finally:
        memory.rm("/corpus", recursive=True)


@pytest.mark.parametrize(
    ("module", "name", "extra"),
    [
        ("zstandard", "a.jsonl.zst", "zstd"),
        ("pyarrow", "a.parquet", "parquet"),
        ("fsspec", "memory://a.jsonl", "remote"),
    ],
)
def test_a_missing_extra_is_named(
    module: str, name: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = name if "://" in name else str(tmp_path / name)
    if "://" not in name:
        Path(path).write_bytes(b"content")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=rf"megatron-data\[{extra}\]") as raised:
        preprocess([path], tmp_path / "o", ByteTokenizer())
    assert "\n" not in str(raised.value) and str(raised.value).startswith(f"{path}: a ")
    if extra != "zstd":  # before any work
        with pytest.raises(DataError, match=rf"megatron-data\[{extra}\]"):
            open_sources([path], ("text",))


@pytest.mark.parametrize("chunk_bytes", [1, 200, 1000, 1 << 20])
def test_rows_are_divided_by_the_uncompressed_size_in_the_metadata(
    tmp_path: Path, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "a.parquet", TEXTS, row_group_size=25)
    metadata = parquet.read_metadata(path)
    unpacked = sum(metadata.row_group(number).total_byte_size for number in range(3))
    source = Parquet(str(path), ("text",))
    chunks = list(source.chunks(chunk_bytes))
    units = [chunk.span.units for chunk in chunks]
    assert units[0] == min(max(chunk_bytes * 60 // unpacked, 1), 60)
    assert sum(units) == 60 and max(units) == units[0]
    assert [chunk.span.first for chunk in chunks] == [1 + sum(units[:n]) for n in range(len(units))]
    assert [chunk.stored for chunk in chunks] == [source.size * count // 60 for count in units]
    monkeypatch.setattr("megatron_data.sources.parquet._REREAD_ROWS", 4)
    for first, count in ((1, 60), (1, 4), (4, 1), (4, 2), (5, 4), (7, 11), (60, 1)):
        again = source.chunk_at(Span(0, 0, first, count))
        assert again.table.column("text").to_pylist() == TEXTS[first - 1 : first - 1 + count]
        assert (again.span, again.stored) == ((0, 0, first, count), 0)
    with pytest.raises(DataError, match="has 60 rows, fewer than before; it was changed"):
        source.chunk_at(Span(0, 0, 60, 2))


def test_the_size_of_a_row_is_that_of_its_texts_or_of_its_json(tmp_path: Path) -> None:
    table = pyarrow.table({"a": ["xé", "y"], "b": [["p", "q"], ["r"]], "c": [None, 7]})
    parquet.write_table(table, tmp_path / "a.parquet")
    (chunk,) = Parquet(str(tmp_path / "a.parquet"), ("a", "b", "c")).chunks()
    one, two = chunk.items(["a", "b"], 5)  # "é" has two bytes
    assert (one.number, one.offset, one.size, one.texts) == (1, None, 5, [["xé"], ["p", "q"]])
    assert (two.number, two.size) == (2, 2)
    fault, two = chunk.items(["a", "b"], 4)
    assert fault[2:] == (
        "a document of 5 bytes, more than --max-document-bytes 4",
        *(str(tmp_path / "a.parquet"), 1, None, None),
    )
    size = len('{"a":"xé","b":["p","q"]}'.encode())
    row, other = chunk.rows(size)
    assert (row.values, row.size, row.number) == ({"a": "xé", "b": ["p", "q"]}, size, 1)
    assert other.values == {"a": "y", "b": ["r"], "c": 7}
    fault, _ = chunk.rows(size - 1)
    assert (fault.location, fault.size) == (f"{tmp_path / 'a.parquet'}, row 1", size)


def test_a_text_that_is_not_utf8_is_a_fault_of_its_row(tmp_path: Path) -> None:
    path, digests = tmp_path / "a.parquet", set()
    for wrong in (b"\xfe", b"\xff"):
        texts = pyarrow.array([b"a", b"xy" + wrong, b"c"]).view(pyarrow.string())
        parquet.write_table(pyarrow.table({"text": texts}), path)
        (chunk,) = Parquet(str(path), ("text",)).chunks()
        digests.add(chunk.digest)
    reason = "byte 2 of a text, 0xff, is not UTF-8; convert the column, or declare it as binary"
    fault = Fault(f"{path}, row 2", "encoding", reason, str(path), 2, None, None)
    one, found, three = chunk.items(["text"])
    assert (one.number, one.texts, found) == (1, [["a"]], fault)
    assert (three.number, three.texts) == (3, [["c"]])
    first, again, third = chunk.rows()
    assert (first.values, again, third.values) == ({"text": "a"}, fault, {"text": "c"})
    assert (first.number, third.number, len(digests)) == (1, 3, 2)


@pytest.mark.parametrize(("module", "name"), [("streams", "a.jsonl.gz"), ("parquet", "a.parquet")])
def test_an_error_of_the_disk_is_no_damage_of_the_file(
    module: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise error

    path = write_table(tmp_path / name, ["a"])
    source = Parquet(str(path), ("text",)) if module == "parquet" else JsonLines(str(path))
    monkeypatch.setattr(
        f"megatron_data.sources.{module}.open_file", lambda path: Broken(Path(path).read_bytes())
    )
    error = OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="Input/output error"):
        list(source.chunks())
    if module == "parquet":  # pyarrow raises such an error for the content
        error = OSError("Couldn't deserialize thrift")
        (chunk,) = source.chunks()
        assert isinstance(chunk, BrokenChunk) and chunk.problem.kind == "damaged"


def test_page_checksums_are_those_of_the_columns_that_are_read(tmp_path: Path) -> None:
    found = {}
    for checksums in (True, False):
        path = write_table(tmp_path / "a.parquet", TEXTS * 30, write_page_checksum=checksums)
        with path.open("rb") as file:
            file.seek(7)
            found[checksums] = has_page_checksums(file, parquet.read_metadata(path), ["id", "text"])
            assert file.tell() == 7
            assert has_page_checksums(file, parquet.read_metadata(path), ["none"])
    assert found == {True: True, False: False}
    tables = [pyarrow.table({"text": pyarrow.array(texts, "string")}) for texts in ([], ["a"])]
    for number in (1, 2):  # an empty row group alone, and before one with a row
        path = tmp_path / f"{number}.parquet"
        with parquet.ParquetWriter(path, tables[0].schema) as writer:
            for table in tables[:number]:
                writer.write_table(table)
        metadata = parquet.read_metadata(path)
        assert (metadata.num_row_groups, metadata.num_rows) == (number, number - 1)
        with path.open("rb") as file:
            assert has_page_checksums(file, metadata, ["text"]) is (number == 1)
