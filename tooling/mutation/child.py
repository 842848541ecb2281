"""Runs pytest in a copy; worker pools start from a warm server."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from preloaded import LENGTH, exactly

from mutation.probes import HITS, TEST

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
SERVERS = 2  # fork servers of pools that are kept ready


def main(order: dict[str, Any]) -> None:
    """Runs pytest with a limit of CPU time for every process, with probes if requested."""
    resource.setrlimit(resource.RLIMIT_CPU, (order["limit"], order["limit"] + 5))
    servers = [ReadyServer() for _ in range(SERVERS)]
    plugins: list[object] = [Pools(servers, order["slack"])]
    hits, tests = order["hits"], Tests()
    if hits:
        os.environ[HITS] = hits
        plugins.append(tests)
    try:
        status = pytest.main(order["pytest"], plugins=plugins)
    finally:
        for server in servers:
            server.end_if_unused()
        if hits:
            (Path(hits) / "seconds.json").write_text(json.dumps(tests.seconds))
    sys.exit(int(status))


class Tests:
    """A pytest plugin that names the running test function for probes, and records CPU times."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Function) -> Generator[None, object, object]:
        """Names the function, without parameters, while it and its fixtures run."""
        name = os.environ[TEST] = item.nodeid.partition("[")[0]
        before = sum(os.times()[:4])
        try:
            return (yield)
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + sum(os.times()[:4]) - before
            os.environ.pop(TEST, None)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: "pytest.FixtureDef[object]"
    ) -> Generator[None, object, object]:
        """Attributes a fixture of several tests to none of them, rather than to the first."""
        with contextlib.nullcontext() if fixturedef.scope == "function" else unnamed():
            return (yield)


@contextlib.contextmanager
def unnamed() -> Iterator[None]:
    """Leaves out the name of the running test within the context."""
    name = os.environ.pop(TEST, None)
    try:
        yield
    finally:
        if name is not None:
            os.environ[TEST] = name


class ReadyServer:
    """A forked process that waits to become the fork server of a `WorkerPool`.

    It is forked before any of our packages is imported, so it is like a new interpreter. It has the
    methods of `Popen` that a pool uses.
    """

    def __init__(self) -> None:
        self._status: int | None = None
        self._taken = False
        self._ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._ours.close()
            self._serve(theirs)
        theirs.close()

    def _serve(self, connection: socket.socket) -> None:
        status = 1
        try:
            os.setsid()
            head, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, maxfds=1)
            if head:
                become_server(exactly(connection, *LENGTH.unpack(head)), descriptors[0])
            status = 0
        except BaseException:  # noqa: BLE001 - nothing may climb into the pytest that was forked
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        finally:
            os._exit(status)

    def become(self, theirs: socket.socket, message: bytes) -> None:
        """Starts serving on a socket."""
        self._taken = True
        socket.send_fds(self._ours, [LENGTH.pack(len(message))], [theirs.fileno()])
        self._ours.sendall(message)  # may arrive in parts

    def poll(self) -> int | None:
        """Returns the exit status, or None if the process still runs."""
        if self._status is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self, timeout: float) -> int:
        """Waits for the process to end; raises `subprocess.TimeoutExpired` as `Popen` does."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork server", timeout)
            time.sleep(0.005)
        return status

    def kill(self) -> None:
        """Kills the process."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def end_if_unused(self) -> None:
        """Ends the process if no pool took it."""
        if not self._taken:
            self.kill()


def become_server(message: bytes, descriptor: int) -> None:
    """Serves as the fork server of a pool until its connection is closed."""

    directory, preload, typecheck, path, environment = json.loads(message)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    from megatron_parallel.testing.server import main as serve

    serve(descriptor, directory, preload, typecheck, device_guard=False)


class Pools:
    """A pytest plugin that gives pools a waiting server, for ranks without the name of a test.

    It multiplies their time-outs by a factor, for busy machines.
    """

    def __init__(self, servers: Sequence[ReadyServer], slack: float) -> None:
        self._servers = list(servers)
        self._slack = slack

    def pytest_configure(self) -> None:
        """Changes the pools of this process if the copy has their package."""
        if not Path("packages/megatron-parallel").exists():
            return

        from megatron_parallel.testing import pool

        start, make = pool._start_server, pool.WorkerPool.__init__

        def take(
            theirs: socket.socket,
            directory: Path,
            preload: Sequence[str],
            typecheck: Sequence[str],
            device_guard: bool,
        ) -> Any:
            with unnamed():
                if device_guard or not self._servers:  # a waiting server has imported torch
                    return start(theirs, directory, preload, typecheck, device_guard)
                environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ}
            server = self._servers.pop()
            environment.update(dict.fromkeys(THREADS, "1"))
            settings = [str(directory), list(preload), list(typecheck), sys.path, environment]
            with theirs:
                server.become(theirs, json.dumps(settings).encode())
            return server

        def patient(owner: Any, *arguments: Any, **options: Any) -> None:
            make(owner, *arguments, **options)
            owner.timeout *= self._slack
            owner._collective_timeout *= self._slack

        pool._start_server = take
        pool.WorkerPool.__init__ = patient  # type: ignore[method-assign]
