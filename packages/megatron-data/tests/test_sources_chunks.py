"""Chunks of sources: what each holds, what it is called, and that it can be read again."""

import bz2
import gzip
import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron_data import DataError, read_texts
from megatron_data.sources import parallel_lines, protocol, remote
from megatron_data.sources.failures import MissingError, TransferError, storage_errors
from megatron_data.sources.json_lines import JsonLines, LinesChunk
from megatron_data.sources.opening import open_sources, reopen
from megatron_data.sources.parallel_lines import ParallelLines
from megatron_data.sources.protocol import BrokenChunk, Fault, Item, Span, check_reread
from megatron_data.sources.remote import RemoteFile, read_blocks, read_if_there
from megatron_data.sources.storage import stat
from megatron_data.sources.streams import Stream
from megatron_data.sources.text_files import TextFile, TextFiles

LINES = [b'{"text": "%d"}' % (10 + number) for number in range(7)]  # 14 bytes each


def write(path: Path, data: bytes) -> str:
    packed = {".gz": gzip.compress, ".bz2": bz2.compress}.get(path.suffix, bytes)
    path.write_bytes(packed(data))
    return str(path)


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2"])
@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize(
    ("chunk_bytes", "lines"),
    [(14, [1, 6]), (15, [1] * 7), (44, [2, 2, 2, 1]), (45, [3, 3, 1]), (1000, [7])],
)
def test_chunks_of_lines_are_complete_and_can_be_read_again(
    tmp_path: Path, suffix: str, end: bytes, chunk_bytes: int, lines: list[int]
) -> None:
    data = b"\n".join(LINES) + end
    path = write(tmp_path / f"a.jsonl{suffix}", data)
    source = JsonLines(path)
    chunks = list(source.chunks(chunk_bytes))
    assert all(isinstance(chunk, LinesChunk) for chunk in chunks)
    assert b"".join(chunk.data for chunk in chunks) == data
    # Data that is read to the end of a longer line belongs to the next chunk.
    assert [chunk.lines for chunk in chunks] == lines
    first, offset = 1, 0
    for chunk in chunks:
        assert chunk.span == (offset, len(chunk.data), first, chunk.lines)
        assert source.chunk_at(chunk.span).data == chunk.data
        assert chunk.digest == hashlib.sha256(chunk.data).hexdigest()
        items = list(chunk.items(["text"]))
        assert [item.number for item in items] == list(range(first, first + chunk.lines))
        assert [item.offset for item in items] == [
            offset + 15 * number for number in range(chunk.lines)
        ]
        assert {item.size for item in items} == {14}
        first, offset = first + chunk.lines, offset + len(chunk.data)
    stored = Path(path).stat().st_size
    assert sum(chunk.stored for chunk in chunks) == stored == source.size
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    assert source.record() == {"path": path, "bytes": stored, "lines": 7, "sha256": digest}


def test_blank_lines_count_but_hold_no_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'\n \t\n{"text": "a"}\n\r\n{"text": ["b", "c"]}\n')
    (chunk,) = JsonLines(path).chunks()
    assert chunk.span.units == 5
    one, two = chunk.items(["text"])
    assert (one.number, one.offset, one.size, one.texts) == (3, 4, 13, [["a"]])
    assert (two.number, two.offset, two.size, two.texts) == (5, 20, 20, [["b", "c"]])
    assert [row.values for row in chunk.rows()] == [{"text": "a"}, {"text": ["b", "c"]}]


