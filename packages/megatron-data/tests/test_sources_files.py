"""Atomic files and their digests, JSON and text files, and the paths that they accept."""

import fcntl
import hashlib
import io
import os
import stat
import sys
from pathlib import Path

import pytest
from megatron_data import DataError, files
from megatron_data.files import (
    AtomicFile,
    Digests,
    local_folder,
    local_path,
    local_prefix,
    parse_json,
    read_json,
    read_text,
    tokenizer_path,
    write_json,
    write_then_rename,
)
from megatron_data.sources.failures import wrap_file
from megatron_data.sources.storage import relative_path
from megatron_data.sources.streams import split_suffix
from megatron_data.sources.urls import is_local, without_scheme
from megatron_data.sources.wrapped_file import WrappedFile


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 20, 25])
@pytest.mark.parametrize("step", [1, 3, 10, 100])
def test_each_block_has_a_digest_and_the_last_may_be_shorter(
    monkeypatch: pytest.MonkeyPatch, size: int, step: int
) -> None:
    assert files.BLOCK_BYTES == 64 << 20
    monkeypatch.setattr(files, "BLOCK_BYTES", 10)
    data = bytes(range(size))
    digests = Digests()
    for start in range(0, size, step):
        digests.update(memoryview(data[start : start + step]))
    assert digests.sha256 == digest(data)
    blocks = [digest(data[start : start + 10]) for start in range(0, size, 10)]
    assert digests.blocks == blocks == digests.blocks


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "a"
    with AtomicFile(path) as file:
        file.write(b"one ")
        file.write(memoryview(b""))
        file.write(memoryview(b"two").cast("B"))
        assert not path.exists()
        assert [each.name for each in path.parent.iterdir()] == [".a.partial"]
        assert path.with_name(".a.partial").read_bytes() == b"one two"  # no bytes are held back
    assert path.read_bytes() == b"one two"
    assert (file.bytes, file.digests.sha256) == (7, digest(b"one two"))
    assert [each.name for each in path.parent.iterdir()] == ["a"]
    file.discard()
    assert path.exists()  # nothing is discarded after it is complete
    before = os.umask(0)
    try:
        with AtomicFile(tmp_path / "empty") as file:
            pass
    finally:
        os.umask(before)
    assert (file.path.read_bytes(), stat.S_IMODE(file.path.stat().st_mode)) == (b"", 0o666)


def test_a_failed_file_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(KeyError), AtomicFile(path) as file:
        file.write(b"new")
        with pytest.raises(DataError, match=rf"another process is writing {path}; wait"):
            AtomicFile(path)
        raise KeyError
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    (tmp_path / ".a.partial").write_text("what a killed process has left")
    with AtomicFile(path) as file:
        file.write(b"new")
    assert path.read_text() == "new"
    with AtomicFile(path) as file:
        file.write(b"newer")
        file.commit()
        assert path.read_text() == "newer"
    with AtomicFile(path) as file:
        file.discard()
    assert path.read_text() == "newer"


def test_a_renamed_file_is_deleted_on_failure(tmp_path: Path) -> None:
    path, partial = tmp_path / "a", tmp_path / "b"
    with write_then_rename(path, partial) as file:
        file.write(b"one")
    assert path.read_bytes() == b"one" and not partial.exists()
    with pytest.raises(KeyError), write_then_rename(path, partial) as file:
        file.write(b"two")
        raise KeyError
    assert path.read_bytes() == b"one" and not partial.exists()


