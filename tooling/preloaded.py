"""Starts Python programs as forks of a process that has imported torch: in 0.1 s instead of 3 s.

Starting programs that import torch is most of the cost of an integration test. `Preloaded` keeps
one process, the server, that imports the packages once and starts no thread. On request the server
forks a child, and the child becomes the program, with its arguments, working directory,
environment, standard streams and session. `Preloaded.start` returns a `subprocess.Popen`. The
calling process adopts the child (it is a subreaper in the meantime), so `wait`, `kill` and the exit
status are real. If a child starts a Python module by `subprocess` (the ranks of
``--nproc-per-node``), it forks again.

A fork skips the start of an interpreter: the hash seed is the server's, modules are imported before
the environment of the program is set, and all preloaded modules are in `sys.modules`. Tests of
imports, of start-up and of lost processes therefore start real processes, as does every call on a
system without `prctl`.

    python tooling/preloaded.py SOCKET MODULE...     (the server; not for use by hand)
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

LENGTH = struct.Struct("<q")
PR_SET_CHILD_SUBREAPER = 36
HIGH = 500  # descriptors are moved here before they take the places of others
START_SECONDS = 300
INTERRUPTED = -signal.SIGINT
Popen = subprocess.Popen  # a forked program has another in its place


class Preloaded:
    """A server that has imported ``modules``, also of this folder, and the programs that it forks.

    Its environment is that of its creation, with ``OMP_NUM_THREADS=1``: libraries read the number
    of threads when they are loaded. A program that needs another number is started as a process.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._connection: socket.socket | None = None
        if sys.platform != "linux":
            return
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(START_SECONDS)
        self._server = Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno()), *modules],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()

    def start(
        self,
        words: Sequence[str | Path],
        *,
        before: str | None = None,
        forks: bool = True,
        **options: Any,
    ) -> "subprocess.Popen[Any]":
        """Starts a program as `subprocess.Popen` does.

        The server forks the program if ``words`` begin with `sys.executable` (then ``-c``, ``-m``
        or a script, optionally after ``-P`` or ``-u``) or with a console script beside it. Other
        programs are started as processes. A fork calls the function ``before``, given as
        ``module:function``, before the program runs; a process does not. Without ``forks``, a fork
        starts Python modules as processes.
        """
        words = [str(word) for word in words]
        threads = (options.get("env") or os.environ).get("OMP_NUM_THREADS")
        if self._connection is None or threads != "1" or program_of(words) is None:
            return Popen(words, **options)
        return ForkedByServer(self._connection, words, before, forks, options)

    def run(
        self,
        words: Sequence[str | Path],
        *,
        input: str | bytes | None = None,  # noqa: A002 - as in subprocess.run
        timeout: float = START_SECONDS,
        before: str | None = None,
        **options: Any,
    ) -> "subprocess.CompletedProcess[Any]":
        """Runs a program as `subprocess.run` does; kills it after ``timeout`` seconds."""
        if input is not None:
            options["stdin"] = subprocess.PIPE
        if options.pop("capture_output", False):
            options["stdout"] = options["stderr"] = subprocess.PIPE
        check = options.pop("check", False)
        with self.start(words, before=before, **options) as process:
            try:
                out, errors = process.communicate(input, timeout=timeout)
            except BaseException:
                process.kill()
                raise
        done = subprocess.CompletedProcess(words, process.returncode, out, errors)
        if check:
            done.check_returncode()
        return done

    def close(self) -> None:
        """Ends the server; programs that still run continue."""
        if self._connection is not None:
            self._connection.close()
            self._server.wait()


class Forked(Popen):
    """A process that was forked instead of executed; otherwise behaves like its base `Popen`."""

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Sequence[int],
        cwd: Any,
        env: Any,
        startupinfo: Any,
        creationflags: Any,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        restore_signals: bool,
        gid: Any,
        gids: Any,
        uid: Any,
        umask: int,
        start_new_session: bool,
        process_group: int,
        *more: Any,
    ) -> None:
        refused = (executable, preexec_fn, shell, not close_fds, uid, gid, gids, umask != -1)
        if any(refused):
            raise ValueError("a forked program takes no such option of Popen")
        request = {
            "words": [os.fsdecode(word) for word in args],
            "cwd": os.fsdecode(cwd) if cwd is not None else str(Path.cwd()),
            "env": {**(os.environ if env is None else env)},
            "interruptible": signal.getsignal(signal.SIGINT) is not signal.SIG_IGN,
            "session": start_new_session,
            "group": process_group,
        }
        ends = (p2cread, c2pwrite, errwrite)
        streams = [own if end == -1 else end for own, end in enumerate(ends)]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = self._fork(request, streams, pass_fds)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _fork(self, request: dict[str, Any], streams: list[int], kept: Sequence[int]) -> int:
        raise NotImplementedError


