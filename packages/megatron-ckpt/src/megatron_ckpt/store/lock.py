"""One writer per checkpoint directory, by a lock that the kernel releases when its holder dies."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ckpt.errors import CheckpointError

LOCK = ".lock"


@contextmanager
def writer_lock(directory: Path, patience: float = 2.0) -> Iterator[None]:
    """Hold the directory's lock.

    Raises:
        CheckpointError: another process still holds it after ``patience`` seconds (so long that
            neither a reader's `is_being_written` nor a process that is just dying stops a save).
    """
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        deadline = time.monotonic() + patience
        while not _try_lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                raise CheckpointError(
                    f"{directory} is being written by another process ({holder or 'unknown'}): "
                    "give each run its own directory"
                )
            time.sleep(0.02)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        try:
            yield
        finally:
            # Closing would not do if a child process was forked meanwhile: it has the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def is_being_written(directory: Path) -> bool:
    """Whether some process holds the directory's lock now."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
