"""Locks of a directory, which the kernel releases when the process that holds them ends.

A save holds `writer_lock` while it writes a checkpoint. A run may hold `run_lock` as long as it
lives. Readers hold no lock.
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
    """Another process holds the lock of a directory.

    Attributes:
        directory: The directory.
        holder: The content of the lock file in one line: process id, host, start time, and the
            command if known.
    """

    def __init__(self, message: str, directory: Path, holder: str) -> None:
        super().__init__(message)
        self.directory, self.holder = directory, holder


@contextmanager
def writer_lock(directory: Path, timeout: float = 2.0) -> Iterator[None]:
    """Holds the directory for a save.

    Raises:
        DirectoryInUseError: Another process still holds the lock after ``timeout`` seconds. The
            default of 2 seconds tolerates `is_being_written` of a reader and a process that is just
            ending.
    """
    with _held(
        directory,
        LOCK,
        "{directory} is being written by another process ({holder}); use a separate directory "
        "for each run",
        timeout,
    ):
        yield


@contextmanager
def run_lock(directory: str | Path, command: str = "", timeout: float = 2.0) -> Iterator[None]:
    """Holds the directory for a run that saves into it. Call it in one process of the run.

    Hold it also while the run searches for the checkpoint to continue from. Saves and loads of
    `CheckpointStore` do not check it, so a program with one run at a time does not need it.

    Args:
        directory: The directory, which is created if it does not exist.
        command: The command of the run, for the error of other processes.
        timeout: Seconds to wait for another process to release the lock. Defaults to 2.

    Raises:
        DirectoryInUseError: Another process still holds the lock after ``timeout`` seconds.
        OSError: The directory cannot be created or written to.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with _held(
        directory,
        RUN_LOCK,
        "{directory} is in use by another run ({holder}); wait until it ends, or use a separate "
        "directory for each run",
        timeout,
        command,
    ):
        yield


def is_being_written(directory: Path) -> bool:
    """Returns whether a process holds the writer lock of the directory."""
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
    """Holds a lock file; ``refusal`` is a format string with ``directory`` and ``holder``."""
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
            # Closing does not unlock if a child process was forked and has the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _this_process(command: str) -> str:
    since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    description = f"pid {os.getpid()} on {socket.gethostname()} since {since}"
    return f"{description}: {' '.join(command.split())}" if command else description


def _holder(descriptor: int) -> str:
    """Returns the description of the holder, reduced to printable characters."""
    text = os.pread(descriptor, _LONGEST_HOLDER, 0).decode(errors="replace")
    return "".join(c if c.isprintable() else " " for c in text).strip() or "unknown"


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