@pytest.mark.parametrize(
    ("line", "kind", "reason"),
    [
        (b"[1]", "json", "a list, not an object"),
        (b"null", "json", "null, not an object"),
        (b"true", "json", "a boolean, not an object"),
        (b"1.5", "json", "a number, not an object"),
        (b'"a"', "json", "a string, not an object"),
        (b"{", "json", "column 2)"),
        (b"x" * 50, "json", ": " + "x" * 40),
        (b"\xff", "encoding", "byte 0 of the line, 0xff, is not UTF-8; convert the file"),
        (b'{"b": 1}', "key", "no key 'text' (keys here: 'b')"),
        (b"{}", "key", "no key 'text' (keys here: none)"),
        (b'{"text": 1}', "type", "'text' holds a number, not a string"),
        (b'{"text": {}}', "type", "'text' holds an object, not a string"),
        (b'{"text": [1]}', "type", "'text' holds a list of other values"),
        (b'{"text": ["a", 1]}', "type", "'text' holds a list of other values"),
    ],
)
def test_a_line_that_is_no_document_is_a_fault_with_its_location(
    tmp_path: Path, line: bytes, kind: str, reason: str
) -> None:
    path = write(tmp_path / "a.jsonl", LINES[0] + b"\n" + line + b"\n" + LINES[1])
    (chunk,) = JsonLines(path).chunks()
    good, fault, again = chunk.items(["text"])
    assert isinstance(good, Item) and isinstance(again, Item) and isinstance(fault, Fault)
    assert fault[3:] == (path, 2, 15, len(line))
    assert (fault.location, fault.kind) == (f"{path}:2", kind)
    assert reason in fault.reason and not fault.reason.endswith("x" * 41)


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("chunk_bytes", [4, 1000])
def test_a_line_of_the_largest_size_is_read_and_a_longer_one_is_a_fault(
    tmp_path: Path, chunk_bytes: int, end: bytes
) -> None:
    for first, fits in ((b'{"text": "x"}', True), (b'{"text": "xy"}', False)):
        path = write(tmp_path / "a.jsonl", first + b'\n{"text": "z"}' + end)
        chunks = list(JsonLines(path).chunks(chunk_bytes, max_bytes=13))
        one, two = (item for chunk in chunks for item in chunk.items(["text"], 13))
        assert isinstance(two, Item) and (two.number, two.offset) == (2, len(first) + 1)
        assert isinstance(one, Item) == fits
        if isinstance(one, Fault):
            # The size of a line that is not kept includes its line end.
            size = 15 if chunk_bytes == 4 else 14
            assert one[3:] == (path, 1, 0, size)
            assert chunks[0].span[2:] == ((1, 1) if chunk_bytes == 4 else (1, 2))
            assert chunks[0].span[:2] == (0, size if chunk_bytes == 4 else 28 + len(end))
            reason = f"a document of {size} bytes, more than --max-document-bytes 13"
            assert (one.kind, one.reason) == ("long", reason)


@pytest.mark.parametrize(("limit", "reads"), [(None, True), (20, True), (14, True), (13, False)])
def test_the_only_line_of_a_file_may_have_no_end(
    tmp_path: Path, limit: int | None, reads: bool
) -> None:
    path = write(tmp_path / "a.jsonl", LINES[0])
    (chunk,) = JsonLines(path).chunks(5, limit)
    (found,) = chunk.items(["text"], limit)
    assert isinstance(found, Item if reads else Fault) and found.size == 14
    assert chunk.span == (0, 14, 1, 1)


def test_a_long_line_that_ends_in_damage_is_lost(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", b'{"text": "%s"}' % bytes(range(97, 123)) * 99)
    os.truncate(path, Path(path).stat().st_size - 9)
    (chunk,) = JsonLines(path).chunks(10)
    assert isinstance(chunk, BrokenChunk) and chunk.span == (0, 0, 1, 1)
    assert (chunk.problem.kind, chunk.problem.size) == ("damaged", None)


def test_a_chunk_that_ends_early_when_it_is_read_again_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b"\n".join(LINES))
    source = JsonLines(path)
    (chunk,) = source.chunks()
    write(tmp_path / "a.jsonl", b"\n".join(LINES)[:-1])
    with pytest.raises(DataError, match=r"a\.jsonl ends before byte 104"):
        source.chunk_at(chunk.span)


def test_chunks_are_read_again_up_to_16_mebibytes_and_a_document() -> None:
    check_reread((16 << 20) + 100, 100)
    check_reread(1 << 40, None)
    with pytest.raises(DataError, match="a chunk of 16,777,317 bytes or more, but documents have"):
        check_reread((16 << 20) + 101, 100)


@pytest.mark.parametrize("kind", ["lines", "text files", "parallel lines"])
def test_every_source_reads_a_chunk_again_up_to_that_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(protocol, "LARGEST_CHUNK", 18)
    paths = [write(tmp_path / name, b"{}      \n" * 3) for name in ("a.txt", "b.txt", "c.txt")]
    source: Any = {
        "lines": JsonLines(paths[0]),
        "text files": TextFiles(str(tmp_path), [write(tmp_path / "d", b"x" * 9)] * 3),
        "parallel lines": ParallelLines(paths[:2]),
    }[kind]
    (chunk,) = source.chunks()
    assert source.chunk_at(chunk.span, 9).digest == chunk.digest
    monkeypatch.setattr(protocol, "LARGEST_CHUNK", 17)
    with pytest.raises(DataError, match="a chunk of 27 bytes or more, but documents have at most"):
        source.chunk_at(chunk.span, 9)


