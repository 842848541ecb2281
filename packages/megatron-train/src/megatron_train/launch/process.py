"""A rank seen from its parent: the process, its failure report and its output."""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from megatron_train.launch.link import FailureReport, decode_report

_CHUNK = 1 << 16
MAX_ERROR_BYTES = 1 << 16
"""Number of bytes at the end of a rank's standard error that are kept."""

CommandBuilder = Callable[[int, int | None], Sequence[str]]
"""Returns a rank's command line.

The arguments are the file descriptors of its `ParentLink` and, for rank 0 only, of the parent's
standard error."""


class RankProcess:
    """A started rank, in a process group of its own.

    Rank 0 writes to the parent's standard output. It also inherits a descriptor of the parent's
    standard error, so that its progress bar is shown in the terminal. The end of every rank's
    standard error is kept, because libraries report lost ranks there. The standard output of the
    other ranks is printed line by line after ``[rank N]``.
    """

    def __init__(self, rank: int, command: CommandBuilder, environment: Mapping[str, str]) -> None:
        self.rank = rank
        self.errors = b""
        """The newest `MAX_ERROR_BYTES` bytes of standard error."""
        self._received = b""
        self._line = b""
        self._link, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.callback(theirs.close)
            descriptors = [theirs.fileno()]
            if rank == 0:
                descriptors.append(os.dup(2))
                stack.callback(os.close, descriptors[1])
            self.process = subprocess.Popen(
                command(theirs.fileno(), descriptors[1] if rank == 0 else None),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=descriptors,
                process_group=0,  # Ctrl-C reaches only the parent, which forwards it once
            )
        self._link.setblocking(False)
        for pipe in self._pipes():
            os.set_blocking(pipe.fileno(), False)

    @property
    def report(self) -> FailureReport | None:
        """The failure report of the rank, or None if it has not sent one yet."""
        return decode_report(self._received)

    def poll(self) -> int | None:
        """Returns the exit status, or minus the signal that ended the rank; None while it runs.

        Processes that an ended rank has left running are killed before the rank is reaped, since
        its process group number cannot be reused before then.
        """
        if self.process.returncode is None and self._state() in _ENDED:
            self.kill()
        return self.process.returncode

    @property
    def suspended(self) -> bool:
        """Whether a signal (SIGSTOP) has stopped the rank; False if the system cannot tell."""
        return self._state() == _STOPPED

    def signal(self, number: int) -> None:
        """Sends a signal to the process of the rank if it is still running."""
        if self.process.returncode is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kills the rank and its process group, even if suspended, and waits until it is reaped."""
        if self.process.returncode is None:
            with contextlib.suppress(
                ProcessLookupError, PermissionError
            ):  # all processes have ended
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def register(self, selector: selectors.BaseSelector) -> None:
        """Registers this rank's readers with ``selector``; a reader returns b"" at its end."""
        selector.register(self._link, selectors.EVENT_READ, self._read_link)
        for pipe in self._pipes():
            output = pipe is self.process.stdout
            read = self._read_output if output else self._read_errors
            selector.register(pipe, selectors.EVENT_READ, read)

    def close(self, selector: selectors.BaseSelector) -> None:
        """Reads the remaining output of an ended rank and closes its pipes."""
        for reader in (self._read_link, self._read_output, self._read_errors):
            while reader():
                pass
        if self._line:
            self._pass_on(self._line)
        ends: list[socket.socket | IO[bytes]] = [self._link, *self._pipes()]
        for end in ends:
            with contextlib.suppress(KeyError):  # it was at its end and has been unregistered
                selector.unregister(end)
            end.close()

    def _pipes(self) -> list[IO[bytes]]:
        return [pipe for pipe in (self.process.stdout, self.process.stderr) if pipe is not None]

    def _state(self) -> int | None:
        """Returns the system's code of a child that ended or was stopped; None while it runs."""
        if self.process.returncode is not None:
            return _EXITED
        if not hasattr(os, "waitid"):
            return None if self.process.poll() is None else _EXITED
        events = os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        found = os.waitid(os.P_PID, self.process.pid, events)
        return None if found is None else found.si_code

    # Readers: they return the bytes they have read, None if no bytes are available yet.

    def _read_link(self) -> bytes | None:
        try:
            data = self._link.recv(_CHUNK)
        except BlockingIOError:
            return None
        except ConnectionError:
            return b""
        self._received += data
        return data

    def _read_errors(self) -> bytes | None:
        data = _read(self.process.stderr)
        self.errors = (self.errors + (data or b""))[-MAX_ERROR_BYTES:]
        return data

    def _read_output(self) -> bytes | None:
        data = _read(self.process.stdout)
        *lines, self._line = (self._line + (data or b"")).split(b"\n")
        for line in lines:
            self._pass_on(line)
        return data

    def _pass_on(self, line: bytes) -> None:
        sys.stdout.write(f"[rank {self.rank}] {line.decode(errors='replace')}\n")
        sys.stdout.flush()


_EXITED = getattr(os, "CLD_EXITED", 1)
_ENDED = (_EXITED, getattr(os, "CLD_KILLED", 2), getattr(os, "CLD_DUMPED", 3))
_STOPPED = getattr(os, "CLD_STOPPED", 5)


def _read(pipe: IO[bytes] | None) -> bytes | None:
    if pipe is None:
        return b""
    try:
        return os.read(pipe.fileno(), _CHUNK)
    except BlockingIOError:
        return None
