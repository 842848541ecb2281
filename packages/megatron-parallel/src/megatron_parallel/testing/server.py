"""The fork server: one process with torch imported that forks a worker on request.

The server has one thread and starts no library threads, so forking it is safe. When the connection
to the process that started it closes, it ends with all its workers: a test run that is killed, even
with SIGKILL, leaves no processes behind.

Requests are nine bytes, a letter and a number. ``F``, with a socket attached, forks a worker that
serves the socket and returns its process id. ``W`` waits for a worker that has ended or was killed
and returns its exit status, negative for a signal.
"""

import ctypes
import importlib
import os
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence

from megatron_parallel.imagined import load_guard

REQUEST = struct.Struct("<cq")
ANSWER = struct.Struct("<q")
STILL_RUNNING = -1000
_PR_SET_PDEATHSIG = 1


def main(
    descriptor: int,
    directory: str,
    preload: Sequence[str],
    typecheck: Sequence[str],
    device_guard: bool,
) -> None:
    """Serves requests on a socket until it closes, then removes ``directory``.

    Args:
        descriptor: File descriptor of the socket.
        directory: Directory of the pool.
        preload: Modules to import before forking.
        typecheck: Packages whose jaxtyping annotations beartype checks.
        device_guard: Whether to load the device guard, which precedes the import of torch.
    """
    if device_guard:
        load_guard()
    from megatron_parallel.testing import worker

    connection = socket.socket(fileno=descriptor)
    if typecheck:
        from jaxtyping import install_import_hook

        # jaxtyping 0.3.11 names the bytecode of these packages, and of what they import, after this
        # expression: without the packages in it, pools with others would read it.
        named = tuple(sorted(typecheck))
        install_import_hook(named, f"beartype.__dict__['beartype' if {named!r} else '']")
    for name in preload:
        importlib.import_module(name)
    connection.sendall(ANSWER.pack(os.getpid()))

    children: set[int] = set()
    try:
        while True:
            request, descriptors, _, _ = socket.recv_fds(connection, REQUEST.size, maxfds=1)
            if len(request) < REQUEST.size:
                break
            kind, number = REQUEST.unpack(request)
            if kind == b"F":
                answer = _fork(connection, descriptors[0], worker.serve)
                children.add(answer)
            else:
                answer = _wait(number)
                children.discard(number)
            connection.sendall(ANSWER.pack(answer))
    except ConnectionError:
        pass
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)  # without the shutdown handlers of torch


def _fork(
    connection: socket.socket, descriptor: int, serve: Callable[[socket.socket], None]
) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(descriptor)
        return pid
    status = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # the server ended between fork and prctl
                os._exit(1)
        connection.close()
        serve(socket.socket(fileno=descriptor))
        status = 0
    except BaseException:  # noqa: BLE001 - must not reach the loop of the server
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(pid: int, patience: float = 5.0) -> int:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    return STILL_RUNNING
