"""The outcome of every defect: run, stored, and checked against runs without a defect."""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from mutation.naming import in_function, naming_tests
from mutation.plan import Planted
from mutation.reach import Reach, digest_of
from mutation.scratch import Scratch
from mutation.targets import EVERYWHERE, integration_files
from mutation.trial import BROKEN, CAUGHT, SHARE, SURVIVED, Limit, Outcome, by_folder, trial
from mutation.warm import Order, Run, Workers

FIRST = " by name"  # suffix of outcomes with the tests that name a file
FIRST_SHARE = 0.25  # of the budget: what such a test file may take


class Outcomes:
    """Outcomes, stored in a file during a run."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        read = resume and path.exists()
        self.known: dict[str, dict[str, object]] = json.loads(path.read_text()) if read else {}

    def get(self, key: str, state: str) -> Outcome | None:
        """Returns the stored outcome of the same defect with the same code and tests."""
        row = self.known.get(key, {})
        if row.get("state") != state:
            return None
        tests = row["tests"]
        return Outcome(str(row["result"]), str(row["by"]), tuple(tests))  # type: ignore[arg-type]

    def put(self, key: str, state: str, outcome: Outcome) -> None:
        """Stores one outcome."""
        self.known[key] = {**asdict(outcome), "state": state}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.known, indent=1))


def run_trials(
    every: Mapping[str, Sequence[str]],
    planted: Sequence[Planted],
    reach: Reach,
    workers: Workers,
    limit: Limit,
    kept: Outcomes,
    report: Callable[[str], None],
    suffix: str = "",
) -> dict[str, Outcome]:
    """Returns the outcome of every defect by its rank, with tests that are known to reach it.

    The outcomes are stored under the rank and `suffix`. The other arguments are those of
    `run_first_trials`, with `reach` instead of a folder.
    """
    outcomes: dict[str, Outcome] = {}

    def one(defect: Planted, copy: Scratch) -> Generator[Order, Run, None]:
        source, rank = defect.defect.source, defect.defect.rank
        original = (copy.folder / source).read_text(encoding="utf-8")
        tests = reach.reaching(every[source], rank, limit.seconds * SHARE)
        used = dict.fromkeys(name.partition("::")[0] for name in tests)
        digests = [digest_of(reach.root / name)[:8] for name in (source, *used)]
        state = " ".join([*digests, *tests])
        outcome = kept.get(rank + suffix, state)
        if outcome is None:
            outcome = yield from trial(copy, defect, original, tests, limit)
            kept.put(rank + suffix, state, outcome)
        outcomes[rank] = outcome
        report(f"{len(outcomes)}/{len(planted)} {outcome.result}: {defect.key}\n    {outcome.by}")

    workers.work(partial(one, defect) for defect in planted)
    return outcomes


def run_first_trials(
    every: Mapping[str, Sequence[str]],
    planted: Sequence[Planted],
    root: Path,
    workers: Workers,
    limit: Limit,
    kept: Outcomes,
    report: Callable[[str], None],
) -> dict[str, Outcome]:
    """Returns the outcomes of the defects that tests notice which name the changed file.

    These tests run without a measurement of what they reach. The other defects are left out.

    Args:
        every: Test files to choose from, by source file.
        planted: The defects.
        root: Folder of the repository.
        workers: Where the tests run.
        limit: Budget of one defect.
        kept: Stored outcomes.
        report: Prints a line of progress.
    """
    outcomes: dict[str, Outcome] = {}
    integration = integration_files(root)
    done = 0

    def one(defect: Planted, copy: Scratch) -> Generator[Order, Run, None]:
        nonlocal done
        source = defect.defect.source
        original = (copy.folder / source).read_text(encoding="utf-8")
        files = naming_tests(root, every[source], source)
        files += naming_tests(root, integration, source, most=1)  # run after the others
        if not in_function(original, defect.defect.line):
            files = list(dict.fromkeys([*files, *EVERYWHERE]))
        state = " ".join(digest_of(root / name)[:8] for name in (source, *files))
        outcome = kept.get(defect.defect.rank + FIRST, state)
        if outcome is None:
            tests = dict.fromkeys(files, limit.seconds * FIRST_SHARE)
            outcome = yield from trial(copy, defect, original, tests, limit)
            kept.put(defect.defect.rank + FIRST, state, outcome)
        done += 1
        if outcome.result == CAUGHT:
            outcomes[defect.defect.rank] = outcome
            report(f"{done}/{len(planted)} {outcome.result}: {defect.key}\n    {outcome.by}")
        else:
            report(f"{done}/{len(planted)} later: {defect.key}")

    workers.work(partial(one, defect) for defect in planted)
    return outcomes


def checked(
    outcomes: Mapping[str, Outcome], workers: Workers, report: Callable[[str], None]
) -> dict[str, Outcome]:
    """Returns the outcomes without defects caught by a test that also fails without the defect."""
    catchers = {found.by for found in outcomes.values() if found.result == CAUGHT}
    catchers = sorted(name for name in catchers if not name.startswith(BROKEN))
    failing: set[str] = set()

    def one(tests: list[str], copy: Scratch) -> Generator[Order, Run, None]:
        run = yield Order(tests, 900.0, 3600.0)
        failing.update(run.failed_tests if run.status in (0, 1) else tests)

    workers.work(partial(one, group) for group in by_folder(catchers))
    for name in failing:
        report(f"fails without a defect, too: {name}")
    return {
        key: Outcome(SURVIVED, f"{found.by} fails without it, too", found.tests)
        if found.by in failing
        else found
        for key, found in outcomes.items()
    }