class ForkedByServer(Forked):
    """A child of this process that the server has forked."""

    def __init__(
        self,
        connection: socket.socket,
        words: Sequence[str],
        before: str | None,
        forks: bool,
        options: dict[str, Any],
    ) -> None:
        self._connection = connection
        self._more = {"before": before, "forks": forks}
        super().__init__(words, **options)

    def _fork(self, request: dict[str, Any], streams: list[int], kept: Sequence[int]) -> int:
        if kept:
            raise ValueError("a program of the server takes no further descriptors")
        message = json.dumps({**request, **self._more}).encode()
        with subreaper():
            socket.send_fds(self._connection, [LENGTH.pack(len(message))], streams)
            self._connection.sendall(message)
            (pid,) = LENGTH.unpack(exactly(self._connection, LENGTH.size))
        return int(pid)


class ForkedHere(Forked):
    """A module that a forked program starts: a fork of that program, if it has one thread."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        words = [args] if isinstance(args, str) else [os.fsdecode(word) for word in args]
        module = len(words) > 2 and words[0] == sys.executable and "-m" in words[1:4]
        if module and program_of(words) is not None and threads_of(os.getpid()) == 1:
            return super()._execute_child(args, *rest)
        return Popen._execute_child(self, args, *rest)

    def _fork(self, request: dict[str, Any], streams: list[int], kept: Sequence[int]) -> int:
        pid = os.fork()
        if not pid:
            become(request, streams, kept)
        return pid


@contextlib.contextmanager
def subreaper():
    """Makes orphans below this process its children within the context (see prctl(2))."""
    import ctypes

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def exactly(connection: socket.socket, size: int) -> bytes:
    """Reads ``size`` bytes.

    Raises:
        ConnectionError: The other side closed the connection before.
    """
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the server of preloaded programs has ended")
        data += more
    return data


def threads_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


# Below: the server, and the children it forks.


def serve(descriptor: int, modules: Sequence[str]) -> None:
    """Forks a program for every request on a socket, until the socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is for the tests
    connection = socket.socket(fileno=descriptor)
    for name in modules:
        importlib.import_module(name)
    sys.path.remove(str(Path(__file__).parent))  # the programs do not see this folder
    if threads_of(os.getpid()) > 1:
        raise RuntimeError(f"importing {' '.join(modules)} started a thread: it cannot be forked")
    gc.collect()
    gc.freeze()
    while True:
        head, streams, _, _ = socket.recv_fds(connection, LENGTH.size, maxfds=3)
        if not head:
            return
        (size,) = LENGTH.unpack(head)
        request = json.loads(exactly(connection, size))
        pid = orphan(connection, request, streams)
        for stream in streams:
            os.close(stream)
        connection.sendall(LENGTH.pack(pid))


def orphan(connection: socket.socket, request: dict[str, Any], streams: list[int]) -> int:
    """Forks a program whose parent has ended, so that the subreaper becomes its parent."""
    reader, writer = os.pipe()
    between = os.fork()
    if not between:
        pid = os.fork()
        if pid:
            os.write(writer, LENGTH.pack(pid))
            os._exit(0)
        connection.close()
        become(request, streams, ())
    os.close(writer)
    os.waitpid(between, 0)
    (pid,) = LENGTH.unpack(os.read(reader, LENGTH.size))
    os.close(reader)
    return int(pid)


def become(request: dict[str, Any], streams: Sequence[int], kept: Sequence[int]) -> NoReturn:
    """Runs the program of a request in this process, and exits with its status."""
    status = 255
    try:
        program = prepare(request, streams, kept)
        status = outcome(program)
    except BaseException:  # noqa: BLE001 - nothing may climb into the code that was forked
        traceback.print_exc()
    finally:
        if status == INTERRUPTED:  # as an interpreter ends that was interrupted
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(status)


