"""Tests of datasets in object storage: equal samples, a bounded cache, broken transfers."""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megatron_data import DataError, IndexedDataset, build_gpt_datasets
from megatron_data.sources import StorageCache, block_folder
from megatron_data.sources import remote as remote_files
from megatron_data.sources.failures import MissingError
from megatron_data.sources.remote import RemoteFile
from megatron_data.sources.storage import stat

fsspec = pytest.importorskip("fsspec", reason="URLs are an extra of this package")

Write = Callable[..., str]
DOCUMENTS = [[i + j for j in range(3 + i % 17)] for i in range(60)]


@pytest.fixture
def remote(write_dataset: Write, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """A local dataset, and the URL of a copy."""
    monkeypatch.setattr(remote_files, "_PAUSE", 0)
    prefix, url = write_dataset(DOCUMENTS), "memory://bucket/d"
    memory = fsspec.filesystem("memory")
    for suffix in (".bin", ".idx"):
        memory.pipe_file(f"/bucket/d{suffix}", Path(prefix + suffix).read_bytes())
    yield prefix, url
    memory.rm("/bucket", recursive=True)


def cache(folder: Path, block: int = 48, limit: int = 1 << 20) -> StorageCache:
    return StorageCache(str(folder / "cache"), block, limit)


def blocks(folder: Path) -> list[Path]:
    return sorted((folder / "cache").glob("*.block"))


@pytest.mark.parametrize("block", [7, 48, 1 << 20])
def test_every_read_equals_that_of_the_local_files(
    remote: tuple[str, str], tmp_path: Path, block: int
) -> None:
    prefix, url = remote
    with IndexedDataset(prefix) as local, IndexedDataset(url, cache(tmp_path, block)) as far:
        assert len(far) == len(local)
        assert far.document_indices.tolist() == local.document_indices.tolist()
        for number in range(len(local)):
            assert np.array_equal(far[number], local[number])
            assert far.get(number, 1, 2).tolist() == local.get(number, 1, 2).tolist()
        assert far.document(7).tolist() == local.document(7).tolist()
        assert far.document(7).dtype == local.dtype
        with pytest.raises(DataError, match=r"is not memory-mapped.*scan\(\)"):
            far.tokens  # noqa: B018
        far.check()
    with pytest.raises(DataError, match="d is closed"):
        far.get(0)


@pytest.mark.parametrize("order", ["stateless", "compat", "packed"])
def test_samples_are_those_of_the_local_files(
    remote: tuple[str, str], tmp_path: Path, order: Any
) -> None:
    prefix, url = remote
    local = build_gpt_datasets(prefix, "9,1", (30, 0, 0), 16, order=order).train
    far = build_gpt_datasets(url, "9,1", (30, 0, 0), 16, order=order, storage=cache(tmp_path)).train
    assert local is not None
    assert far is not None
    again = pickle.loads(pickle.dumps(far))
    for number in range(30):
        for other in (far, again):
            assert np.array_equal(other[number]["tokens"], local[number]["tokens"])


def test_a_block_is_fetched_once_and_the_cache_stays_within_its_limit(
    remote: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[tuple[str, int, int]] = []
    fetch = RemoteFile.fetch

    def counted(file: RemoteFile, begin: int, end: int) -> bytes:
        fetched.append((file.url, begin, end))
        return fetch(file, begin, end)

    monkeypatch.setattr(RemoteFile, "fetch", counted)
    for _ in range(2):
        with IndexedDataset(remote[1], cache(tmp_path)) as far:
            assert [far[number].tolist() for number in range(60)] == DOCUMENTS
    assert len(fetched) == len(set(fetched)) == 1 + len(blocks(tmp_path))
    small = StorageCache(str(tmp_path / "small"), 48, 300)
    with IndexedDataset(remote[1], small) as far:
        for number in np.random.default_rng(0).permutation(60).tolist():
            assert far[number].tolist() == DOCUMENTS[number]
            kept = [path.stat().st_size for path in (tmp_path / "small").glob("*.block")]
            assert sum(kept) <= 300
    assert len(kept) == 300 // 52
    killed, running = (tmp_path / "small" / name for name in (".a.1.1", ".b.2.2"))
    monkeypatch.setattr(block_folder, "time", SimpleNamespace(time=lambda: 10_000.0))
    for path, seconds in ((killed, 10_000 - 3601), (running, 10_000 - 3600)):
        path.touch()
        os.utime(path, (seconds, seconds))
    with IndexedDataset(remote[1], small) as far:
        assert [far[number].tolist() for number in range(60)] == DOCUMENTS
    assert running.exists()
    assert not killed.exists()


def test_one_of_several_threads_fetches_the_index(
    remote: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    fetch = RemoteFile.fetch

    def slow(file: RemoteFile, begin: int, end: int) -> bytes:
        fetched.append(file.url)
        time.sleep(0.1)
        return fetch(file, begin, end)

    monkeypatch.setattr(RemoteFile, "fetch", slow)
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(lambda _: IndexedDataset(remote[1], cache(tmp_path)), range(4)))
    assert fetched == [f"{remote[1]}.idx"]
    assert all(len(dataset) == len(DOCUMENTS) for dataset in opened)


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "empty"])
def test_a_damaged_block_is_fetched_again(
    remote: tuple[str, str], tmp_path: Path, damage: str
) -> None:
    with IndexedDataset(remote[1], cache(tmp_path)) as far:
        assert far[0].tolist() == DOCUMENTS[0]
    (path,) = blocks(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(
        {
            "flipped": bytes([whole[0] ^ 1]) + whole[1:],
            "short": whole[:-1],
            "long": whole + b"x",
            "empty": b"",
        }[damage]
    )
    with IndexedDataset(remote[1], cache(tmp_path)) as far:
        assert far[0].tolist() == DOCUMENTS[0]
    assert path.read_bytes() == whole


def test_a_replaced_dataset_does_not_use_old_blocks(
    remote: tuple[str, str], tmp_path: Path, write_dataset: Write
) -> None:
    for documents in (DOCUMENTS, [[9, *tokens] for tokens in DOCUMENTS]):
        prefix = write_dataset(documents, "new")
        for suffix in (".bin", ".idx"):
            content = Path(prefix + suffix).read_bytes()
            fsspec.filesystem("memory").pipe_file(f"/bucket/d{suffix}", content)
        with IndexedDataset(remote[1], cache(tmp_path)) as far:
            assert [far[number].tolist() for number in range(60)] == documents


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda data: data[:-1], r"d.bin: bytes 0 to 48 .* 3 attempts: received 47 of 48"),
        (
            lambda data: data + b"x",
            "3 attempts: received 49 bytes instead of 48: the server ignores ranges; copy the file",
        ),
        (OSError("no route"), r"bytes 0 to 48 .*OSError: no route"),
        (FileNotFoundError(), "d.bin does not exist any more"),
    ],
)
def test_a_broken_transfer_is_reported_and_not_cached(
    remote: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken: Any,
    message: str,
) -> None:
    read = remote_files.read_range
    left = 3

    def breaks(url: str, begin: int, end: int) -> bytes:
        nonlocal left
        if url.endswith(".bin") and left:
            left -= 1
            if isinstance(broken, Exception):
                raise broken
            return bytes(broken(read(url, begin, end)))
        return read(url, begin, end)

    monkeypatch.setattr(remote_files, "read_range", breaks)
    with IndexedDataset(remote[1], cache(tmp_path)) as far:
        with pytest.raises(DataError, match=message):
            far[0]
        assert not blocks(tmp_path)
        if not isinstance(broken, FileNotFoundError):
            left = 2  # the last attempt succeeds
            assert far[0].tolist() == DOCUMENTS[0]
    assert not list((tmp_path / "cache").glob(".*"))


