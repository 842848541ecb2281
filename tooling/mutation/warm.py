"""Runs of pytest in copies of the repository, forked from a process that has imported torch.

Importing torch takes longer than most test files.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from preloaded import Preloaded

from mutation.scratch import Scratch

MARKS = "not gpu and not slow"  # as `nox -s tests`
FAILED = re.compile(r"^(?:FAILED|ERROR) ([\w./-]+\.py(?:::.+?)?)(?: - .*)?$", re.MULTILINE)
MODULES = (
    *("pytest", "numpy", "torch", "torch.distributed.tensor", "torch.distributed.pipelining"),
    *("torch.distributed.checkpoint", "torch.distributed.fsdp", "hypothesis", "jaxtyping"),
    *("beartype", "cloudpickle", "safetensors.torch", "tokenizers", "flask"),
)
"""What tests import, but for the packages under test."""
START = (
    "import json, sys; path, words = json.loads(sys.argv[1]); sys.path[:0] = path; "
    "from mutation.child import main; main(words)"
)


@dataclass(frozen=True)
class Run:
    """A finished run of pytest.

    Attributes:
        status: Exit status of pytest, or None if it was killed for its time.
        seconds: CPU time of pytest and of all processes that it started and waited for.
        output: Standard output and standard error.
    """

    status: int | None
    seconds: float
    output: str

    @property
    def passed(self) -> bool:
        """Whether all tests passed; 5 is pytest's "no tests were collected"."""
        return self.status in (0, 5)

    @property
    def failed_tests(self) -> list[str]:
        """Names of the failed tests, in pytest's order."""
        return FAILED.findall(self.output)


@dataclass(frozen=True)
class Order:
    """A requested run.

    Attributes:
        tests: Test files or single tests, relative to the copy.
        limit: Limit of CPU seconds for each process.
        patience: Limit of wall-clock seconds for all processes together.
        options: More arguments for pytest.
        hits: Where probes note the tests that reach them; None without probes.
    """

    tests: Sequence[str]
    limit: float
    patience: float
    options: tuple[str, ...] = ()
    hits: Path | None = None


Job = Callable[[Scratch], Generator[Order, Run, Any]]
"""Yields the runs it wants in a copy, one after another, and is sent how each ended."""


class Workers:
    """Runs the orders of jobs in several copies of the repository at once.

    Args:
        copies: The copies; one job runs in each.
        slack: Factor for the time-outs of worker pools.
        modules: Modules to import before the runs are forked.
    """

    def __init__(
        self, copies: Sequence[Scratch], slack: float, modules: Sequence[str] = MODULES
    ) -> None:
        self._copies = copies
        self._slack = slack
        self._preloaded = Preloaded(modules)

    def close(self) -> None:
        """Ends the process that forks."""
        self._preloaded.close()

    @contextlib.contextmanager
    def changed(self, files: Mapping[str, str]) -> Iterator[None]:
        """Replaces or adds files of every copy within the context, by path."""
        paths = {name: self._copies[0].folder / name for name in files}  # all copies are equal
        old = {
            name: path.read_text(encoding="utf-8") if path.exists() else None
            for name, path in paths.items()
        }
        for copy in self._copies:
            for name, text in files.items():
                copy.write(name, text)
        try:
            yield
        finally:
            for copy in self._copies:
                for name, text in old.items():
                    copy.write(name, text)

    def work(self, jobs: Iterable[Job]) -> None:
        """Runs all jobs."""
        waiting = iter(jobs)
        busy: dict[int, tuple[Generator[Order, Run, Any], Going]] = {}
        try:
            while True:
                for place, copy in enumerate(self._copies):
                    while place not in busy and (job := next(waiting, None)) is not None:
                        self._advance(busy, place, job(copy), None)
                if not busy:
                    return
                time.sleep(0.05)
                for place, (generator, going) in list(busy.items()):
                    run = going.ended()
                    if run is not None:
                        del busy[place]
                        self._advance(busy, place, generator, run)
        finally:
            for _, going in busy.values():
                going.end()

    def _advance(
        self,
        busy: "dict[int, tuple[Generator[Order, Run, Any], Going]]",
        place: int,
        job: Generator[Order, Run, Any],
        run: Run | None,
    ) -> None:
        try:
            order = next(job) if run is None else job.send(run)
        except StopIteration:
            return
        busy[place] = job, self._start(self._copies[place], order)

    def _start(self, copy: Scratch, order: Order) -> "Going":
        environment = copy.environment()
        path = [str(Path(__file__).parents[1]), *environment["PYTHONPATH"].split(os.pathsep)]
        given = {
            "limit": int(order.limit),
            "slack": self._slack,
            "hits": str(order.hits or ""),
            "pytest": ["-q", "-m", MARKS, "-p", "no:cacheprovider", "--tb=line"],
        }
        given["pytest"] += [*order.options, *order.tests]
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the run has ended
        process = self._preloaded.start(
            [sys.executable, "-c", START, json.dumps([path, given])],
            cwd=copy.folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            forks=False,  # a test that starts a process needs one
        )
        return Going(process, output, time.monotonic() + order.patience)


@dataclass
class Going:
    """A run in progress."""

    process: "subprocess.Popen[Any]"
    output: IO[bytes]
    deadline: float

    def ended(self) -> Run | None:
        """Returns the run if it has ended or has no time left."""
        late = time.monotonic() > self.deadline
        if late:
            self.end()
        done, status, usage = os.wait4(self.process.pid, 0 if late else os.WNOHANG)
        if not done:
            return None
        self.end()  # what it left running
        code: int | None = os.waitstatus_to_exitcode(status)
        self.process.returncode = code
        if late or code == -signal.SIGXCPU:
            code = None
        with self.output as output:
            output.seek(0)
            text = output.read().decode(errors="replace")
        return Run(code, usage.ru_utime + usage.ru_stime, text)

    def end(self) -> None:
        """Kills pytest and its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
