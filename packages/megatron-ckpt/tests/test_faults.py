"""A save that fails at any call leaves either the former checkpoint or all of the new one."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from megatron_ckpt import (
    CheckpointError,
    CheckpointStore,
    CorruptCheckpointError,
    Retention,
    View,
    run_lock,
)
from megatron_ckpt.store import lock
from megatron_ckpt.store.durable import create_file, sync_directory, write_all

NAMES = ("a", "a.exp_avg", "b.c")


def state(value):
    tensors = {name: torch.full((5, 3), float(value)) for name in NAMES}
    return {**{name: [View.whole(t)] for name, t in tensors.items()}, "n": value}


def save(folder, iteration, value=None, **settings):
    value = iteration if value is None else value
    files = {"tokenizer/t.json": b"%05d" % value, "notes": b"notes"}
    CheckpointStore(folder).save(iteration, state(value), files=files, **settings)


def loaded(folder):
    """Returns the one value of everything in the newest checkpoint; fails for a mix."""
    into = state(0)
    views = {name: into[name] for name in NAMES}
    values = CheckpointStore(folder).load(None, views)
    attached = int(values.checkpoint.read_file("tokenizer/t.json"))
    seen = {values["n"], attached, *(v for n in NAMES for v in into[n][0].tensor.unique().tolist())}
    assert len(seen) == 1, f"mixed: {seen}"
    return seen.pop()


SCENES = {
    "first": ((), lambda folder: save(folder, 2), {2}),
    "next": ((1,), lambda folder: save(folder, 2), {1, 2}),
    "replacing": ((1,), lambda folder: save(folder, 1, 9, replace=True), {1, 9}),
    "retaining": (
        (1, 2, 3),
        lambda folder: save(folder, 4, retention=Retention(latest=1)),
        {3, 4},
    ),
}


@pytest.mark.parametrize(
    "every", [5, pytest.param(1, marks=pytest.mark.slow)], ids=["sample", "each"]
)
@pytest.mark.parametrize("power_lost", [False, True], ids=["killed", "power lost"])
@pytest.mark.parametrize("scene", SCENES)
def test_dying_at_any_call_leaves_one_complete_checkpoint(
    disk, death, tmp_path, scene, power_lost, every, caplog
):
    before, act, allowed = SCENES[scene]
    origin = tmp_path / "origin"
    origin.mkdir()
    for iteration in before:
        save(origin, iteration)
    folder = shutil.copytree(origin, tmp_path / "rehearsal")
    with disk().installed() as rehearsal:
        act(folder)
    assert len(rehearsal.log) > 25
    seen = set()
    for at in range(len(rehearsal.log))[::-every]:  # the last calls come after the commit
        folder = shutil.copytree(origin, tmp_path / str(at))
        failing = disk(at)
        with failing.installed(), pytest.raises(death):
            act(folder)
        if power_lost:
            failing.lose_power(folder)
        if before or CheckpointStore(folder).latest_iteration() is not None:
            seen.add(loaded(folder))
        with disk().installed():
            save(folder, 8)
        assert loaded(folder) == 8
        rest = [p.name for p in folder.iterdir() if "-" in p.name and p.suffix != ".txt"]
        assert not [name for name in rest if name.startswith("iter_")], rehearsal.log[at]
        assert not list(folder.glob("*.tmp-*")), rehearsal.log[at]
        shutil.rmtree(folder)
    assert seen == allowed


def test_files_are_synced_before_they_are_renamed(disk, tmp_path):
    with disk().installed() as recorded:
        save(tmp_path / "run", 1)
    names = [name for name, _ in recorded.log]
    rename = names.index("rename")
    opened = [target for name, target in recorded.log[:rename] if name == "open"]
    assert [t.rpartition("/")[2] for t in opened[1:]] == [
        "model-00000-of-00001.safetensors",
        "optim-00000-of-00001.safetensors",
        "state.json",
        "t.json",
        "notes",
        "MANIFEST.json",
    ]
    # Each file, and the directories before and after the manifest.
    assert names[:rename].count("fsync") >= len(opened) - 1 + 3
    assert names[rename - 1] == "fsync" and names[rename + 1] == "fsync"


@pytest.mark.parametrize("iteration", [1, 2], ids=["replacing", "next"])
def test_a_full_disk_fails_the_save_with_its_reason_and_leaves_the_former(
    disk, tmp_path, iteration
):
    save(tmp_path / "run", 1)
    shutil.copytree(tmp_path / "run", tmp_path / "rehearsal")
    with disk().installed() as rehearsal:
        save(tmp_path / "rehearsal", iteration, 9, replace=True)
    rename = [name for name, _ in rehearsal.log].index("rename")
    for at, (name, _) in enumerate(rehearsal.log[:rename]):
        if name not in ("write", "open"):
            continue
        with disk(at, full=True).installed(), pytest.raises(OSError, match="No space left"):
            save(tmp_path / "run", iteration, 9, replace=True)
        assert loaded(tmp_path / "run") == 1
        assert not list((tmp_path / "run").glob("*.tmp-*"))


def test_a_full_disk_after_the_commit_is_a_warning(disk, tmp_path, caplog):
    with disk().installed() as rehearsal:
        save(tmp_path / "rehearsal", 1)
    rename = [name for name, _ in rehearsal.log].index("rename")
    with disk(rename + 1, full=True).installed():
        save(tmp_path / "run", 1)
    assert "is saved, but cleaning up failed" in caplog.text
    assert loaded(tmp_path / "run") == 1


def test_every_flipped_bit_is_found_in_every_file(tmp_path):
    save(tmp_path, 1)
    folder = CheckpointStore(tmp_path).path(1)
    generator = random.Random(1)
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        whole = path.read_bytes()
        for _ in range(40):
            bit = generator.randrange(8 * len(whole))
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            with pytest.raises(CorruptCheckpointError, match=path.name):
                into = state(0)
                store = CheckpointStore(tmp_path)
                found = store.load(1, {name: into[name] for name in NAMES}).checkpoint
                raise CorruptCheckpointError("; ".join(found.verify()))
        path.write_bytes(whole)
    assert loaded(tmp_path) == 1


def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(tmp_path, caplog):
    save(tmp_path, 1)
    save(tmp_path, 2)
    file = CheckpointStore(tmp_path).path(2) / "optim-00000-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    assert loaded(tmp_path) == 1
    assert "iter_0000002 is damaged and skipped" in caplog.text
    with pytest.raises(CorruptCheckpointError, match="digest differs"):
        CheckpointStore(tmp_path).load(2, {n: v for n, v in state(0).items() if n in NAMES})


def test_truncated_files_are_torn(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    for path in [p for p in CheckpointStore(tmp_path).path(2).rglob("*") if p.is_file()]:
        whole = path.read_bytes()
        for size in (0, 1, len(whole) // 2, len(whole) - 1):
            os.truncate(path, size)
            assert loaded(tmp_path) == 1
            path.write_bytes(whole)
    assert loaded(tmp_path) == 2


def test_a_second_writer_is_refused_and_the_first_is_named(tmp_path):
    save(tmp_path, 1)
    script = """
        import sys, time
        from pathlib import Path
        from megatron_ckpt.store.lock import writer_lock
        with writer_lock(Path(sys.argv[1])):
            print("held", flush=True)
            time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=f"by another process \\(pid {other.pid} on "):
            save(tmp_path, 2)
        assert loaded(tmp_path) == 1
        other.kill()
    save(tmp_path, 2)  # the kernel released the lock
    assert loaded(tmp_path) == 2


