"""The connection between a rank and its parent, the process that started it.

The connection is a socket pair. The rank sends at most one failure report, as a line of JSON. The
parent sends nothing: when it ends for any reason, the socket closes and the rank kills itself.
"""

import contextlib
import json
import os
import signal
import socket
import threading
from dataclasses import asdict, dataclass
from typing import Literal

FailureKind = Literal["own", "peer", "bug", "interrupted", "port"]


@dataclass(frozen=True)
class FailureReport:
    """The reason why a rank ends early.

    Attributes:
        kind: ``own`` if this rank found an error, ``peer`` if another rank did not answer, ``bug``
            for an unexpected exception, ``interrupted`` for a keyboard interrupt, ``port`` if the
            port of the rendezvous was taken.
        message: The error in one line.
        status: Exit status of the rank.
        traceback: The whole traceback of a bug; empty otherwise.
    """

    kind: FailureKind
    message: str
    status: int = 1
    traceback: str = ""


def encode_report(report: FailureReport) -> bytes:
    """Returns the line that a rank sends for a report."""
    return json.dumps(asdict(report)).encode() + b"\n"


def decode_report(received: bytes) -> FailureReport | None:
    """Returns the report in the bytes ``received``, or None if no complete line has arrived."""
    line, end, _ = received.partition(b"\n")
    return FailureReport(**json.loads(line)) if end else None


class ParentLink:
    """A rank's end of the connection, made from the file descriptor that the rank inherited."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)  # processes that this rank starts do not get it

    def exit_with_parent(self) -> None:
        """Starts a thread that kills this process and its group when the parent has ended."""
        threading.Thread(target=self._wait, name="parent", daemon=True).start()

    def send(self, report: FailureReport) -> None:
        """Sends ``report``; does nothing if the parent has ended."""
        with contextlib.suppress(OSError):
            self._socket.sendall(encode_report(report))

    def _wait(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.recv(1)
        group = os.getpgrp()
        if group == os.getpid():  # the parent made this group for this rank alone
            os.killpg(group, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