def test_invalid_urls_and_caches_are_reported(
    remote: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"memory://bucket/d .*--object-storage-cache-path"):
        IndexedDataset(remote[1])
    with pytest.raises(DataError, match=r"memory://bucket/none\.idx"):
        IndexedDataset("memory://bucket/none", cache(tmp_path))
    fsspec.filesystem("memory").pipe_file("/bucket/d.bin", b"short")
    with pytest.raises(DataError, match=r"d.idx does not match memory://bucket/d.bin"):
        IndexedDataset(remote[1], cache(tmp_path))
    fsspec.filesystem("memory").pipe_file("/bucket/d.idx", b"MMIDIDX")
    with pytest.raises(DataError, match=r"memory://bucket/d.idx has 7 bytes"):
        IndexedDataset(remote[1], cache(tmp_path))
    fsspec.filesystem("memory").pipe_file("/bucket/d.idx", b"")
    with pytest.raises(DataError, match=r"memory://bucket/d.idx has 0 bytes"):
        IndexedDataset(remote[1], cache(tmp_path))

    for wrong in ((10, 9), (0, 5), (-1, 5)):
        with pytest.raises(DataError, match="a limit of at least one block"):
            StorageCache(str(tmp_path), *wrong)
    assert StorageCache(str(tmp_path), 1, 1).limit_bytes == 1
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file cannot be a folder, because"):
        StorageCache(str(tmp_path / "file"))
    usual = StorageCache(str(tmp_path))
    with pytest.raises(FrozenInstanceError):
        usual.block_bytes = 0  # type: ignore[misc]
    assert usual.block_bytes == 4 << 20
    assert usual.limit_bytes == usual.index_limit_bytes == 64 << 30


