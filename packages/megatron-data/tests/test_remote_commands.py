"""Tests of the commands on datasets at URLs: equal output, one pass, and one-line errors."""

import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_data import (
    ByteTokenizer,
    DataError,
    HuggingFaceTokenizer,
    IndexedDataset,
    IndexedDatasetBuilder,
    merge,
    preprocess,
    verify,
)
from megatron_data.cli import main
from megatron_data.indexed import dataset_files, summarize
from megatron_data.indexed.format import Header
from megatron_data.sources import StorageCache
from megatron_data.sources import remote as remote_files
from megatron_data.sources.remote import RemoteFile

fsspec = pytest.importorskip("fsspec", reason="URLs are an extra of this package")

Run = Callable[..., str]
URL = "memory://bucket/c_text_document"


@pytest.fixture
def memory() -> Iterator[Any]:
    """Empties fsspec's storage in memory after the test."""
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()


@pytest.fixture
def local(
    corpus: Path,
    tokenizer: HuggingFaceTokenizer,
    tmp_path: Path,
    memory: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """A local dataset with a copy at `URL`, large enough for several blocks of a stream."""
    monkeypatch.setattr(remote_files, "_PAUSE", 0)
    monkeypatch.setattr(remote_files, "_STEP", 1000)
    preprocess([corpus], tmp_path / "c", tokenizer, append_eod=True)
    prefix = str(tmp_path / "c_text_document")
    upload(memory, prefix, URL)
    return prefix


def upload(memory: Any, prefix: str, url: str) -> None:
    for suffix in (".bin", ".idx", ".meta.json"):
        content = Path(prefix + suffix)
        if content.is_file():
            memory.pipe_file(url.removeprefix("memory:/") + suffix, content.read_bytes())


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command with a cache and returns its output."""

    def command(*words: str, status: int = 0, cache: bool = True) -> str:
        option = ["--object-storage-cache-path", str(tmp_path / "cache")] if cache else []
        assert main([*words, *option]) == status
        printed = capsys.readouterr()
        if status:
            assert printed.err.count("\n") == 1
            assert printed.err.startswith("megatron-data: error: ")
        return printed.err if status else printed.out

    return command


def test_every_command_prints_the_same_for_a_url_and_local_files(
    local: str, run: Run, tmp_path: Path
) -> None:
    for words in (
        ["verify", "@"],
        ["trace", "@", "1234"],
        ["mix", "@", "--epochs", "2", "--seq-length", "16"],
        ["mix", "0.3", "@", "0.7", "@", "--seq-length", "16"],
        ["inspect", "@", "--documents", "2"],  # documents are cached, unlike full scans
    ):
        here = run(*(local if word == "@" else word for word in words))
        there = run(*(URL if word == "@" else word for word in words))
        assert re.sub(" +", " ", there.replace(URL, local)) == re.sub(" +", " ", here)
        assert not list((tmp_path / "cache").glob("*.block")) or words[0] == "inspect"


def test_merge_and_split_copy_urls_byte_for_byte(local: str, run: Run, tmp_path: Path) -> None:
    for prefix in (local, URL):
        name = tmp_path / ("here" if prefix == local else "there")
        run("merge", prefix, local, "--output-prefix", f"{name}_merged")
        run("split", prefix, "--shares", "1", "2", "--output-prefixes", f"{name}_a", f"{name}_b")
    for part in ("merged", "a", "b"):
        for suffix in (".bin", ".idx", ".meta.json"):
            there = Path(f"{tmp_path}/there_{part}{suffix}").read_bytes()
            assert there == Path(f"{tmp_path}/here_{part}{suffix}").read_bytes()
        assert "digests match" in run("verify", f"{tmp_path}/there_{part}")
    assert not list((tmp_path / "cache").glob("*.block"))  # nothing was removed from the cache


def test_verify_reads_each_file_once(
    local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, int]] = []
    fetch = RemoteFile.fetch

    def counted(file: RemoteFile, begin: int, end: int) -> bytes:
        read.append((file.url, begin))
        return fetch(file, begin, end)

    monkeypatch.setattr(RemoteFile, "fetch", counted)
    with IndexedDataset(URL, StorageCache(str(tmp_path / "cache"))):
        read.clear()
    assert verify(URL, StorageCache(str(tmp_path / "cache"))).has_manifest
    assert len(read) == len(set(read))
    assert len([url for url, _ in read if url.endswith(".bin")]) > 3


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("flipped", r"memory://\S*\.bin differs from .* \(1 of 1 blocks of 64 MiB"),
        ("index", r"memory://\S*\.idx differs from .* \(1 of 1 blocks"),
        ("short", r"\.idx does not match memory://\S*\.bin"),
        ("manifest", r"memory://\S*meta\.json is not JSON"),
        ("foreign", r"memory://\S*meta\.json is not a manifest"),
    ],
)
def test_damage_at_a_url_is_reported(
    local: str, run: Run, memory: Any, damage: str, message: str
) -> None:
    path = "/bucket/c_text_document"
    tokens, index = (Path(f"{local}.{name}").read_bytes() for name in ("bin", "idx"))
    name, content = {
        "flipped": (".bin", bytes([tokens[0] ^ 1]) + tokens[1:]),
        # Two sequences in the last document and none in the one before: the structure is valid.
        "index": (".idx", index[:-16] + bytes([index[-16] ^ 1]) + index[-15:]),
        "short": (".bin", tokens[:-1]),
        "manifest": (".meta.json", b"{"),
        "foreign": (".meta.json", b"{}"),
    }[damage]
    memory.pipe_file(path + name, content)
    assert re.search(message, run("verify", URL, status=1))


def test_errors_of_urls_are_one_line(local: str, run: Run, memory: Any, tmp_path: Path) -> None:
    assert "--object-storage-cache-path FOLDER" in run("verify", URL, status=1, cache=False)
    assert re.search(
        r"no dataset at memory://bucket/c: .*idx and .*bin missing; did you mean "
        "memory://bucket/c_text_document",
        run("inspect", "memory://bucket/c", status=1),
    )
    assert "without .idx" in run("inspect", f"{URL}.idx", status=1)
    assert "written to local disks only" in run(
        "merge", URL, "--output-prefix", "memory://bucket/out", status=1
    )
    assert "written to local disks only" in run(
        "split", URL, "--shares", "1", "--output-prefixes", "memory://bucket/out", status=1
    )
    memory.rm_file("/bucket/c_text_document.bin")
    assert "the other file exists" in run("mix", URL, status=1)
    (tmp_path / "file").touch()
    words = ["verify", URL, "--object-storage-cache-path", str(tmp_path / "file")]
    memory.pipe_file("/bucket/c_text_document.bin", Path(f"{local}.bin").read_bytes())
    assert "file" in run(*words, status=1, cache=False)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError("Access Denied"), r"access to \S+ is denied \(Access Denied\); check"),
        (RuntimeError("no credentials"), r"cannot be read: RuntimeError: no credentials"),
        (FileNotFoundError(), r"no dataset at"),
    ],
)
def test_errors_of_storage_are_reported(
    local: str, run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "info", refuse)
    for words in (["verify", URL], ["mix", URL]):
        printed = run(*words, status=1)
        assert re.search(message, printed)
        assert URL in printed


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz", "c.txt", "c.parquet"])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError("Forbidden"), r"access to memory://bucket/\S+ is denied \(Forbidden\)"),
        (OSError("no route"), r"memory://bucket/\S+ cannot be read: OSError: no route"),
        (TimeoutError(), r"memory://bucket/\S+ cannot be read: TimeoutError"),
    ],
)
def test_a_failed_transfer_is_not_a_damaged_file(
    memory: Any,
    tmp_path: Path,
    name: str,
    error: Exception,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Errors of storage are not counted as documents that --on-error skip skips."""
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")

    def breaks(*_: object) -> bytes:
        raise error

    memory.pipe_file(f"/bucket/{name}", b"0123456789")
    monkeypatch.setattr(fsspec.implementations.memory.MemoryFile, "read", breaks)
    with pytest.raises(DataError, match=message):
        preprocess([f"memory://bucket/{name}"], tmp_path / "o", ByteTokenizer(), on_error="skip")


def test_missing_packages_are_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    def unknown(url: str) -> None:
        raise ValueError("no bucket")

    printed = run("verify", "nothing://x/d", status=1)
    assert "the scheme 'nothing' is not supported" in printed
    monkeypatch.setattr(fsspec.core, "url_to_fs", lacking)
    printed = run("verify", "s3://x/d", status=1)
    assert "s3:// needs a driver of fsspec: Install s3fs" in printed
    monkeypatch.setattr(fsspec.core, "url_to_fs", unknown)
    assert "s3://x/d.idx: fsspec cannot open it: no bucket" in run("verify", "s3://x/d", status=1)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    printed = run("verify", "s3://x/d", status=1)
    assert "needs fsspec; pip install 'megatron-data[remote]'" in printed


class _AnswersError(Exception):
    """An error with the attributes of aiohttp."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"status {status}")


class _ClientError(Exception):
    """An error with the attributes of botocore."""

    def __init__(self, status: int) -> None:
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}
        super().__init__(f"An error occurred ({status})")


@pytest.mark.parametrize("kind", [_AnswersError, _ClientError, ConnectionError])
@pytest.mark.parametrize("status", [404, 403, 500])
def test_a_missing_file_is_distinguished_from_denied_access(
    local: str,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    kind: type[Exception],
) -> None:
    """Megatron's S3 does not distinguish them: its 404 is an existing file.

    The HTTP file system of fsspec raises FileNotFoundError for every failure, from its cause.
    """

    def refuse(*_: object, **__: object) -> None:
        raise FileNotFoundError("x") from kind(status)

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "info", refuse)
    printed = run("mix", URL, status=1)
    if kind is ConnectionError or status == 500:
        assert f"cannot be read: {kind.__name__}" in printed
    else:
        assert ("access to" if status == 403 else "no dataset at") in printed


def test_access_denied_while_reading_is_reported_at_once(
    local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def refuse(*_: object) -> bytes:
        tries.append(1)
        raise PermissionError("Forbidden")

    with IndexedDataset(URL, StorageCache(str(tmp_path / "cache"))) as far:
        monkeypatch.setattr(remote_files, "read_range", refuse)
        with pytest.raises(DataError, match=r"access to \S*\.bin is denied \(Forbidden\)"):
            far[0]
    assert len(tries) == 1


def test_a_file_that_is_replaced_while_it_is_read_is_refused(
    local: str, tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size is the same, so only the version differs; no data of it is cached."""
    storage = StorageCache(str(tmp_path / "cache"), 64)
    with IndexedDataset(URL, storage) as far:
        far[0]
        before = len(list((tmp_path / "cache").glob("*.block")))
        tokens = far.scan()
        next(tokens)
        content = bytearray(Path(f"{local}.bin").read_bytes())
        content[-1] ^= 1
        memory.pipe_file("/bucket/c_text_document.bin", bytes(content))
        changed = r"\.bin was replaced while it was read \(.*, version 2.*, version 2"  # years
        with pytest.raises(DataError, match=changed):
            far[len(far) - 1]
        assert len(list((tmp_path / "cache").glob("*.block"))) == before
        with pytest.raises(DataError, match=changed):
            for _ in tokens:
                pass
        memory.pipe_file("/bucket/c_text_document.bin", bytes(content[:-2]))
        with pytest.raises(DataError, match=changed):
            far[len(far) - 1]
        memory.rm_file("/bucket/c_text_document.bin")
        with pytest.raises(DataError, match=r"\.bin does not exist any more"):
            list(far.scan())
    upload(memory, local, URL)
    read = remote_files.read_range

    def replaces(url: str, begin: int, end: int) -> bytes:
        memory.pipe_file("/bucket/c_text_document.bin", bytes(content))
        return read(url, begin, end)

    monkeypatch.setattr(remote_files, "read_range", replaces)
    with pytest.raises(DataError, match=changed):
        merge([URL], tmp_path / "o", StorageCache(str(tmp_path / "other")))
    assert not list(tmp_path.glob("o.*")) + list(tmp_path.glob(".o*"))


@pytest.mark.parametrize("mapped", [True, False])
def test_a_scan_equals_the_file_whatever_its_blocks(
    local: str, tmp_path: Path, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_files, "_BLOCK_BYTES", 1000)
    storage = StorageCache(str(tmp_path / "cache"))
    whole = np.fromfile(f"{local}.bin", np.uint16)
    for prefix in (local, URL):
        with IndexedDataset(prefix, storage, mapped) as dataset:
            for begin, end in ((0, None), (0, 0), (7, 1507), (len(whole) - 1, len(whole))):
                blocks = [tokens.copy() for tokens in dataset.scan(begin, end)]
                read = np.concatenate([np.empty(0, np.uint16), *blocks])
                assert np.array_equal(read, whole[begin:end])
            assert len(list(dataset.scan())) > 3
            for begin, end in ((-1, 3), (3, 2), (0, len(whole) + 1)):
                with pytest.raises(IndexError, match=f"of {len(whole)} in"):
                    dataset.scan(begin, end)
        with pytest.raises(DataError, match="is closed"):
            dataset.scan()


def test_a_file_truncated_during_a_scan_is_reported(local: str) -> None:
    with IndexedDataset(local, mmap=False) as dataset:
        with Path(f"{local}.bin").open("r+b") as file:
            file.truncate(10)
        with pytest.raises(DataError, match=r"\.bin was truncated while it was read"):
            list(dataset.scan())


@pytest.mark.parametrize("block", [8, 12, 1 << 20])
def test_images_and_text_are_distinguished_across_blocks(
    tmp_path: Path, memory: Any, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_files, "_BLOCK_BYTES", block)
    monkeypatch.setattr(remote_files, "_STEP", block)
    random = np.random.default_rng(0)
    texts: list[int] = []
    with IndexedDatasetBuilder(tmp_path / "m", "int32", multimodal=True) as builder:
        for number in range(40):
            mode, length = int(random.integers(2)), int(random.integers(6))
            tokens = random.integers(0, 9, length)
            texts += [] if mode else tokens.tolist()
            builder.add_item(tokens, mode)
            if number % 3 == 2:
                builder.end_document()
        builder.end_document()
        builder.finalize()
    upload(memory, str(tmp_path / "m"), "memory://bucket/m")
    for prefix in (str(tmp_path / "m"), "memory://bucket/m"):
        with IndexedDataset(prefix, StorageCache(str(tmp_path / "cache"))) as dataset:
            found = summarize(dataset)
        assert found.token_counts.tolist() == np.bincount(texts).tolist()
        assert int(found.document_lengths.sum()) == len(texts)


SCANS = """
import resource, sys
from megatron_data import IndexedDataset
from megatron_data.indexed import summarize
dataset = IndexedDataset(sys.argv[1], mmap=sys.argv[2] == "True")
dataset.get(0, 0, 1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
summarize(dataset)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("mapped", [True, False])
def test_memory_stays_flat_over_a_file_of_any_size(tmp_path: Path, mapped: bool) -> None:
    """200 MB of holes; a memory map read completely would be held in memory."""
    length = 100_000_000
    index = [Header(np.dtype("<u2"), 1, 2).pack(), struct.pack("<iqqq", length, 0, 0, 1)]
    (tmp_path / "d.idx").write_bytes(b"".join(index))
    with (tmp_path / "d.bin").open("wb") as file:
        file.truncate(2 * length)
    words = [sys.executable, "-c", SCANS, str(tmp_path / "d"), str(mapped)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) < 60_000  # kB
