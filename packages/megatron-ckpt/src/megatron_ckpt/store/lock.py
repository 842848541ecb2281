"""Locks of a directory that the kernel releases when their holder dies.

Two of them, by the same call: a save holds the directory while it writes a checkpoint
(`writer_lock`), and a run may hold it for as long as it lives (`run_lock`). Readers take none.
"""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from megatron_ckpt.errors import CheckpointError
from megatron_ckpt.store.durable import add_path_to_errors

LOCK = ".lock"
RUN_LOCK = ".run.lock"
_LONGEST_HOLDER = 500


class DirectoryInUseError(CheckpointError):
    """Another process holds a directory's lock.

    Attributes:
        directory: what it holds.
        holder: what the holder wrote into the lock file, in one line: process, host, since when,
            and its command where it gave one.
    """

    def __init__(self, message: str, directory: Path, holder: str) -> None:
        super().__init__(message)
        self.directory, self.holder = directory, holder


@contextmanager
def writer_lock(directory: Path, timeout: float = 2.0) -> Iterator[None]:
    """Holds the directory for a save.

    Raises:
        DirectoryInUseError: another process still holds it after ``timeout`` seconds (so long that
            neither a reader's `is_being_written` nor a process that is just dying stops a save).
    """
    with _held(
        directory,
        LOCK,
        "{directory} is being written by another process ({holder}): give each run its own "
        "directory",
        timeout,
    ):
        yield


@contextmanager
def run_lock(directory: str | Path, command: str = "", timeout: float = 2.0) -> Iterator[None]:
    """Holds the directory for a run that saves into it; one process of the run does so.

    It has to be held while the run looks for the checkpoint to continue from, too. Saves and loads
    of `CheckpointStore` do not ask for it, so a program that has one run at a time needs none.

    Args:
        directory: made if it is not there.
        command: of the run, for the message to others.
        timeout: Seconds to wait for another process to release the lock. Defaults to 2.

    Raises:
        DirectoryInUseError: another process still holds it after ``timeout`` seconds.
        OSError: the directory cannot be made or written to.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with _held(
        directory,
        RUN_LOCK,
        "{directory} is in use by another run ({holder}): wait until it ends, or give each run its "
        "own directory",
        timeout,
        command,
    ):
        yield


def is_being_written(directory: Path) -> bool:
    """Returns whether some process holds the directory's writer lock now."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


@contextmanager
def _held(
    directory: Path, name: str, refusal: str, timeout: float, command: str = ""
) -> Iterator[None]:
    """Holds a lock file; ``refusal`` is a format of ``directory`` and ``holder``."""
    descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with add_path_to_errors(directory / name):
            deadline = time.monotonic() + timeout
            while not _try_lock(descriptor, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    holder = _holder(descriptor)
                    message = refusal.format(directory=directory, holder=holder)
                    raise DirectoryInUseError(message, directory, holder)
                time.sleep(0.02)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{_this_process(command)}\n".encode(), 0)
        try:
            yield
        finally:
            # Closing would not do if a child process was forked meanwhile: it has the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _this_process(command: str) -> str:
    since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    place = f"pid {os.getpid()} on {socket.gethostname()} since {since}"
    return f"{place}: {' '.join(command.split())}" if command else place


def _holder(descriptor: int) -> str:
    """What the holder says of itself; the file may be anybody's, so only printable characters."""
    text = os.pread(descriptor, _LONGEST_HOLDER, 0).decode(errors="replace")
    return "".join(c if c.isprintable() else " " for c in text).strip() or "unknown"


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
