"""What reaches the disk: the order in which contents, names and folders are synced."""

import errno
import os
import stat
import sys
from pathlib import Path

import pytest
import torch
from megatron_ckpt import CheckpointStore, View
from megatron_ckpt.store import durable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def synced(tmp_path, monkeypatch):
    """Returns the paths below the folder of the test in the order of their syncs."""
    paths, sync = [], os.fsync

    def record(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        paths.append(str(path.relative_to(tmp_path)))
        sync(descriptor)

    monkeypatch.setattr(durable.os, "fsync", record)
    return paths


def test_a_replaced_file_is_synced_before_its_name(tmp_path, synced):
    path = tmp_path / "latest"
    for content in (b"one", b"other"):
        durable.replace_file(path, content)
        assert path.read_bytes() == content
    assert synced == [f"latest.tmp-{os.getpid()}", "."] * 2
    assert [each.name for each in tmp_path.iterdir()] == ["latest"]


def test_a_folder_is_synced_from_its_inside_before_its_name(tmp_path, synced):
    with durable.create_folder(tmp_path / "made") as folder:
        (folder / "inner").mkdir()
        with durable.create_file(folder / "inner" / "file") as descriptor:
            durable.write_all(descriptor, b"x" * 10)
    name = folder.name
    assert synced == [f"{name}/inner/file", f"{name}/inner", name, "."]
    assert (tmp_path / "made/inner/file").read_bytes() == b"x" * 10


def test_a_renamed_path_is_synced(tmp_path, synced):
    (tmp_path / "a").mkdir()
    durable.rename(tmp_path / "a", tmp_path / "b")
    assert synced == ["."] and (tmp_path / "b").is_dir()


def test_nothing_is_left_of_a_folder_that_was_not_finished(tmp_path, synced):
    with pytest.raises(KeyboardInterrupt), durable.create_folder(tmp_path / "made"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [] and synced == []


def test_the_error_of_a_folder_is_raised_although_the_folder_is_gone(tmp_path):
    with pytest.raises(KeyboardInterrupt), durable.create_folder(tmp_path / "made") as folder:
        folder.rmdir()
        raise KeyboardInterrupt


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path):
    with durable.create_folder(tmp_path / "made") as folder:
        pass
    (tmp_path / "made").rmdir()
    folder.mkdir()  # as a process leaves it that is killed before the end
    with durable.create_folder(tmp_path / "made"):
        assert not folder.exists()


def test_the_remains_of_a_killed_replacement_are_overwritten(tmp_path):
    """Another process had the same number before."""
    (tmp_path / f"latest.tmp-{os.getpid()}").write_bytes(b"a longer content")
    durable.replace_file(tmp_path / "latest", b"20")
    assert (tmp_path / "latest").read_bytes() == b"20"
    assert [each.name for each in tmp_path.iterdir()] == ["latest"]


def test_leftovers_are_removed_unless_they_are_locked_or_have_other_names(tmp_path):
    left = tmp_path / "made.tmp-0123456789ab"
    others = [tmp_path / name for name in ("made.tmp-0123456789a", "mode.tmp-0123456789ab")]
    for path in (left, *others):
        path.mkdir()
    held = durable._lock_folder(left)
    with durable.create_folder(tmp_path / "made") as folder:
        assert left.exists() and folder.exists()  # another process writes it
    os.close(held)
    (tmp_path / "made").rmdir()
    with durable.create_folder(tmp_path / "made"):
        assert not left.exists() and all(path.exists() for path in others)


def test_a_file_is_made_once_and_errors_name_it(tmp_path, monkeypatch):
    path = tmp_path / "file"
    with durable.create_file(path):
        pass
    with pytest.raises(FileExistsError), durable.create_file(path):
        pass
    with pytest.raises(OSError, match="No space left") as full, durable.add_path_to_errors(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert full.value.filename == str(path)
    with pytest.raises(OSError) as own, durable.add_path_to_errors(path):
        raise OSError(errno.ENOENT, "gone", "elsewhere")
    assert own.value.filename == "elsewhere"
    with pytest.raises(OSError) as bare, durable.add_path_to_errors(path):
        raise OSError("no number")
    assert bare.value.filename is None


def test_only_folders_are_locked_and_synced_as_folders(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    for name in ("file", "link", "nowhere"):
        assert durable._lock_folder(tmp_path / name) is None
    with pytest.raises(NotADirectoryError):
        durable.sync_directory(tmp_path / "file")


def test_a_folder_is_made_below_folders_that_do_not_exist(tmp_path):
    with durable.create_folder(tmp_path / "a" / "b" / "made"):
        pass
    assert [each.name for each in (tmp_path / "a" / "b").iterdir()] == ["made"]
    CheckpointStore(tmp_path / "c" / "d" / "run").save(1, {"n": 1})
    assert CheckpointStore(tmp_path / "c" / "d" / "run").latest_iteration() == 1


def test_a_folder_that_was_filled_in_the_meantime_is_named_and_kept(tmp_path):
    target = tmp_path / "made"
    with pytest.raises(OSError, match="not empty") as caught, durable.create_folder(target):
        target.mkdir()
        (target / "file").touch()
    assert str(caught.value.filename) == str(target)
    assert [each.name for each in tmp_path.rglob("*")] == ["made", "file"]


def test_a_leftover_that_cannot_be_removed_stays(tmp_path, monkeypatch):
    def busy(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(errno.EBUSY, "busy", str(path))

    left = tmp_path / "made.tmp-0123456789ab"
    left.mkdir()
    monkeypatch.setattr(durable.shutil, "rmtree", busy)
    with durable.create_folder(tmp_path / "made"):
        pass
    assert left.exists() and (tmp_path / "made").exists()


def test_a_folder_that_was_replaced_before_it_was_locked_is_not_used(tmp_path, monkeypatch):
    lock, lost = durable._lock_folder, []

    def late(folder):
        held = lock(folder)
        if not lost:  # other processes removed it and made another one of its name
            lost.append(folder)
            folder.rmdir()
            folder.mkdir()
        return held

    monkeypatch.setattr(durable, "_lock_folder", late)
    before = opened()
    with durable.create_folder(tmp_path / "made") as folder:
        assert folder not in lost and opened() == before + 1
    assert [each.name for each in tmp_path.iterdir()] == ["made"]
    assert opened() == before


def test_short_writes_are_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(durable.os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    with durable.create_file(tmp_path / "file") as descriptor:
        durable.write_all(descriptor, b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_short_reads_are_continued_until_the_file_ends(tmp_path, monkeypatch):
    read = os.preadv
    monkeypatch.setattr(
        durable.os, "preadv", lambda descriptor, rest, at: read(descriptor, [rest[0][:3]], at)
    )
    (tmp_path / "file").write_bytes(b"0123456789")
    with (tmp_path / "file").open("rb") as file:
        for start, length, whole in ((0, 10, True), (2, 7, True), (2, 9, False), (10, 1, False)):
            buffer = bytearray(length)
            assert durable.read_into(file.fileno(), buffer, start) == whole
            if whole:
                assert buffer == b"0123456789"[start : start + length]


@pytest.mark.parametrize(("mask", "mode"), [(0o027, 0o640), (0o002, 0o664)])
def test_files_have_the_permissions_that_the_user_leaves(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        path = CheckpointStore(tmp_path / "run").save(1, {"w": [View.whole(torch.ones(2))]})
    finally:
        os.umask(before)
    files = [*(each for each in path.iterdir()), tmp_path / "run" / ".lock"]
    assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {mode}


def test_a_save_syncs_contents_before_names_and_the_name_before_the_pointer(tmp_path, synced):
    CheckpointStore(tmp_path / "run").save(
        1, {"w": [View.whole(torch.ones(2))]}, files={"deep/notes": b"notes"}
    )
    made = "run/" + synced[0].split("/")[1]
    assert made.startswith("run/iter_0000001.tmp-")
    names = [name.replace(made, "new") for name in synced]
    assert names == [
        *("new/model-00000-of-00001.safetensors", "new"),  # all ranks have written before
        *("new/state.json", "new/deep/notes", "new/deep", "new"),
        *("new/MANIFEST.json", "new"),
        *("run", "."),  # its final name, and that of the folder of the run
        *(f"run/latest_checkpointed_iteration.txt.tmp-{os.getpid()}", "run"),
    ]


def opened():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_descriptor_stays_open(tmp_path):
    before = opened()
    (tmp_path / "made.tmp-0123456789ab").mkdir()
    with durable.create_folder(tmp_path / "made"):
        pass
    with pytest.raises(KeyboardInterrupt), durable.create_folder(tmp_path / "other"):
        raise KeyboardInterrupt
    durable.replace_file(tmp_path / "file", b"x")
    durable.sync_tree(tmp_path)
    held = durable._lock_folder(tmp_path / "made")
    assert durable._lock_folder(tmp_path / "made") is None and opened() == before + 1
    os.close(held)
    assert opened() == before