def test_a_broken_chunk_is_one_fault() -> None:
    fault = Fault("a:1", "damaged", "why", "a", 1)
    chunk = BrokenChunk(fault, 0, SimpleNamespace())
    assert list(chunk.items([], None)) == list(chunk.rows(None)) == [fault]
    assert chunk.fault(Item(1, None, 0, []), "json", "x") == fault
    assert chunk.digest == ""


# -- parallel lines ---------------------------------------------------------------------------


@pytest.mark.parametrize(("chunk_bytes", "lines"), [(1, [1] * 4), (8, [1, 1, 2]), (1000, [4])])
@pytest.mark.parametrize("end", ["", "\n"])
def test_chunks_of_parallel_files_hold_the_same_lines(
    tmp_path: Path, chunk_bytes: int, lines: list[int], end: str
) -> None:
    texts = (["\ufeffone", "\ufefftwo", "", "four"], ["eins\r", "zwei", "drei", "v\r\r"])
    paths = [
        write(tmp_path / name, ("\n".join(each) + end).encode())
        for name, each in zip(("a", "b.gz"), texts, strict=True)
    ]
    source = ParallelLines(paths)
    chunks = list(source.chunks(chunk_bytes))
    items = [item for chunk in chunks for item in chunk.items(["a", "b"])]
    assert [item.texts for item in items] == [
        [["one"], ["eins"]],  # only the first line may begin with a mark
        [["\ufefftwo"], ["zwei"]],
        [[""], ["drei"]],
        [["four"], ["v\r"]],
    ]
    assert [item.number for item in items] == [1, 2, 3, 4]
    assert items[1].size == len("\ufefftwo".encode()) + 4
    assert sum(chunk.span.units for chunk in chunks) == 4
    for chunk in chunks:
        again = source.chunk_at(chunk.span)
        assert (again.data, again.digest) == (chunk.data, chunk.digest)
    sizes = [Path(path).stat().st_size for path in paths]
    assert sum(chunk.stored for chunk in chunks) == source.size == sum(sizes)
    record = source.record()
    assert (record["path"], record["lines"], record["bytes"]) == (" + ".join(paths), 4, sum(sizes))
    for file, path in zip(record["parallel"], paths, strict=True):
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        assert file == {"path": path, "sha256": digest, "bytes": Path(path).stat().st_size}


