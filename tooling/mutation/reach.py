"""Which tests reach which defects: runs every test file once on code with a probe at each defect.

Tests with probes take as long as without; under coverage they took twice as long.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mutation.plan import Planted
from mutation.probes import CODE, module_of, probed
from mutation.scratch import Scratch
from mutation.warm import Order, Run, Workers

LIMIT = 600.0  # CPU seconds for one test file
PATIENCE = 3600.0  # seconds by the clock

Record = dict[str, Any]
"""Of one test file: CPU seconds of all and of each test function, and by rank of a defect the test
functions that reach it, with "" for what runs outside of them."""


class Reach:
    """Records by test file of the defects that it reaches.

    Args:
        root: Folder of the repository.
        kept: Where to store the records during a run.
        resume: Whether to use stored records of the same code, tests and defects.
    """

    def __init__(self, root: Path, kept: Path, *, resume: bool) -> None:
        self.root = root
        self.kept = kept
        self.records: dict[str, Record] = {}
        self._stored = json.loads(kept.read_text()) if resume and kept.exists() else {}

    def measure(
        self,
        planted: Sequence[Planted],
        tests: Iterable[str],
        workers: Workers,
        report: Callable[[str], None],
    ) -> None:
        """Runs each test file on copies with a probe at each of the defects.

        The longest files come first, so that all processes end together.
        """
        names = sorted(tests, key=lambda name: -(self.root / name).stat().st_size)
        ranks = [one.defect.rank for one in planted]
        sources = {one.defect.source for one in planted}
        files = {name: digest_of(self.root / name) for name in sorted({*names, *sources})}
        state = hashlib.sha256(json.dumps([ranks, files]).encode()).hexdigest()
        if self._stored.get("state") == state:
            self.records = self._stored["records"]
        with workers.changed(probed_files(self.root, planted)):
            left = [name for name in names if name not in self.records]

            def one(name: str, copy: Scratch) -> Generator[Order, Run, None]:
                record = yield from run_probed(copy, name, ranks)
                self.records[name] = record
                stored = {"state": state, "records": self.records}
                self.kept.parent.mkdir(parents=True, exist_ok=True)
                self.kept.write_text(json.dumps(stored))
                count = len(self.records)
                word = f"{record['seconds']:.0f} s, reaches {len(record['reached'])}"
                report(f"{count}/{len(names)} {name} {word}")

            workers.work(partial(one, name) for name in left)

    def reaching(self, names: Sequence[str], rank: str, limit: float) -> dict[str, float]:
        """Returns tests of these files that reach a defect, for up to `limit` CPU seconds.

        Short ones come first. What a file reaches outside its test functions is reached by the
        whole file, or by its shortest tests if the whole file does not fit.
        """
        found = [part for name in names for part in self._parts(name, rank, limit)]
        chosen: dict[str, float] = {}
        for seconds, test in sorted(found):
            if seconds > limit:
                break
            limit -= seconds
            chosen[test] = seconds
        return chosen

    def _parts(self, name: str, rank: str, limit: float) -> list[tuple[float, str]]:
        """Returns what to run of a test file, with CPU seconds: the file or some functions."""
        record = self.records[name]
        tests: dict[str, float] = record["tests"]
        reached = record["reached"].get(rank, ())
        if "" in reached and record["seconds"] <= limit:
            return [(record["seconds"], name)]
        inside = [test for test in tests if test in reached]
        wanted = inside or (tests if "" in reached else ())
        return [(tests[test], test) for test in wanted]


def probed_files(root: Path, planted: Sequence[Planted]) -> dict[str, str]:
    """Returns the texts of all files that probes change or need; a probe has its defect's place."""
    lines: dict[str, dict[int, int]] = {}
    for number, one in enumerate(planted):
        lines.setdefault(one.defect.source, {})[number] = one.defect.line
    files = {module_of(source): CODE for source in lines}
    return files | {
        source: probed((root / source).read_text(encoding="utf-8"), found)
        for source, found in lines.items()
    }


def run_probed(copy: Scratch, name: str, ranks: Sequence[str]) -> Generator[Order, Run, Record]:
    """Runs one test file in a copy with probes; returns its record."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        hits = Path(folder)
        run = yield Order([name], LIMIT, PATIENCE, hits=hits)
        took = hits / "seconds.json"
        tests: dict[str, float] = json.loads(took.read_text()) if took.exists() else {}
        reached = {
            rank: sorted(set(path.read_text().splitlines()))
            for number, rank in enumerate(ranks)
            if (path := hits / str(number)).exists()
        }
    return {"seconds": run.seconds, "tests": tests, "reached": reached}


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file; empty if there is no file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
