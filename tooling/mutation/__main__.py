"""The command of `nox -s mutation`: plants defects, runs tests that reach them, prints tables."""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from layouts.output import publish

from mutation import table, targets
from mutation.outcomes import Outcomes, checked, run_first_trials, run_trials
from mutation.plan import Planted, plan
from mutation.reach import Reach
from mutation.scratch import Scratch
from mutation.trial import Limit, Outcome
from mutation.warm import Workers

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".nox" / "mutation"
SURVIVORS = Path(__file__).with_name("survivors.toml")
WANTED = 92.0  # percent
OTHERS = " of others"  # suffix of outcomes with the other test files of a package


def main() -> int:
    """Runs everything; returns 0 if enough defects of every seed are caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seed", type=int, nargs="+", default=[1], help="seeds of the choice of defects (1)"
    )
    parser.add_argument("--each", type=int, default=4, help="defects per area (4)")
    parser.add_argument("--area", action="append", help="this area alone; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once (2)")
    parser.add_argument("--limit", type=float, default=60.0, help="CPU seconds per defect (60)")
    parser.add_argument(
        "--stretch", type=float, default=1.0, help="seconds by the clock for a CPU second (1)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep outcomes of runs of the same files and tests"
    )
    parser.add_argument("--write", type=Path, help="page to put the tables into")
    arguments = parser.parse_args()
    started = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutation-")))
        whole = Scratch.of(ROOT, folder / "whole")  # whatever is edited meanwhile
        copies = [whole.again(folder / str(place)) for place in range(arguments.jobs)]
        sources = targets.sources(whole.folder)
        areas = {name: sources[name] for name in arguments.area or sources}
        plans = {seed: plan(whole.folder, areas, arguments.each, seed) for seed in arguments.seed}
        drawn = [
            one for chosen, _, _ in plans.values() for found in chosen.values() for one in found
        ]
        every = list({one.defect.rank: one for one in drawn}.values())
        own, others = {}, {}
        for area, names in areas.items():
            own.update(dict.fromkeys(names, targets.test_files(whole.folder, area)))
            others.update(dict.fromkeys(names, targets.other_test_files(whole.folder, area)))
        workers = Workers(copies, slack=min(arguments.stretch, 5.0))
        stack.callback(workers.close)
        limit = Limit(arguments.limit, arguments.stretch)
        outcomes = try_all(every, own, others, whole, workers, limit, resume=arguments.resume)
    why, texts, failed = table.reasons(SURVIVORS), [], []
    for seed, (chosen, left_out, possible) in plans.items():
        rows = {
            area: [(one, outcomes[one.defect.rank]) for one in found]
            for area, found in chosen.items()
        }
        texts.append(f"Seed {seed}: " + table.tables(rows, why, left_out, possible))
        reached = table.percent([row for found in rows.values() for row in found])
        if reached < WANTED:
            failed.append(f"seed {seed}: {reached:.1f} % are caught; {WANTED} % are wanted")
    texts.append(f"Measured in {(time.monotonic() - started) / 60:.0f} minutes.\n")
    return publish("mutation", "\n".join(texts), failed, arguments.write)


def try_all(
    every: Sequence[Planted],
    own: Mapping[str, Sequence[str]],
    others: Mapping[str, Sequence[str]],
    whole: Scratch,
    workers: Workers,
    limit: Limit,
    *,
    resume: bool,
) -> dict[str, Outcome]:
    """Returns the outcomes of all defects by rank.

    Args:
        every: The defects.
        own: Test files of the area, by source file.
        others: The other test files of the package, by source file.
        whole: A copy of the repository without defects.
        workers: Where the tests run.
        limit: Budget of one defect.
        resume: Whether to use what an interrupted run has stored.
    """
    named = {source: [*own[source], *others[source]] for source in own}
    kept = Outcomes(FOLDER / "outcomes.json", resume=resume)
    say(f"{len(every)} defects: tests that name the file")
    outcomes = run_first_trials(named, every, whole.folder, workers, limit, kept, say)
    missed = [one for one in every if one.defect.rank not in outcomes]
    tests = dict.fromkeys(name for one in missed for name in named[one.defect.source])
    say(f"{len(missed)} defects left: which of {len(tests)} test files reach them")
    reach = Reach(whole.folder, FOLDER / "reach.json", resume=resume)
    reach.measure(missed, tests, workers, say)
    for suffix, files in (("", own), (OTHERS, others)):
        say(f"{len(missed)} defects left: tests{suffix or ' of the area'} that reach them")
        found = run_trials(files, missed, reach, workers, limit, kept, say, suffix)
        outcomes |= {rank: one for rank, one in found.items() if one.seen or rank not in outcomes}
        missed = [one for one in missed if not outcomes[one.defect.rank].seen]
    return checked(outcomes, workers, say)


def say(text: str) -> None:
    """Prints a line of progress."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
