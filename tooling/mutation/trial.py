"""One trial: a defect is planted in a copy, and the tests that reach it run."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from mutation.plan import Planted
from mutation.scratch import Scratch
from mutation.warm import Order, Run

BROKEN = "pytest itself"  # ended: by an import, a signal, an exit
CAUGHT, TIMED_OUT, SURVIVED = "caught", "timed out", "survived"
SHARE = 0.75  # of the limit: what the tests may take without a defect


@dataclass(frozen=True)
class Limit:
    """The budget of one defect.

    Attributes:
        seconds: CPU time.
        stretch: Wall-clock seconds per CPU second; more than 1 on a busy machine.
    """

    seconds: float
    stretch: float

    def order(self, tests: Sequence[str], expected: float, share: float = 1.0) -> Order:
        """Returns an order that runs tests until one fails, within a share of the time.

        A test that takes four times as long as without a defect counts as endless.
        """
        seconds = min(self.seconds, 10 + 4 * expected) * share
        return Order(tests, seconds, seconds * self.stretch, ("-x",))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a defect.

    Attributes:
        result: `CAUGHT`, `TIMED_OUT` (for example an endless loop) or `SURVIVED`.
        by: The first test that failed, the files that ran out of time, or the reason why none
            failed.
        tests: The chosen test files or single tests.
    """

    result: str
    by: str
    tests: tuple[str, ...]

    @property
    def seen(self) -> bool:
        """Whether the tests caught the defect."""
        return self.result != SURVIVED


def trial(
    copy: Scratch, planted: Planted, original: str, tests: Mapping[str, float], limit: Limit
) -> Generator[Order, Run, Outcome]:
    """Plants a defect in a copy, runs tests until one fails, and restores the copy.

    A run that ends without a named test, by time or otherwise, counts only if the same tests pass
    without the defect in half of the time.
    """
    ran = tuple(tests)
    expected = sum(tests.values())
    if not tests:
        return Outcome(SURVIVED, "no test reaches it", ran)
    groups = by_folder(tests)
    copy.write(planted.defect.source, planted.text)
    try:
        unnamed: list[str] = []
        for group in groups:
            run = yield limit.order(group, expected)
            if run.passed:
                continue
            if run.failed_tests and run.status is not None:
                return Outcome(CAUGHT, run.failed_tests[0], ran)
            unnamed, late = group, run.status is None
            break
    finally:
        copy.write(planted.defect.source, original)
    if not unnamed:
        return Outcome(SURVIVED, f"{len(tests)} test files or functions pass", ran)
    without = yield limit.order(unnamed, expected, 0.5)
    if not without.passed:
        return Outcome(SURVIVED, "its tests do not end well without it either", ran)
    if late:
        return Outcome(TIMED_OUT, ", ".join(unnamed), ran)
    return Outcome(CAUGHT, f"{BROKEN} in {unnamed[0].partition('::')[0]}", ran)


def by_folder(tests: Iterable[str]) -> list[list[str]]:
    """Groups files of one folder for one run of pytest; otherwise keeps the given order."""
    groups: dict[PurePosixPath, list[str]] = {}
    for name in tests:
        groups.setdefault(PurePosixPath(name.partition("::")[0]).parent, []).append(name)
    return list(groups.values())