def test_faults_of_parallel_lines_name_the_file(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a", b"x\nxxxx\n\n"), write(tmp_path / "b", b"y\ny\n\xff\n")]
    source = ParallelLines(paths)
    for limit, kinds in ((3, ["long", "encoding"]), (4, ["encoding"]), (None, ["encoding"])):
        items = [item for chunk in source.chunks(1000, limit) for item in chunk.items("ab", limit)]
        faults = [item for item in items if isinstance(item, Fault)]
        assert [fault.kind for fault in faults] == kinds
        assert faults[-1][3:] == (paths[1], 3, None, 1)
        assert faults[-1].location == f"{paths[1]}:3"
        if limit == 3:
            assert faults[0][3:] == (paths[0], 2, None, None)
            assert faults[0].reason == "a document of more than --max-document-bytes 3"
    chunk = next(iter(source.chunks(1000)))
    assert chunk.fault(Item(2, None, 5, []), "tokens", "no").location == f"{source.path}:2"
    write(tmp_path / "a", b"x\n")
    with pytest.raises(DataError, match="a has fewer lines than before; it was changed"):
        source.chunk_at(chunk.span)
    with pytest.raises(DataError, match=r"a has 1 lines, .*b has 3 lines; parallel files need"):
        list(source.chunks())


# -- text files -------------------------------------------------------------------------------


def test_text_files_are_grouped_up_to_the_size_of_a_chunk(tmp_path: Path) -> None:
    names = [write(tmp_path / f"{number}.txt", b"x" * number) for number in range(6)]
    source = TextFiles(str(tmp_path), names)
    chunks = list(source.chunks(6))
    assert [(chunk.span.first, chunk.span.units, chunk.stored) for chunk in chunks] == [
        (1, 4, 0 + 1 + 2 + 3),
        (5, 2, 4 + 5),
    ]
    assert source.size == source.record()["bytes"] == 15
    for chunk in chunks:
        assert source.chunk_at(chunk.span).files == chunk.files
        assert source.chunk_at(chunk.span).digest == chunk.digest
    with pytest.raises(DataError, match="has 6 files, fewer than before"):
        source.chunk_at(chunks[1].span._replace(units=3))
    limited = list(source.chunks(1000, max_bytes=4))
    items = [item for chunk in limited for item in chunk.items(["a", "b"])]
    assert [getattr(item, "size", None) for item in items] == [0, 1, 2, 3, 4, 5]
    assert items[4].texts == [["xxxx"], ["xxxx"]]
    assert isinstance(items[5], Fault) and items[5].location == names[5]
    assert items[5].reason == "a document of 5 bytes, more than --max-document-bytes 4"
    assert limited[0].fault(items[3], "tokens", "no")[3:] == (names[3], None, 0, 3)
    (alone,) = TextFile(names[5]).chunks()
    assert alone.span == (0, 0, 1, 1)


# -- streams and storage ----------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2"])
def test_a_stream_is_read_and_skipped_by_uncompressed_bytes(tmp_path: Path, suffix: str) -> None:
    data = bytes(range(256)) * 2100  # more than two reads of 256 KiB
    path = write(tmp_path / f"a{suffix}", data)
    with Stream(path) as stream:
        assert stream.read(0) == b""
        assert stream.read(1) + stream.read(2) == data[:3] and not stream.ended
        stream.skip(1)
        stream.skip(299_999)
        assert stream.read(5) == data[300_003:300_008]
        assert stream.read(1 << 30) == data[300_008:] and stream.ended
        assert stream.read(1) == b"" and stream.damage is None
    opened = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with Stream(path) as stream:
        stream.read(10)
        assert stream.sha256() == hashlib.sha256(Path(path).read_bytes()).hexdigest()
        assert stream.stored == Path(path).stat().st_size
    assert len(os.listdir("/proc/self/fd")) == opened  # noqa: PTH208


@pytest.mark.parametrize("failures", [0, 1, 2, 3])
def test_a_failed_transfer_is_tried_again_twice_with_growing_pauses(
    monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(remote, "time", SimpleNamespace(sleep=pauses.append))
    left = failures

    def read(url: str, begin: int, end: int) -> bytes:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError("no route")
        return b"x" * (end - begin)

    monkeypatch.setattr(remote, "read_range", read)
    monkeypatch.setattr(remote, "stat", lambda url, fresh: (9, "v"))
    file = RemoteFile("s3://a/b", 9, "v")
    if failures < 3:
        assert file.fetch(2, 5) == b"xxx"
    else:
        with pytest.raises(DataError, match=r"bytes 2 to 5 could not be read in 3 attempts: OSE"):
            file.fetch(2, 5)
    assert pauses == [0.5, 1.0][:failures]


def test_a_remote_file_is_read_in_order_and_checked_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = bytes(range(100))
    now = (100, "v")
    monkeypatch.setattr(remote, "_STEP", 9)
    monkeypatch.setattr(remote, "read_range", lambda url, begin, end: data[begin:end])
    monkeypatch.setattr(remote, "stat", lambda url, fresh: now)
    file = RemoteFile.open("s3://a/b")
    assert b"".join(file.stream()) == data
    assert [len(part) for part in file.stream(5, 30)] == [9, 9, 7]
    assert b"".join(file.stream(5, 30)) == data[5:30]
    assert b"".join(read_blocks("s3://a/b")) == read_if_there("s3://a/b") == data
    assert len(file.key) == 32
    for other, new in (
        ((99, "v"), "99 bytes, version v"),
        ((100, ""), "100 bytes, version unknown"),
    ):
        assert RemoteFile("s3://a/b", *other).key != file.key
        now = other
        reason = rf"was replaced while it was read \(from 100 bytes, version v, to {new}\)"
        with pytest.raises(DataError, match=reason):
            list(file.stream(0, 9))


def test_a_local_file_is_read_in_blocks_or_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"content")
    assert b"".join(read_blocks(path)) == read_if_there(path) == b"content"
    assert read_if_there(f"{path}x") is None


def web_error(status: object, wrapped: bool) -> Exception:
    error = type("WebError", (Exception,), {"status": status})("why")
    if not wrapped:
        return error
    outer = FileNotFoundError("url")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (401, DataError, "access to s3://a is denied .why.; check the credentials"),
        (403, DataError, "access to s3://a is denied"),
        (402, TransferError, "s3://a cannot be read: WebError: why"),
        (500, TransferError, "s3://a cannot be read: WebError: why"),
        (None, TransferError, "s3://a cannot be read: WebError: why"),
    ],
)
def test_errors_of_web_servers_are_distinguished(
    wrapped: bool, status: object, kind: type[DataError], message: str
) -> None:
    with pytest.raises(kind, match=message) as raised, storage_errors("s3://a"):
        raise web_error(status, wrapped)
    assert type(raised.value) is kind


