"""Full disks, missing permissions and ports in use give one line each."""

import contextlib
import ctypes
import errno
import json
import os
import shutil
import socket
import subprocess
import sys

import pytest

from . import test_errors
from .test_errors import DATA, PREPROCESS, TRAIN, call, check

prepared = test_errors.prepared  # the fixture


@pytest.mark.parametrize(
    "command",
    [
        f"{TRAIN} {DATA} --save full",
        "megatron-data preprocess --tokenizer-model bytes --input fine.jsonl --output-prefix full",
    ],
)
def test_a_full_disk_gives_one_line_and_leaves_no_incomplete_file(
    prepared, command, capsys, monkeypatch
):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (prepared / "fine.jsonl").write_text('{"text": "fine"}\n')
    monkeypatch.chdir(prepared)
    monkeypatch.setattr(os, "fsync", full)
    status = call(command)
    check(command, status, capsys.readouterr().err, ["No space left on device"])
    assert not list(prepared.glob("full/iter_*")) and not list(prepared.glob("full*.bin"))


@pytest.fixture
def small_disk(tmp_path):
    """Returns a folder with a separate file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting a file system is not permitted")
    yield folder
    # A traceback may still hold a file that is open.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize(
    ("command", "room", "file"),
    [
        (f"{TRAIN} {DATA} --hidden-size 64 --save {{}}/run", 64, "run/"),
        (f"{TRAIN} {DATA} --save {{}}/run", 0, "run/.run.lock"),
        (f"{TRAIN} {DATA} --tensorboard-dir {{}}/board", 0, "board/events.out.tfevents."),
        (f"{TRAIN} {DATA} --sample-order compat --data-cache-path {{}}/cache", 0, "cache/"),
        (
            "megatron-data preprocess --tokenizer-model bytes --input large.jsonl "
            "--output-prefix {}/x",
            64,
            ".x.parts/",
        ),
        ("megatron-ckpt convert --to-hf trained {}/exported", 24, "exported"),
    ],
    ids=["save", "lock", "tensorboard", "cache", "preprocess", "convert"],
)
def test_a_full_file_system_gives_one_line(
    prepared, small_disk, command, room, file, capsys, monkeypatch
):
    """Checks the error of the kernel if ``room`` of 64 KiB are free."""
    line = json.dumps({"text": "x" * 1000}) + "\n"
    (prepared / "large.jsonl").write_text(line * 100)
    monkeypatch.chdir(prepared)
    (small_disk / "other").write_bytes(bytes((64 - room) * 1024))
    command = command.format(small_disk)
    status = call(command)
    words = ["No space left on device", f"{small_disk}/{file}"]
    check(command, status, capsys.readouterr().err, words)
    left = [path for path in small_disk.rglob("*") if path.is_file() and path.name != "other"]
    assert not [path for path in left if path.suffix in (".idx", ".json", ".safetensors")], left


@contextlib.contextmanager
def without_privileges():
    """Makes file permissions apply to this thread and its children, even for root (capget(2))."""
    override, search = 1, 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    library = ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
    assert library.capget(header, sets) == 0
    before = sets[0]
    sets[0] = before & ~(1 << override | 1 << search)
    assert library.capset(header, sets) == 0
    try:
        yield
    finally:
        sets[0] = before
        assert library.capset(header, sets) == 0


FORBIDDEN = {
    "a corpus": (f"{PREPROCESS} --input secret", ["secret: Permission denied"]),
    "a folder for tokens": (
        "megatron-data preprocess --tokenizer-model bytes --input fine.jsonl --output-prefix "
        "locked/x",
        ["locked/", "Permission denied"],
    ),
    "a folder for a run": (f"{TRAIN} {DATA} --save locked/run", ["locked", "Permission denied"]),
    "tokens": (f"{TRAIN} --tokenizer-model bytes --data-path hidden", ["hidden", "denied"]),
    "a file of settings": (f"{TRAIN} {DATA} --config secret", ["secret: Permission denied"]),
    "a secret": (
        "megatron-infer serve --load trained --token-file secret",
        ["secret: Permission denied"],
    ),
    "a checkpoint": ("megatron-ckpt verify sealed", ["sealed", "Permission denied"]),
}


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities exist only on Linux")
@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_missing_permission_gives_one_line(prepared, what, capsys, monkeypatch):
    command, parts = FORBIDDEN[what]
    (prepared / "fine.jsonl").write_text('{"text": "fine"}\n')
    (prepared / "secret").write_text("secret")
    (prepared / "locked").mkdir(exist_ok=True)
    for suffix in (".bin", ".idx"):
        shutil.copy(prepared / f"good{suffix}", prepared / f"hidden{suffix}")
    if not (prepared / "sealed").exists():
        shutil.copytree(prepared / "trained", prepared / "sealed")
    modes = {"secret": 0, "locked": 0o500, "hidden.bin": 0, "hidden.idx": 0}
    modes |= {str(path): 0 for path in (prepared / "sealed").glob("iter_*/*")}
    for name, mode in modes.items():
        (prepared / name).chmod(mode)
    monkeypatch.chdir(prepared)
    try:
        with without_privileges():
            status = call(command)
    finally:
        for name in modes:
            (prepared / name).chmod(0o700)
    check(command, status, capsys.readouterr().err, parts)
    assert not list((prepared / "locked").iterdir())


def test_a_port_in_use_gives_one_line(prepared, capsys, monkeypatch):
    monkeypatch.chdir(prepared)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = f"megatron-infer serve --load trained --port {port}"
        status = call(command)
    check(command, status, capsys.readouterr().err, [str(port), "in use"])