def test_a_lock_that_is_released_while_another_waits_for_it_is_taken(tmp_path, monkeypatch):
    first = run_lock(tmp_path)
    first.__enter__()
    waits = []

    def release(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            first.__exit__(None, None, None)

    monkeypatch.setattr(lock.time, "sleep", release)
    with run_lock(tmp_path, timeout=60.0):
        assert len(waits) == 2
        with pytest.raises(CheckpointError, match="is in use by another run"):
            run_lock(tmp_path, timeout=0.0).__enter__()


def test_the_file_of_a_lock_names_its_last_holder_only(tmp_path):
    for command in ("train " + "x" * 200, ""):
        with run_lock(tmp_path, command):
            text = (tmp_path / ".run.lock").read_text()
            assert text.startswith(f"pid {os.getpid()} on ") and text.count("\n") == 1
    assert text.endswith(" UTC\n")


def test_a_lock_is_released_while_a_forked_child_has_its_file(tmp_path):
    read, write = os.pipe()
    with run_lock(tmp_path):
        child = os.fork()
        if child == 0:  # the child has the descriptor of the lock until it ends
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    try:
        with run_lock(tmp_path, timeout=0.0):
            pass
    finally:
        os.close(write)
        os.waitpid(child, 0)


def test_an_unfinished_save_is_not_reported_while_its_writer_lives(tmp_path, caplog):
    from megatron_ckpt.store.lock import writer_lock

    save(tmp_path, 1)
    (tmp_path / "iter_0000002.tmp-0a").mkdir()
    with writer_lock(tmp_path):
        assert CheckpointStore(tmp_path).latest_iteration() == 1
    assert not caplog.messages
    assert CheckpointStore(tmp_path).latest_iteration() == 1
    assert "unfinished" in caplog.text
    (tmp_path / "iter_0000001").rename(tmp_path / "elsewhere")
    assert CheckpointStore(tmp_path).latest_iteration() is None
    assert caplog.messages[-1].endswith("0a is an unfinished save; there is no other")


SAVER = """
    import itertools, sys, torch
    from megatron_ckpt import CheckpointStore, Retention, View
    store = CheckpointStore(sys.argv[1])
    for i in itertools.count((store.latest_iteration() or 0) + 1):
        w = torch.full((300, 1000), float(i))
        state = {n: [View.whole(w)] for n in ("a", "a.exp_avg", "b.c")}
        files = {"tokenizer/t.json": str(i).encode()}
        store.save(i, {**state, "n": i}, files=files, retention=Retention(latest=2))
        print(i, flush=True)
"""


def test_sigkill_at_random_times_loses_no_completed_save(tmp_path):
    generator = random.Random(2)
    reported = 0
    for _ in range(3):
        command = [sys.executable, "-c", textwrap.dedent(SAVER), str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
            run.stdout.readline()
            time.sleep(generator.uniform(0.05, 0.4))
            run.send_signal(signal.SIGKILL)
            lines = run.stdout.read().split()
        reported = max([reported, *map(int, lines)])
        into = {n: [View.whole(torch.zeros(300, 1000))] for n in NAMES}
        found = CheckpointStore(tmp_path).load(None, into)
        assert found["n"] == found.iteration >= reported
        assert all((into[n][0].tensor == found["n"]).all() for n in NAMES)
        assert found.checkpoint.verify() == []


def damage_manifest(folder):
    path = folder / "MANIFEST.json"
    path.write_bytes(path.read_bytes().replace(b"iteration", b"iteratiom", 1))


def test_only_damaged_checkpoints_are_an_error(tmp_path):
    store = CheckpointStore(tmp_path)
    assert store.latest_checkpoint() is None
    (tmp_path / "iter_0000003.tmp-0a").mkdir()  # never completed, so there is no checkpoint
    assert store.latest_checkpoint() is None and store.latest_iteration() is None
    save(tmp_path, 1)
    save(tmp_path, 2)
    damage_manifest(store.path(2))
    assert store.latest_checkpoint().iteration == 1
    (tmp_path / "alone" / "iter_0000004").mkdir(parents=True)
    with pytest.raises(CorruptCheckpointError, match=r"it has no MANIFEST\.json; restore or move"):
        CheckpointStore(tmp_path / "alone").latest_checkpoint()
    damage_manifest(store.path(1))
    words = r"damaged checkpoints and no complete one: .*digest differs.* .and 1 more"
    for choose in (store.latest_checkpoint, store.latest_iteration):
        with pytest.raises(CorruptCheckpointError, match=words):
            choose()
    for path in (store.path(1), store.path(2)):
        (path / "MANIFEST.json").unlink()
    with pytest.raises(CorruptCheckpointError, match="no complete one"):
        store.latest_checkpoint()


def test_a_checkpoint_of_another_program_is_not_reported_as_damaged(tmp_path):
    (tmp_path / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="holds checkpoints of Megatron-LM"):
        CheckpointStore(tmp_path).latest_checkpoint()


def test_a_write_that_finds_the_disk_full_names_the_file(tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # like write(2), without a file name

    monkeypatch.setattr(os, "write", full)
    with (
        pytest.raises(OSError, match="No space left on device") as caught,
        create_file(tmp_path / "weights") as descriptor,
    ):
        write_all(descriptor, b"123")
    assert caught.value.filename == str(tmp_path / "weights")


@pytest.mark.parametrize("call", ["pwrite", "ftruncate"])
def test_a_lock_that_finds_the_disk_full_names_its_file_and_is_released(
    tmp_path, monkeypatch, call
):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left") as caught, run_lock(tmp_path):
            pass
    assert caught.value.filename == str(tmp_path / ".run.lock")
    with run_lock(tmp_path, timeout=0.0), pytest.raises(OSError, match="mine") as caught:
        raise OSError(errno.EIO, "mine")  # an error of the run itself, not of the lock
    assert caught.value.filename is None


def test_a_folder_whose_names_cannot_be_synced_is_named(tmp_path, monkeypatch):
    def fault(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fault)
    with pytest.raises(OSError, match="Input/output error") as caught:
        sync_directory(tmp_path)
    assert caught.value.filename == str(tmp_path)