def test_a_missing_file_is_no_failed_transfer() -> None:
    for error in (FileNotFoundError("a"), NotADirectoryError("a"), web_error(404, True)):
        missing = pytest.raises(MissingError, match="no input file or folder at s3://a")
        with missing, storage_errors("s3://a"):
            raise error
    denied = type("Botocore", (Exception,), {})("no")
    denied.response = {"ResponseMetadata": {"HTTPStatusCode": 403}}  # type: ignore[attr-defined]
    for error, why in ((denied, "no"), (PermissionError(), "PermissionError")):
        with pytest.raises(DataError, match=rf"is denied \({why}\)"), storage_errors("s3://a"):
            raise error


def test_a_folder_or_missing_path_has_no_size(tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"12345")
    assert stat(path).size == 5
    for missing in (tmp_path / "b", tmp_path / "a" / "b"):
        with pytest.raises(MissingError, match="no input file or folder at"):
            stat(str(missing))


# -- opening ----------------------------------------------------------------------------------


def test_a_recorded_source_is_opened_as_the_same_kind(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", b"\n".join(LINES))
    text = write(tmp_path / "b.txt", b"text")
    pair = [write(tmp_path / "c", b"x\n"), write(tmp_path / "d", b"y\n")]
    folder = tmp_path / "f"
    folder.mkdir()
    write(folder / "e.txt", b"text")
    sources: list[Any] = [*open_sources([lines, text, folder], ["text"]), ParallelLines(pair)]
    for source in sources:
        list(source.chunks())
        keys = ["a", "b"] if isinstance(source, ParallelLines) else ["text"]
        record = source.record() | {"json_keys": keys}
        again = reopen(record)
        assert (type(again), again.path) == (type(source), source.path)
    assert list(read_texts([folder])) == ["text"]
    record = sources[0].record() | {"json_keys": ["text"], "files": 1}
    with pytest.raises(DataError, match="is another kind of input now"):
        reopen(record)


def test_a_chunk_has_a_mebibyte_unless_another_size_is_given(tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 400_000}).encode() + b"\n"
    path = write(tmp_path / "a.jsonl", line * 5)
    assert [chunk.span.units for chunk in JsonLines(path).chunks()] == [2, 2, 1]


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
@pytest.mark.parametrize("chunk_bytes", [1, 2, 5, 11, 1000])
def test_one_byte_more_than_allowed_is_kept_of_a_line(
    tmp_path: Path, chunk_bytes: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_lines, "_STEP", step)
    lines = [b"abc", b"abcd", b"", b"abcdefghij", b"k" * 30, b"lmn", b"opqrst"]
    paths = [write(tmp_path / "a", b"\n".join(lines)), write(tmp_path / "b", b"\n" * 7)]
    chunks = list(ParallelLines(paths).chunks(chunk_bytes, 3))
    kept = b"".join(chunk.data[0] for chunk in chunks).split(b"\n")
    assert kept == [line[:4] for line in lines]
    found = [item for chunk in chunks for item in chunk.items("ab", 3)]
    assert [isinstance(item, Item) for item in found] == [len(line) <= 3 for line in lines]
    again = ParallelLines(paths).chunk_at(Span(0, 0, 4, 3), 3)
    assert again.data == (b"abcd\nkkkk\nlmn\n", b"\n\n\n")
    assert (again.span, again.stored) == ((0, 0, 4, 3), 0)
