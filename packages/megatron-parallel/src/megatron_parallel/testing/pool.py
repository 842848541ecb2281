"""A pool of workers: one set for each number of ranks, reused while all its workers are alive."""

import contextlib
import json
import os
import pickle
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from megatron_parallel.mesh.devices import backend_of
from megatron_parallel.testing import server, wire
from megatron_parallel.testing import worker as worker_module
from megatron_parallel.testing.failures import Failure, WorkerError
from megatron_parallel.testing.worker import Call, Outcome, Rank, Setup

if TYPE_CHECKING:
    from megatron_parallel.mesh.layout import ParallelLayout

_START_TIMEOUT = 120.0  # seconds to import torch and join a group on a busy machine
_MAX_SETS = 3  # of workers; the groups of idle ones cost time (`worker.MAX_MESHES`)
_GRACE = 1.0  # seconds for the other ranks to report after one has failed
_BOOT = (
    "import json, sys; *settings, path = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from megatron_parallel.testing.server import main; main(*settings)"
)


@dataclass
class _Worker:
    rank: int
    pid: int
    connection: socket.socket
    trace: Path

    def fileno(self) -> int:
        return self.connection.fileno()


def _on_mesh(
    rank: Rank, layout: "ParallelLayout", function: "Callable[..., Any]", *arguments: Any
) -> Any:
    return function(rank.mesh(layout), *arguments)


