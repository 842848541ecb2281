"""The wire between a rank and the process that started it: how the rank failed, in plain data.

A socket pair. The rank sends at most one report, a line of JSON; the other direction carries
nothing but its end: when the parent is gone, however it went, the rank ends itself.
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
    """Why a rank ends early.

    Attributes:
        kind: ``own`` a mistake this rank found itself; ``peer`` another rank did not answer;
            ``bug`` an exception that nobody expected; ``interrupted``; ``port`` the port of the
            rendezvous was taken.
        message: One line.
        status: The exit status that follows.
        traceback: Of a bug, whole.
    """

    kind: FailureKind
    message: str
    status: int = 1
    traceback: str = ""


def encode_report(report: FailureReport) -> bytes:
    """Returns the line that a rank sends."""
    return json.dumps(asdict(report)).encode() + b"\n"


def decode_report(received: bytes) -> FailureReport | None:
    """Returns the report in what was ``received``; None where there is none, or half of one."""
    line, end, _ = received.partition(b"\n")
    return FailureReport(**json.loads(line)) if end else None


class ParentLink:
    """A rank's end of the wire, made from the descriptor it inherited."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)  # not for the processes that this rank starts

    def exit_with_parent(self) -> None:
        """From now on, end this process and those of its group when the parent is gone."""
        threading.Thread(target=self._wait, name="parent", daemon=True).start()

    def send(self, report: FailureReport) -> None:
        """Sends ``report``; nothing happens if the parent is gone."""
        with contextlib.suppress(OSError):
            self._socket.sendall(encode_report(report))

    def _wait(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.recv(1)
        group = os.getpgrp()
        if group == os.getpid():  # ours alone, as the parent made it
            os.killpg(group, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
