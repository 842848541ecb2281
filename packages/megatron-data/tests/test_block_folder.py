"""Tests of the shared folder of blocks: its limit, and how rarely it is listed."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_data.sources.block_folder import BlockFolder, adding, locked, remove_oldest

BLOCK = b"0123456789ab"
SIZE = len(BLOCK) + 4


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the added bytes at every listing of the folder."""
    listed: list[int] = []
    remove = BlockFolder._remove_oldest

    def counting(folder: BlockFolder, added: int) -> int:
        listed.append(added)
        return remove(folder, added)

    monkeypatch.setattr(BlockFolder, "_remove_oldest", counting)
    return listed


def kept(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.block"))


def counted(folder: Path) -> int:
    return int.from_bytes((folder / "blocks.bytes").read_bytes(), "little")


def add(folder: BlockFolder, first: int, last: int) -> None:
    for number in range(first, last):
        assert folder.add(str(number), BLOCK)[: len(BLOCK)] == BLOCK


def test_a_folder_is_listed_once_for_many_blocks(tmp_path: Path, listings: list[int]) -> None:
    """It is listed once at the start, and then once per freed fraction of the limit."""
    folder = BlockFolder(tmp_path / "b" / "c", 160 * SIZE)
    add(folder, 0, 160)
    assert len(listings) == 1
    assert kept(tmp_path / "b" / "c") == counted(tmp_path / "b" / "c") == 160 * SIZE
    for number in range(160, 500):
        add(folder, number, number + 1)
        assert kept(tmp_path / "b" / "c") == counted(tmp_path / "b" / "c") <= 160 * SIZE
    assert len(listings) == 1 + 340 // 11 + 1
    assert folder.get("499", len(BLOCK)) is not None
    assert folder.get("300", len(BLOCK)) is None


def test_the_least_recently_used_blocks_are_removed(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, 32 * SIZE)
    add(folder, 0, 32)
    for number in range(32):
        os.utime(tmp_path / f"{number}.block", (number, number))
    assert folder.get("0", len(BLOCK)) is not None  # used now
    add(folder, 32, 33)
    left = {int(path.stem) for path in tmp_path.glob("*.block")}
    assert left == {0, *range(4, 33)}


def test_two_readers_share_the_recorded_size(tmp_path: Path, listings: list[int]) -> None:
    """Two readers share the size that is recorded in the folder."""
    one, other = (BlockFolder(tmp_path, 40 * SIZE) for _ in range(2))
    for number in range(0, 200, 2):
        add(one, number, number + 1)
        add(other, number + 1, number + 2)
        assert kept(tmp_path) <= 40 * SIZE
    for number in range(0, 200, 2):  # a block that both add counts once
        add(one, number, number + 1)
        add(other, number, number + 1)
        assert kept(tmp_path) == counted(tmp_path)
    assert len(listings) < 150


def test_blocks_of_concurrent_processes_are_all_counted(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from megatron_data.sources.block_folder import BlockFolder
folder = BlockFolder(Path({str(tmp_path)!r}), 1 << 30)
sys.stdin.read()
for number in range(1500):
    folder.add(f"{{sys.argv[1]}}-{{number}}", b"x")
"""
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(one)], stdin=subprocess.PIPE)
        for one in range(2)
    ]
    for process in running:
        assert process.stdin is not None
        process.stdin.close()
    assert [process.wait(120) for process in running] == [0, 0]
    assert counted(tmp_path) == kept(tmp_path) == 2 * 1500 * 5


def test_deleted_blocks_are_detected_at_the_next_listing(
    tmp_path: Path, listings: list[int]
) -> None:
    folder = BlockFolder(tmp_path / "c", 32 * SIZE)
    add(folder, 0, 32)
    for number in range(20):
        (tmp_path / "c" / f"{number}.block").unlink()
    add(
        folder, 32, 33
    )  # the recorded size reaches the limit, but the real size does not, so nothing is removed
    assert len(listings) == 2
    assert kept(tmp_path / "c") == counted(tmp_path / "c") == 13 * SIZE
    for path in (tmp_path / "c").iterdir():
        path.unlink()
    (tmp_path / "c").rmdir()
    add(folder, 0, 1)
    assert kept(tmp_path / "c") == counted(tmp_path / "c") == SIZE


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 8])
def test_a_damaged_size_is_corrected(tmp_path: Path, content: bytes) -> None:
    folder = BlockFolder(tmp_path, 8 * SIZE)
    add(folder, 0, 8)
    (tmp_path / "blocks.bytes").write_bytes(content)
    add(folder, 8, 9)
    assert kept(tmp_path) == counted(tmp_path) <= 8 * SIZE


def test_a_listing_keeps_blocks_of_exactly_the_limit_and_does_not_count_one_twice(
    tmp_path: Path, listings: list[int]
) -> None:
    folder = BlockFolder(tmp_path, 8 * SIZE)
    add(folder, 0, 7)
    for number in (7, 3):
        (tmp_path / "blocks.bytes").unlink()
        add(folder, number, number + 1)
        assert kept(tmp_path) == counted(tmp_path) == 8 * SIZE
    assert len(listings) == 3
    assert (tmp_path / "blocks.bytes").stat().st_size == 8  # other versions read it, too


def test_a_lock_holds_until_its_end_and_folders_are_made(tmp_path: Path) -> None:
    lock, path = tmp_path / "a" / "b" / "c.lock", tmp_path / "d" / "e" / "f.whole"
    with locked(lock), lock.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with lock.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with adding(path) as file:
        file.write(BLOCK)
    assert path.read_bytes() == BLOCK


def test_a_damaged_block_is_replaced_and_counted_once(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, 8 * SIZE)
    add(folder, 0, 3)
    for content in (b"short", BLOCK * 3, b""):
        (tmp_path / "1.block").write_bytes(content)
        assert folder.get("1", len(BLOCK)) is None
        add(folder, 1, 2)
        assert folder.get("1", len(BLOCK)) is not None
        assert counted(tmp_path) >= kept(tmp_path)
    assert kept(tmp_path) == 3 * SIZE
    add(folder, 3, 20)
    assert kept(tmp_path) == counted(tmp_path) <= 8 * SIZE


def test_an_interrupted_process_does_not_record_too_small_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = BlockFolder(tmp_path, 8 * SIZE)
    add(folder, 0, 2)

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stopped)
        with pytest.raises(KeyboardInterrupt):
            folder.add("2", BLOCK)
    assert not list(tmp_path.glob(".*"))
    assert counted(tmp_path) >= kept(tmp_path) == 2 * SIZE
    add(folder, 3, 30)
    assert kept(tmp_path) == counted(tmp_path) <= 8 * SIZE


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        BlockFolder(tmp_path / "file", 8).add("0", BLOCK)


def test_files_that_are_gone_when_they_are_looked_at_are_ignored(tmp_path: Path) -> None:
    """Another process has removed them; a link to nowhere is such a file."""
    for name in ("gone.block", ".gone.1.1", "gone.whole"):
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
    folder = BlockFolder(tmp_path, 4 * SIZE)
    add(folder, 0, 6)
    assert 0 < counted(tmp_path) <= 4 * SIZE
    for name in ("a", "b"):
        (tmp_path / f"{name}.whole").write_bytes(b"12345")
        os.utime(tmp_path / f"{name}.whole", (ord(name), ord(name)))
    remove_oldest(tmp_path / "b.whole", 10)
    assert (tmp_path / "a.whole").exists()
    remove_oldest(tmp_path / "b.whole", 9)
    assert not (tmp_path / "a.whole").exists() and (tmp_path / "b.whole").exists()