def test_json_is_written_with_a_line_for_each_value_or_key(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    value = {"b": [1, 2], "a": {"c": "é"}}
    write_json(path, value)
    assert path.read_text() == (
        '{\n  "b": [\n    1,\n    2\n  ],\n  "a": {\n    "c": "é"\n  }\n}\n'
    )
    assert read_json(path) == value and [*read_json(path)] == ["b", "a"]
    write_json(path, value, indent=False)
    assert path.read_text() == '{\n"b": [1,2],\n"a": {"c":"é"}\n}\n'
    assert read_json(path) == parse_json(path.read_bytes(), path) == value
    path.write_text("{")
    with pytest.raises(DataError, match=r"a\.json is not JSON .*; is it damaged or truncated\?"):
        read_json(path)
    path.write_bytes(b"ab\xff")
    with pytest.raises(DataError, match=r"a\.json is not UTF-8 text \(byte 2\)"):
        read_text(path)


def test_paths_of_outputs_and_tokenizers_are_local(tmp_path: Path) -> None:
    assert local_path(tmp_path) == str(tmp_path)
    assert tokenizer_path("file:///a/b") == tokenizer_path("/a/b") == Path("/a/b")
    for path, message in (
        ("file:///a", "are written to local disks only; give the path /a"),
        ("s3://a/b", "give a path, and copy the files from there"),
    ):
        with pytest.raises(DataError, match=message):
            local_path(path)
    with pytest.raises(DataError, match="tokenizers are read from local disks only"):
        tokenizer_path("s3://a/b")
    assert local_prefix(tmp_path / "a") == str(tmp_path / "a")
    for folder in (f"{tmp_path}/", "..", ".", "a/.."):
        with pytest.raises(DataError, match="is a folder; add a name for the files, such as"):
            local_prefix(folder)


def test_suffixes_of_content_and_compression() -> None:
    for name, expected in (
        ("a.txt", (".txt", "")),
        ("a.b/c.JSONL.GZ", (".jsonl", ".gz")),
        ("a.zst", ("", ".zst")),
        ("a", ("", "")),
        ("a.txt.bz2", (".txt", ".bz2")),
        ("a.gz.txt", (".txt", "")),
    ):
        assert split_suffix(name) == expected
    assert is_local("a") and is_local("file:///a") and not is_local("s3://a")
    assert (without_scheme("file:///a"), without_scheme("s3://a")) == ("/a", "s3://a")


def test_paths_are_relative_to_their_folder() -> None:
    for folder in ("memory://a/b", "memory://a/b/"):
        assert relative_path("memory://a/b/c/d.txt", folder) == "c/d.txt"
    assert relative_path("/a/b/c.txt", "/a") == "b/c.txt"


def test_a_folder_is_checked_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert local_folder(tmp_path / "new" / "deep") == tmp_path / "new" / "deep"
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "deep"):
        with pytest.raises(DataError, match=rf"because {tmp_path}/file is a file; give another"):
            local_folder(path)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(PermissionError, match=str(tmp_path)):
        local_folder(tmp_path / "new")


def test_a_wrapped_file_reads_moves_and_closes_the_file_inside() -> None:
    inner = io.BytesIO(b"0123456789")
    file, buffer = WrappedFile(inner), bytearray(4)
    assert (file.readinto(buffer), bytes(buffer), file.tell()) == (4, b"0123", 4)
    assert file.readable() and file.seekable()
    assert file.seek(-3, io.SEEK_END) == file.tell() == 7
    assert (file.readinto(buffer), bytes(buffer)) == (3, b"7893")
    assert file.read() == b"" and file.seek(2) == 2 and file.read() == b"23456789"
    file.close()
    assert file.closed and inner.closed
    remote = io.BytesIO(b"0123")
    with wrap_file(remote, "s3://a") as opened:
        assert opened.read(2) == b"01"
    assert remote.closed


def test_a_file_is_flushed_before_it_gets_its_name_and_the_folder_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flushed, fsync = tmp_path / "a", [], os.fsync

    def watched(descriptor: int) -> None:
        flushed.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    with AtomicFile(path) as file:
        file.write(b"one")
    assert flushed == [(False, False), (True, True)]


def test_a_writer_begins_again_if_the_previous_one_has_just_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking, the other has renamed the file, and a third has begun one."""
    partial, locked, flock = tmp_path / ".a.partial", [], fcntl.flock

    def watched(descriptor: int, how: int) -> None:
        flock(descriptor, how)
        locked.append(descriptor)
        if len(locked) < 3:
            partial.unlink()
        if len(locked) == 2:
            partial.write_bytes(b"theirs")

    monkeypatch.setattr(fcntl, "flock", watched)
    with AtomicFile(tmp_path / "a") as file:
        file.write(b"one")
    assert len(locked) == 3 and (tmp_path / "a").read_bytes() == b"one"
    assert len({*locked}) == 1, "each is closed before the next is opened"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_file_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, kept = len(os.listdir("/proc/self/fd")), []  # noqa: PTH208
    for name in "ab":
        with AtomicFile(tmp_path / name) as file:
            kept.append(file)
            with pytest.raises(DataError, match="another process is writing"):
                AtomicFile(tmp_path / name)
            if name == "b":
                file.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fcntl, "flock", interrupt)
    with pytest.raises(KeyboardInterrupt):
        AtomicFile(tmp_path / "c")
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
