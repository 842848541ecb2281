"""Which tests reach which lines: runs every test file once under coverage, with ranks and programs.

The measurements are stored in a JSON file and repeated for test files that changed or whose source
files changed.
"""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from coverage import CoverageData
from coverage.exceptions import CoverageException

from mutation.scratch import Scratch
from mutation.warm import Order, Run, Workers

LIMIT = 900.0  # CPU seconds for one test file under coverage
PATIENCE = 3600.0  # seconds by the clock

Record = dict[str, Any]
"""Of one test file: its digest, whether it passed, CPU seconds of all and of each test function;
of each source file the digest and, by line, the places of the tests that execute it."""
OUTSIDE = -1
"""The place of what runs outside test functions: ranks, started programs, imports."""


class Reach:
    """Records by test file of the lines of source files that it executes."""

    def __init__(self, root: Path, sources: Sequence[str], kept: Path) -> None:
        self.root = root
        self.sources = sources
        self.kept = kept
        self.records: dict[str, Record] = json.loads(kept.read_text()) if kept.exists() else {}
        self.measured: set[str] = set()

    def measure(
        self, tests: Sequence[str], workers: Workers, report: Callable[[str], None]
    ) -> None:
        """Runs each test file without a current record, one at a time in each copy."""

        def one(name: str, copy: Scratch) -> Generator[Order, Run, None]:
            record = yield from run_covered(copy, name, self.sources)
            self.records[name] = record
            self.kept.parent.mkdir(parents=True, exist_ok=True)
            self.kept.write_text(json.dumps(self.records))
            word = "" if record["passed"] else ": did not pass, left out"
            report(f"{name} {record['seconds']:.0f} s{word}")

        workers.work(partial(one, name) for name in tests if not self.fresh(name))
        self.measured.update(tests)

    def failing(self) -> list[str]:
        """Returns the measured test files that did not pass, so that no defect is tried on them."""
        return sorted(name for name in self.measured if not self.records[name]["passed"])

    def fresh(self, name: str) -> bool:
        """Returns whether the record of a test file is of the current code and of a run that
        passed.
        """
        record = self.records.get(name)
        return bool(record and record["passed"]) and all(
            digest == digest_of(self.root / source)
            for source, digest in [
                (name, record["digest"]),
                *((source, found[0]) for source, found in record["sources"].items()),
            ]
        )

    def reaching(
        self, names: Sequence[str], source: str, lines: Sequence[int], limit: float
    ) -> dict[str, float]:
        """Returns tests of these files that execute one of the lines, for up to `limit` CPU
        seconds.

        The most promising tests come first: short ones, and those of files that execute much of the
        source file (each file that imports a module executes its `def`s). Lines that a file
        executes outside its test functions (in ranks, started programs or on import) are reached by
        the whole file, or by its shortest tests if the whole file does not fit.
        """
        most = max((len(self.lines(name, source)) for name in names), default=0)
        files = []
        for name in names:
            record, reached = self.records[name], self.lines(name, source)
            places = {place for line in lines for place in reached.get(str(line), ())}
            if record["passed"] and places:
                files.append((record["seconds"] * (most / len(reached)) ** 2, name, places))
        chosen: dict[str, float] = {}
        for _, name, places in sorted(files):
            for seconds, test in self._parts(name, places, limit):
                if seconds <= limit:
                    limit -= seconds
                    chosen[test] = seconds
        return chosen

    def _parts(self, name: str, places: set[int], limit: float) -> list[tuple[float, str]]:
        """Returns what to run of a test file, with CPU seconds: the whole file or some test
        functions.
        """
        record = self.records[name]
        if OUTSIDE in places and record["seconds"] <= limit:
            return [(record["seconds"], name)]
        named = list(enumerate(record["tests"].items()))
        inside = places - {OUTSIDE}
        return sorted(
            (took, test) for place, (test, took) in named if place in inside or not inside
        )

    def lines(self, name: str, source: str) -> dict[str, list[int]]:
        """Returns the lines of a source file that a test file executes, with the tests that do."""
        covered: dict[str, list[int]] = self.records[name]["sources"].get(source, ("", {}))[1]
        return covered


def run_covered(copy: Scratch, name: str, wanted: Sequence[str]) -> Generator[Order, Run, Record]:
    """Runs one test file under coverage of the wanted source files."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        settings = Path(folder) / "coveragerc"
        included = "\n".join(f"    {copy.folder}/{source}" for source in wanted)
        settings.write_text(
            "[run]\npatch = subprocess, fork, _exit\n"
            f"data_file = {folder}/data\ninclude =\n{included}\n"
        )
        run = yield Order([name], LIMIT, PATIENCE, coverage=settings)
        took = Path(folder) / "seconds.json"
        tests: dict[str, float] = json.loads(took.read_text()) if took.exists() else {}
        places = {test: place for place, test in enumerate(tests)}
        sources = covered_lines(sorted(Path(folder).glob("data*")), copy.folder, places)
    return {
        "digest": digest_of(copy.folder / name),
        "seconds": run.seconds,
        "passed": run.passed,
        "tests": tests,
        "sources": sources,
        "output": "" if run.passed else run.output[-4000:],
    }


def covered_lines(
    paths: Iterable[Path], root: Path, places: Mapping[str, int]
) -> dict[str, tuple[str, dict[str, list[int]]]]:
    """Returns digest and lines of each source file in coverage's data files, as in a `Record`.

    A file of a process that was killed while it saved is left out.
    """
    sources: dict[str, tuple[str, dict[str, list[int]]]] = {}
    for path in paths:
        data = CoverageData(str(path))
        with contextlib.suppress(CoverageException):
            data.read()
            for measured in data.measured_files():
                source = Path(measured).relative_to(root).as_posix()
                _, lines = sources.setdefault(source, (digest_of(root / source), {}))
                for line, contexts in data.contexts_by_lineno(measured).items():
                    # Of a started program: its static context, "|", its dynamic one.
                    names = {one.rpartition("|")[2] or one.rstrip("|") for one in contexts}
                    found = {places.get(name, OUTSIDE) for name in names}
                    lines[str(line)] = sorted(found.union(lines.get(str(line), ())))
    return sources


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file; empty if there is no file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
