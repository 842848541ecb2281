"""The command of `nox -s mutation`: plants defects, runs tests that reach them, prints tables."""

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from layouts.output import publish

from mutation import table, targets
from mutation.outcomes import Outcomes, checked, run_first_trials, run_trials
from mutation.plan import plan
from mutation.reach import Reach
from mutation.scratch import Scratch
from mutation.trial import Limit
from mutation.warm import Workers

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".nox" / "mutation"
SURVIVORS = Path(__file__).with_name("survivors.toml")
WANTED = 92.0  # percent
OTHERS = " by others"  # suffix of outcomes with the other test files of a package


def main() -> int:
    """Runs everything; returns 0 if enough defects are caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="seed of the choice of defects (1)")
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
        chosen, left_out, possible = plan(whole.folder, areas, arguments.each, arguments.seed)
        say(f"seed {arguments.seed}")
        workers = Workers(copies, slack=min(arguments.stretch, 5.0))
        stack.callback(workers.close)
        reach = Reach(
            whole.folder,
            [name for names in sources.values() for name in names],
            FOLDER / "reach.json",
        )
        limit = Limit(arguments.limit, arguments.stretch)
        kept = Outcomes(FOLDER / "outcomes.json", resume=arguments.resume)
        tests = {
            area: (
                targets.test_files(whole.folder, area),
                targets.other_test_files(whole.folder, area),
            )
            for area in chosen
        }
        files = {
            one: [*own, *others] for area, (own, others) in tests.items() for one in areas[area]
        }
        every = [one for found in chosen.values() for one in found]
        outcomes = run_first_trials(files, every, whole.folder, workers, limit, kept, say)
        for area, found in chosen.items():
            own, others = tests[area]
            for suffix, names in (("", own), (OTHERS, others)):
                missed = [one for one in found if one.defect.rank not in outcomes]
                if suffix:
                    missed = [one for one in found if not outcomes[one.defect.rank].seen]
                if not missed:
                    continue
                say(f"{area}: {len(missed)} defects, {len(names)} test files")
                reach.measure(names, workers, say)
                more = run_trials(missed, names, reach, workers, limit, kept, say, suffix)
                outcomes |= {
                    rank: one for rank, one in more.items() if one.seen or rank not in outcomes
                }
        outcomes = checked(outcomes, workers, say)
    rows = {
        area: [(one, outcomes[one.defect.rank]) for one in found] for area, found in chosen.items()
    }
    why = table.reasons(SURVIVORS)
    text = f"Seed {arguments.seed}: " + table.tables(rows, why, left_out, possible)
    text += f"\nMeasured in {(time.monotonic() - started) / 60:.0f} minutes.\n"
    reached = table.percent([row for found in rows.values() for row in found])
    failed = [] if reached >= WANTED else [f"{reached:.1f} % are caught; {WANTED} % are wanted"]
    failed += [f"{name} does not pass without a defect" for name in reach.failing()]
    return publish("mutation", text, failed, arguments.write)


def say(text: str) -> None:
    """Prints a line of progress."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