class WorkerPool:
    """Processes that run functions on several ranks.

    Workers are forked from one process that has imported torch, and joined by a process group
    through a file, without ports. The pool keeps a set of workers for each of the last three
    numbers of ranks. A failing call ends its set, and the next call starts a new one. Each worker
    computes with one thread. Workers end with the process that owns the pool, even if it is killed.

    Not thread-safe.

    Args:
        max_ranks: Maximum number of ranks of a call.
        timeout: Default time-out of a call in seconds.
        collective_timeout: Time-out of collectives in seconds. Those of meshes have more in calls
            with more time: the same part of the call's.
        backend: Backend of the process group. Defaults to that of `Mesh.bind`: NCCL on CUDA
            devices, which does not accept CPU tensors, and Gloo elsewhere.
        device: Device type of the ranks. Rank ``i`` gets device ``i``; ``cpu`` is shared.
        typecheck: Packages whose jaxtyping annotations beartype checks inside the workers.
        preload: Modules to import once, before workers are forked. Defaults to modules for the
            parallel code of torch that take seconds to import.
        device_guard: Whether workers load the device guard of `megatron_parallel.imagined`, so that
            they can imagine or simulate a CUDA device. Call `load_guard` first: it names what is
            missing.
    """

    def __init__(
        self,
        max_ranks: int = 4,
        *,
        timeout: float = 30.0,
        collective_timeout: float = 20.0,
        backend: str | None = None,
        device: str = "cpu",
        typecheck: Sequence[str] = (),
        preload: Sequence[str] = ("torch.distributed.tensor",),
        device_guard: bool = False,
    ) -> None:
        if max_ranks < 1:
            raise ValueError(f"max_ranks is {max_ranks}; a pool needs at least 1 rank")
        self.max_ranks = max_ranks
        self.timeout = timeout
        self.typecheck = tuple(typecheck)
        self._collective_timeout = collective_timeout
        self.backend = backend or backend_of(device)
        self._device = device
        self._directory = Path(tempfile.mkdtemp(prefix="megatron-pool-"))
        self._generation = 0
        self._worker_sets: dict[int, list[_Worker]] = {}
        self._connection, theirs = socket.socketpair()
        self._server = _start_server(theirs, self._directory, preload, self.typecheck, device_guard)
        self._ready = False
        self._close = weakref.finalize(
            self, _shut_down, self._server, self._connection, self._directory
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all workers. A closed pool cannot be used again."""
        for ranks in list(self._worker_sets):
            self._end_workers(ranks)
        self._close()

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int = 2,
        timeout: float | None = None,
    ) -> list[Any]:
        """Calls ``function(rank, *arguments)`` on every rank and returns the results by rank.

        ``rank`` is a `Rank`. The default process group has ``ranks`` members. Before each call, the
        random generators are seeded with 0, gradients are enabled, the default dtype is float32 and
        the working directory is that of the caller.

        Args:
            function: Any function. A function of a regular package is pickled by name, others (of
                test files, closures, lambdas) by value, with cloudpickle.
            arguments: Arguments that can be pickled. Tensors are copied to the CPU and detached,
                also in the results.
            ranks: Number of ranks, at most ``max_ranks``.
            timeout: Seconds after which a rank that has not finished counts as hung. Defaults to
                that of the pool.

        Raises:
            WorkerError: A rank raised, died or hung. The message contains its traceback.
            ValueError: ``ranks`` is out of range.
        """
        if not 1 <= ranks <= self.max_ranks:
            raise ValueError(f"ranks is {ranks}; this pool has 1 to {self.max_ranks}")
        timeout = self.timeout if timeout is None else timeout
        payload = wire.dumps((function, arguments), function, *filter(callable, arguments))
        collective_timeout = self._collective_timeout * max(timeout / self.timeout, 1.0)
        call = wire.dumps(Call(list(sys.path), str(Path.cwd()), collective_timeout, payload))
        workers = self._workers(ranks)
        self._end_unused(ranks)
        try:
            outcomes = self._exchange(workers, [call] * ranks, timeout)
        except BaseException:
            self._end_workers(ranks)
            raise
        return [pickle.loads(outcome.result or b"") for outcome in outcomes]

    def run_mesh(
        self,
        layout: "ParallelLayout",
        function: "Callable[..., Any]",
        *arguments: Any,
        ranks: int | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Calls ``function(mesh, *arguments)`` on every rank of ``layout``.

        ``mesh`` is the `megatron_parallel.Mesh` of the layout, bound at its first use and reused by
        later calls. ``ranks`` is needed only if the layout does not fix the data-parallel size.
        Otherwise as `run`.
        """
        ranks = layout.world_size if ranks is None else ranks
        return self.run(_on_mesh, layout, function, *arguments, ranks=ranks, timeout=timeout)

    # Sets of workers.

    def _workers(self, ranks: int) -> list[_Worker]:
        workers = self._worker_sets.get(ranks)
        if workers is not None:
            lost = [worker for worker in workers if select.select([worker], [], [], 0)[0]]
            if not lost:
                return workers
            names = ", ".join(f"rank {w.rank} {self._status(w)}" for w in lost)
            warnings.warn(f"after its last call {names}; starting new workers", stacklevel=3)
            self._end_workers(ranks)
        return self._start_workers(ranks)

    def _end_unused(self, ranks: int) -> None:
        """Ends the sets that were used before the last few; ``ranks`` is used now."""
        self._worker_sets[ranks] = self._worker_sets.pop(ranks)  # the newest is last
        for other in list(self._worker_sets)[:-_MAX_SETS]:
            self._end_workers(other)

    def _start_workers(self, ranks: int) -> list[_Worker]:
        if not self._close.alive:
            raise ValueError("this pool is closed; create a new WorkerPool")
        self._wait_for_server()
        self._generation += 1
        stem = self._directory / f"{ranks}-{self._generation}"
        workers = self._worker_sets[ranks] = []
        for rank in range(ranks):
            ours, theirs = socket.socketpair()
            with theirs:
                pid = self._ask(b"F", 0, theirs)
            workers.append(_Worker(rank, pid, ours, Path(f"{stem}.trace{rank}")))
        setups = [
            Setup(
                rank=worker.rank,
                size=ranks,
                backend=self.backend,
                device=self._device,
                rendezvous=f"{stem}.store",
                trace=str(worker.trace),
                collective_timeout=self._collective_timeout,
            )
            for worker in workers
        ]
        try:
            self._exchange(workers, [wire.dumps(setup) for setup in setups], _START_TIMEOUT)
        except BaseException:
            self._end_workers(ranks)
            raise
        return workers

    def _exchange(
        self, workers: list[_Worker], messages: list[bytes], timeout: float
    ) -> list[Outcome]:
        """Sends each worker its message and returns the answers.

        Raises:
            WorkerError: A rank failed.
        """
        deadline = time.monotonic() + timeout
        outcomes: dict[int, Outcome] = {}
        failures: list[Failure] = []
        with selectors.DefaultSelector() as selector:
            for worker, message in zip(workers, messages, strict=True):
                worker.connection.settimeout(timeout)
                with contextlib.suppress(OSError):  # it died; reading reports this
                    wire.send(worker.connection, message)
                selector.register(worker, selectors.EVENT_READ, worker)
            while selector.get_map():
                for key, _ in selector.select(max(deadline - time.monotonic(), 0)):
                    worker = key.data
                    selector.unregister(worker)
                    try:
                        worker.connection.settimeout(max(deadline - time.monotonic(), 0.1))
                        outcome: Outcome = pickle.loads(wire.receive(worker.connection))
                    except EOFError:
                        failures.append(self._death(worker))
                    except TimeoutError:  # within its answer
                        failures.append(self._hang(worker, timeout, None))
                    else:
                        outcomes[worker.rank] = outcome
                        if outcome.summary:
                            failures.append(
                                Failure(worker.rank, "raised", outcome.summary, outcome.traceback)
                            )
                    if len(failures) == 1:
                        deadline = min(deadline, time.monotonic() + _GRACE)
                if time.monotonic() >= deadline:
                    break
            waiting = [key.data for key in selector.get_map().values()]
        if waiting:
            cause = failures[0].rank if failures else None
            failures.extend(self._hang(worker, timeout, cause) for worker in waiting)
        if failures:
            # The death of a rank breaks the connections of others: report the death first.
            failures.sort(key=lambda failure: failure.kind != "died")
            raise WorkerError(failures, len(workers))
        return [outcomes[worker.rank] for worker in workers]

    def _death(self, worker: _Worker) -> Failure:
        status = self._status(worker)
        return Failure(worker.rank, "died", status, _read_trace(worker))

    def _hang(self, worker: _Worker, timeout: float, cause: int | None) -> Failure:
        before = _read_trace(worker)
        trace = before
        try:
            os.kill(worker.pid, signal.SIGUSR1)
            deadline = time.monotonic() + 1
            while time.monotonic() < deadline and (trace == before or not trace.endswith("\n")):
                time.sleep(0.01)
                trace = _read_trace(worker)
        except ProcessLookupError:
            pass
        trace = trace[len(before) :].partition(f'  File "{worker_module.__file__}"')[0]
        if cause is None:
            return Failure(worker.rank, "hung", f"did not finish within {timeout:g} s", trace)
        return Failure(worker.rank, "stopped", f"was stopped: rank {cause} had failed", trace)

    def _status(self, worker: _Worker) -> str:
        """Describes how the process of a worker ended."""
        status = self._ask(b"W", worker.pid)
        if status == server.STILL_RUNNING:
            return "closed its connection but did not exit"
        worker.pid = 0
        if status < 0:
            return f"died of signal {-status} ({signal.Signals(-status).name})"
        return f"exited with status {status}"

    def _end_workers(self, ranks: int) -> None:
        for worker in self._worker_sets.pop(ranks, []):
            worker.connection.close()
            if worker.pid and self._server.poll() is None:
                os.kill(worker.pid, signal.SIGKILL)
                self._ask(b"W", worker.pid)

    # The server.

    def _wait_for_server(self) -> None:
        if not self._ready:
            self._connection.settimeout(_START_TIMEOUT)
            self._answer()
            self._ready = True

    def _ask(self, kind: bytes, number: int, attached: socket.socket | None = None) -> int:
        request = server.REQUEST.pack(kind, number)
        descriptors = [] if attached is None else [attached.fileno()]
        with contextlib.suppress(ConnectionError):  # reading reports how it ended
            socket.send_fds(self._connection, [request], descriptors)
        return self._answer()

    def _answer(self) -> int:
        data = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            data = self._connection.recv(server.ANSWER.size)
        if len(data) < server.ANSWER.size:
            try:
                status = f"exited with status {self._server.wait(5)}"
            except subprocess.TimeoutExpired:
                status = f"did not answer within {_START_TIMEOUT:g} s"
            self.close()
            raise RuntimeError(f"the pool's fork server {status}; its own message is on stderr")
        (answer,) = server.ANSWER.unpack(data)
        return int(answer)


def _start_server(
    theirs: socket.socket,
    directory: Path,
    preload: Sequence[str],
    typecheck: Sequence[str],
    device_guard: bool,
) -> "subprocess.Popen[bytes]":
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment = {"GLOO_SOCKET_IFNAME": loopback, **os.environ}
    # One thread per rank, none in the server: forking a process with threads is not safe.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = "1"
    settings = [theirs.fileno(), str(directory), list(preload), list(typecheck), device_guard]
    with theirs:
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps([*settings, sys.path])],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # an interrupt at the terminal reaches only the owner
        )


def _shut_down(
    process: "subprocess.Popen[bytes]", connection: socket.socket, directory: Path
) -> None:
    connection.close()  # the server ends its workers and itself
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(directory, ignore_errors=True)


def _read_trace(worker: _Worker) -> str:
    try:
        return worker.trace.read_text(errors="replace")
    except OSError:
        return ""