def prepare(
    request: dict[str, Any], streams: Sequence[int], kept: Sequence[int]
) -> Callable[[], object]:
    """Makes this process look like one that has just started; returns what it runs."""
    if request["session"]:
        os.setsid()
    elif request["group"] is not None and request["group"] >= 0:
        os.setpgid(0, request["group"])
    lay_descriptors(streams, kept)
    number = signal.default_int_handler if request["interruptible"] else signal.SIG_IGN
    signal.signal(signal.SIGINT, number)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    open_streams()
    if request.get("forks", True):
        subprocess.Popen = ForkedHere  # type: ignore[misc]
    program = program_of(request["words"])
    if program is None:
        raise ValueError(f"{request['words'][0]} is no program of this environment")
    if request.get("before"):
        pkgutil.resolve_name(request["before"])()
    return program


def lay_descriptors(streams: Sequence[int], kept: Sequence[int]) -> None:
    """Moves ``streams`` to 0, 1 and 2, leaves ``kept`` open, and closes all other descriptors."""
    high = [fcntl.fcntl(stream, fcntl.F_DUPFD, HIGH) for stream in streams]
    for place, stream in enumerate(high):
        os.dup2(stream, place)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
    for descriptor in kept:
        os.set_inheritable(descriptor, True)


def open_streams() -> None:
    """Creates the standard streams as a new interpreter does."""
    through = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode, buffered = ("rb", -1) if name == "stdin" else ("wb", 0 if through else -1)
        stream = io.TextIOWrapper(
            open(number, mode, buffered, closefd=False),  # noqa: SIM115
            encoding="utf-8",
            errors="backslashreplace" if name == "stderr" else "strict",
            line_buffering=not through and (name == "stderr" or os.isatty(number)),
            write_through=through,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def program_of(words: Sequence[str]) -> Callable[[], object] | None:
    """Returns what a command line runs, or None if it is no Python program of this environment."""
    name, *rest = words
    binaries = Path(sys.executable).parent
    if name != sys.executable:
        path = Path(name)
        if path.parent != binaries or not path.exists() or not is_python(path):
            return None
        return lambda: run(words, str(binaries), lambda: runpy.run_path(name, run_name="__main__"))
    safe = "-P" in rest[:2]
    while rest and rest[0] in ("-P", "-u"):
        rest = rest[1:]
    if not rest:
        return None
    kind, *others = rest
    folder = None if safe else ""
    if kind == "-c" and others:
        return lambda: run(["-c", *others[1:]], folder, lambda: execute(others[0]))
    if kind == "-m" and others:
        argv, module = [others[0], *others[1:]], others[0]
        there = None if safe else str(Path.cwd())
        return lambda: run(
            argv, there, lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)
        )
    if kind.startswith("-"):
        return None
    folder = None if safe else str(Path(kind).parent)
    return lambda: run(rest, folder, lambda: runpy.run_path(kind, run_name="__main__"))


def is_python(path: Path) -> bool:
    """Returns whether a console script belongs to this interpreter."""
    with path.open("rb") as script:
        first = script.read(300)
    return first.startswith(b"#!") and os.fsencode(path.parent / "python") in first


def run(argv: Sequence[str], folder: str | None, program: Callable[[], object]) -> None:
    sys.argv = list(argv)
    sys.orig_argv = [sys.executable, *argv]
    if folder is not None:
        sys.path.insert(0, folder)
    program()


def execute(code: str) -> None:
    """Runs the text behind ``-c`` as the module `__main__`."""
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    exec(compile(code, "<string>", "exec"), main.__dict__)


def outcome(program: Callable[[], object]) -> int:
    """Runs a program to its end as an interpreter does; returns its exit status."""
    status = 0
    try:
        program()
    except SystemExit as left:
        if isinstance(left.code, int):
            status = left.code & 0xFF
        elif left.code is not None:
            sys.stderr.write(f"{left.code}\n")
            status = 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = INTERRUPTED
    except BaseException:  # noqa: BLE001 - it is printed, as an interpreter does
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return status


if __name__ == "__main__":
    # Functions of this module are looked up by a name that the programs do not replace.
    sys.path.insert(0, str(Path(__file__).parent))
    import preloaded

    preloaded.serve(int(sys.argv[1]), sys.argv[2:])