def test_a_file_is_looked_up_again_for_its_version(
    remote: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cached listing of the storage would hide that it was replaced."""
    ignored: list[object] = []
    monkeypatch.setattr(
        fsspec.get_filesystem_class("memory"),
        "invalidate_cache",
        lambda _, path: ignored.append(path),
    )
    size = stat(f"{remote[1]}.bin").size
    assert not ignored
    with pytest.raises(MissingError, match=r"no input file or folder at memory://bucket$"):
        stat("memory://bucket")  # a folder has no size
    assert RemoteFile.open(f"{remote[1]}.bin").size == size
    assert ignored == ["/bucket/d.bin"]
    found = {"type": "file", "size": None, "mtime": None, "etag": "x"}
    with monkeypatch.context() as patch:
        patch.setattr(fsspec.get_filesystem_class("memory"), "info", lambda *_: found)
        assert stat(f"{remote[1]}.bin") == (0, "x")  # an unknown size is 0


def test_least_recently_used_indices_are_removed_and_each_has_a_lock(
    write_dataset: Write, tmp_path: Path, remote: tuple[str, str]
) -> None:
    memory = fsspec.filesystem("memory")
    prefix, _ = remote
    for name in "abc":
        for suffix in (".bin", ".idx"):
            memory.pipe_file(f"/bucket/{name}{suffix}", Path(prefix + suffix).read_bytes())
    size = Path(f"{prefix}.idx").stat().st_size
    folder = tmp_path / "cache"
    storage = StorageCache(str(folder), 48, 1 << 20, index_limit_bytes=2 * size)
    key = {name: RemoteFile.open(f"memory://bucket/{name}.idx").key for name in "abc"}

    def kept() -> str:
        return "".join(name for name in "abc" if (folder / f"{key[name]}.whole").exists())

    folder.mkdir()
    with block_folder.locked(folder / f"{key['c']}.lock"):  # as if another process had fetched it
        first = IndexedDataset("memory://bucket/a", storage)
        with IndexedDataset("memory://bucket/b", storage):
            assert kept() == "ab"
    os.utime(folder / f"{key['a']}.whole", (1, 1))
    os.utime(folder / f"{key['b']}.whole", (2, 2))
    IndexedDataset("memory://bucket/a", storage).close()  # used now
    with IndexedDataset("memory://bucket/c", storage):
        assert kept() == "ac"
        assert not (folder / f"{key['b']}.lock").exists()
    tiny = StorageCache(str(folder), 48, 1 << 20, index_limit_bytes=1)
    with IndexedDataset("memory://bucket/b", tiny) as alone:
        assert kept() == "b"
        assert alone.document(7).tolist() == first.document(7).tolist() == DOCUMENTS[7]


@pytest.mark.parametrize("mode", [0o2770, 0o777])
def test_users_share_a_cache_as_they_share_its_folder(
    remote: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """Cached files get the permissions of the folder; files of other users are not changed."""
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    before = os.umask(0o077)
    try:
        with IndexedDataset(remote[1], cache(tmp_path)) as dataset:
            dataset.document(7)
    finally:
        os.umask(before)
    modes = {path.suffix: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    read, write = (0o640, 0o660) if mode == 0o2770 else (0o644, 0o666)
    assert modes == {".block": read, ".whole": read, ".lock": write, ".bytes": write}

    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError

    theirs = sorted(blocks(tmp_path))
    for name in ("utime", "fchmod"):
        monkeypatch.setattr(os, name, refuse)
    unlink = Path.unlink
    monkeypatch.setattr(
        Path, "unlink", lambda self, **more: (refuse if self in theirs else unlink)(self, **more)
    )
    with IndexedDataset(remote[1], cache(tmp_path, limit=100)) as dataset:
        assert [dataset.document(n).tolist() for n in range(60)] == DOCUMENTS
    assert set(theirs) <= set(blocks(tmp_path))


def test_a_file_url_is_a_path_unless_there_is_a_cache_for_it(
    write_dataset: Write, tmp_path: Path
) -> None:
    prefix = write_dataset(DOCUMENTS)
    with IndexedDataset(f"file://{prefix}") as near:
        assert near.tokens.tolist() == IndexedDataset(prefix).tokens.tolist()
        assert isinstance(pickle.loads(pickle.dumps(near)).tokens, np.ndarray)
    with pytest.raises(DataError, match=rf"^no dataset at {prefix}x: {prefix}x\.idx and"):
        IndexedDataset(f"file://{prefix}x")
    with pytest.raises(DataError, match=r"^memory://d is a URL and needs a local cache folder"):
        IndexedDataset("memory://d")
    with IndexedDataset(f"file://{prefix}", cache(tmp_path)) as far:
        assert far.document(7).tolist() == DOCUMENTS[7]
    assert blocks(tmp_path)


def test_several_processes_share_a_cache(write_dataset: Write, tmp_path: Path) -> None:
    """With space for few blocks, so that each process removes blocks of the others."""
    prefix = write_dataset(DOCUMENTS)
    code = f"""
import numpy as np
from megatron_data import IndexedDataset
from megatron_data.sources import StorageCache
local = IndexedDataset({prefix!r})
far = IndexedDataset("file://" + {prefix!r}, StorageCache({str(tmp_path / "cache")!r}, 48, 300))
random = np.random.default_rng()
for number in random.integers(0, len(local), 1500).tolist():
    assert far[number].tolist() == local[number].tolist()
"""
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait(120) for process in running] == [0, 0, 0]
    assert sum(path.stat().st_size for path in blocks(tmp_path)) <= 300
    assert not list((tmp_path / "cache").glob(".*"))
